"""The opponent: the GPT recipe of nanoGPT's CPU run in our own plain PyTorch, eager float32. No jaxml, no jax.

Written from the description of the recipe (github.com/karpathy/nanoGPT, README), not from its code.
`benchmarks/run.py` starts it as a process of its own; it prints one JSON object on its last line.

    python benchmarks/torch_nanogpt.py --time-steps 20 --layers 6 --heads 6 --width 384 --context 256 --batch 16
    python benchmarks/torch_nanogpt.py --train --text experiments/data/tinyshakespeare/input.txt
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

CLOCK_TICKS_PER_S = 100
TEXT = Path(__file__).parent.parent / "experiments" / "data" / "tinyshakespeare" / "input.txt"


@dataclass(frozen=True)
class Size:
    """The numbers of one GPT: head width is width / heads, the feed-forward piece is four times the width."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    vocab: int = 65


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): causal attention, exact GELU, no bias anywhere, no dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width, bias=False)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.output = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.LayerNorm(size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        B, T, D = x.shape
        heads = self.qkv(self.attention_norm(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    """Token and learned position tables, the blocks, a last norm; the head is the token table.

    Initial weights as in GPT-2: normal with 0.02, the two products that write to the residual stream divided by
    sqrt(2 * layers).
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            is_residual = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers) if is_residual else 0.02)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats of int64 [B, T] targets."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """AdamW(0.9, 0.99), decay 0.1 on matrices only, clip at 1.0, warm-up 100 then cosine from 1e-3 to 1e-4."""

    peak, final, warmup = 1e-3, 1e-4, 100

    def __init__(self, size: Size, seed: int, steps: int = 2_000) -> None:
        torch.manual_seed(seed)
        self.steps = steps
        self.model = Gpt(size)
        parameters = list(self.model.parameters())
        matrices = [p for p in parameters if p.dim() >= 2]
        rest = [p for p in parameters if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.peak, betas=(0.9, 0.99))

    def learning_rate(self, step: int) -> float:
        """The rate of the update that follows `step` finished ones."""
        if step < self.warmup:
            return self.peak * (step + 1) / (self.warmup + 1)
        progress = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.final + (self.peak - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    def step(self, step: int, tokens: Tensor, targets: Tensor) -> float:
        """One update; returns its training loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        loss = self.model.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


@dataclass(frozen=True)
class Text:
    """Tiny Shakespeare as int64 character ids: the first 90 % to train, the rest to validate."""

    train: Tensor
    validation: Tensor
    vocab: int

    @classmethod
    def read(cls, path: Path) -> Text:
        """The vocabulary is the sorted set of all characters of the file."""
        text = path.read_text(encoding="utf-8")
        ids = {character: i for i, character in enumerate(sorted(set(text)))}
        encoded = torch.tensor([ids[character] for character in text])
        border = int(0.9 * len(encoded))
        return cls(encoded[:border], encoded[border:], len(ids))

    def crops(self, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """`batch` random windows of the training part, and the same moved by one."""
        starts = torch.randint(len(self.train) - context, (batch, 1))
        windows = self.train[starts + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def validation_loss(model: Gpt, ids: Tensor, context: int, rows: int = 64) -> float:
    """Mean loss over the whole of `ids` in windows that do not overlap; the last, shorter window counts too."""
    num_targets = len(ids) - 1
    total, whole = 0.0, num_targets // context * context
    tokens, targets = ids[:whole].view(-1, context), ids[1 : whole + 1].view(-1, context)
    for first in range(0, len(tokens), rows):
        part = slice(first, first + rows)
        total += model.loss(tokens[part], targets[part]).item() * targets[part].numel()
    if whole < num_targets:
        total += model.loss(ids[whole:-1][None], ids[whole + 1 :][None]).item() * (num_targets - whole)
    return total / num_targets


def seconds_since_process_start() -> float:
    """Wall time since the kernel started this process (Linux), so that imports count."""
    started_ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - started_ticks / CLOCK_TICKS_PER_S


def time_steps(size: Size, num_steps: int, warm_up: int, seed: int) -> dict:
    """Median seconds of one update on random tokens, after `warm_up` that do not count."""
    trainer = Trainer(size, seed)
    seconds = []
    for step in range(num_steps + warm_up):
        ids = torch.randint(size.vocab, (size.batch, size.context + 1))
        start = time.perf_counter()
        trainer.step(step, ids[:, :-1], ids[:, 1:])
        seconds.append(time.perf_counter() - start)
    step_s = statistics.median(seconds[warm_up:])
    return {"step_s": step_s, "tokens_per_s": size.batch * size.context / step_s, "min_step_s": min(seconds[warm_up:])}


def train(size: Size, text: Text, seed: int, steps: int, evaluate_every: int) -> dict:
    """The whole recipe. `points` are [steps, wall seconds since process start, whole-split validation loss]."""
    trainer = Trainer(size, seed, steps)
    points = []
    for step in range(trainer.steps):
        trainer.step(step, *text.crops(size.batch, size.context))
        is_last = step + 1 == trainer.steps
        if is_last or (evaluate_every and (step + 1) % evaluate_every == 0):
            loss = validation_loss(trainer.model, text.validation, size.context)
            points.append([step + 1, round(seconds_since_process_start(), 3), loss])
            print(f"step {step + 1}: validation loss {loss:.4f}, {points[-1][1]:.1f} s", file=sys.stderr)
    return {"validation_loss": points[-1][2], "wall_s": points[-1][1], "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--time-steps", type=int, metavar="N", help="median time of N updates on random tokens")
    mode.add_argument("--train", action="store_true", help="updates on the text, then the whole validation split")
    parser.add_argument("--updates", type=int, default=2_000, help="of --train; the schedule ends with them")
    parser.add_argument("--warm-up", type=int, metavar="N", default=3, help="updates before those that count")
    for name, default in (("layers", 4), ("heads", 4), ("width", 128), ("context", 64), ("batch", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--evaluate-every", type=int, default=0, help="more points, their time counts (0: only the last)"
    )
    parser.add_argument("--seed", type=int, default=1337)
    args = parser.parse_args()
    size = Size(args.layers, args.heads, args.width, args.context, args.batch)
    if args.train:
        text = Text.read(args.text)
        size = Size(args.layers, args.heads, args.width, args.context, args.batch, vocab=text.vocab)
        result = train(size, text, args.seed, args.updates, args.evaluate_every)
    else:
        result = time_steps(size, args.time_steps, args.warm_up, args.seed)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), **asdict(size), **result}))


if __name__ == "__main__":
    main()
