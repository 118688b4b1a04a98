"""Times jaxml's own training step, the one that `jaxml train` runs, at a size given by flags.

`benchmarks/run.py` starts it as a process of its own; it prints one JSON object. Same model, batch, precision, optimizer
and clipping as `torch_nanogpt.py --time-steps`, on random tokens.

    python benchmarks/jaxml_steps.py --time-steps 20 --layers 6 --heads 6 --width 384 --context 256 --batch 16
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator

import jax
import numpy as np

from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.devices.start import tune_allocator
from jaxml.models.cost import flops_per_token
from jaxml.models.presets import nanogpt_cpu
from jaxml.models.spec import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec
from jaxml.tasks.spec import LanguageModeling
from jaxml.train.spec import AdamW, OptimizerSpec, ScheduleSpec, TrainSpec
from jaxml.train.step import Program, build_program


def model(layers: int, heads: int, width: int, context: int) -> DecoderSpec:
    """nanoGPT's pieces at another size."""
    base = nanogpt_cpu()
    block = BlockSpec(AttentionSpec(heads, heads, width // heads), MlpSpec(4 * width, "gelu"), base.blocks[0].norm)
    return dataclasses.replace(base, num_layers=layers, width=width, context_length=context, blocks=(block,))


def program(spec: DecoderSpec, batch: int, accumulate: int = 1) -> Program:
    """The step of nanoGPT's recipe: AdamW(0.9, 0.99), decay 0.1 on matrices, clip 1.0, warm-up 100, cosine."""
    optimizer = OptimizerSpec(AdamW(0.9, 0.99), 1e-3, ScheduleSpec("cosine", warmup_steps=100))
    train = TrainSpec(steps=2000, batch_size=batch, accumulate=accumulate)
    mesh = build_mesh(MeshSpec(data=1))
    return build_program(spec, LanguageModeling(), optimizer, train, mesh)


def batches(spec: DecoderSpec, batch: int) -> Iterator[dict[str, np.ndarray]]:
    """Random tokens in full rows."""
    draw = np.random.default_rng(0)
    shape = (batch, spec.context_length)
    while True:
        tokens = draw.integers(spec.vocab_size, size=(batch, spec.context_length + 1), dtype=np.int32)
        yield {
            "tokens": tokens[:, :-1].copy(),
            "targets": tokens[:, 1:].copy(),
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
            "segment_ids": np.ones(shape, np.int32),
            "loss_mask": np.ones(shape, bool),
            "row": np.arange(batch, dtype=np.int32),
        }


def time_steps(spec: DecoderSpec, batch: int, accumulate: int, num_steps: int, warm_up: int) -> dict[str, float]:
    """Median seconds of one update with its metrics on the host, after `warm_up` that do not count."""
    step = program(spec, batch, accumulate)
    source = batches(spec, batch)
    state = step.init(0)
    seconds = []
    for _ in range(num_steps + warm_up):
        columns = next(source)
        begun = time.perf_counter()
        state, metrics = step.train_step(state, columns)
        float(metrics["loss"])
        seconds.append(time.perf_counter() - begun)
    step_s = statistics.median(seconds[warm_up:])
    tokens_per_s = batch * spec.context_length / step_s
    gflop_per_s = tokens_per_s * flops_per_token(spec, spec.context_length) / 1e9
    return {
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "min_step_s": min(seconds[warm_up:]),
        "gflop_per_s": gflop_per_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-steps", type=int, metavar="N", default=20)
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches: same gradient, smaller working set")
    parser.add_argument("--warm-up", type=int, metavar="N", default=3, help="updates before those that count")
    for name, default in (("layers", 4), ("heads", 4), ("width", 128), ("context", 64), ("batch", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    tune_allocator()
    spec = model(args.layers, args.heads, args.width, args.context)
    print(
        json.dumps(
            {"jax": jax.__version__, **time_steps(spec, args.batch, args.accumulate, args.time_steps, args.warm_up)}
        )
    )


if __name__ == "__main__":
    main()
