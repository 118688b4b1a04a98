"""The groups of rows that `benchmarks/run.py` measures, one a verb: what they must reach and how they are measured.

Read by `page` and `run`. No code that measures: see `train_rows`, `decode_rows`, `serve_rows` and `scale_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def number(value: float) -> str:
    """Three significant digits (four around 1 to 10), thousands separated."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 1 <= abs(value) < 10 else f"{value:.3g}"


@dataclass(frozen=True)
class Aim:
    """What a row should reach. `pass_line`: the weaker value that is still acceptable, where there is one."""

    value: float
    is_at_least: bool = False
    pass_line: float | None = None

    def is_met(self, got: float) -> bool:
        return self._reaches(got, self.value)

    def verdict(self, got: float) -> str:
        """Met or missed, and by how much of the aim."""
        gap = abs(got / self.value - 1)
        told = f"{'met' if self.is_met(got) else 'missed'} by {gap:.0%}" if gap >= 0.005 else "met"
        if not self.is_met(got):
            told = f"**{told if gap >= 0.005 else f'missed by {gap:.2%}'}**"
            if self.pass_line is not None:
                passed = self._reaches(got, self.pass_line)
                told += f"; pass line {number(self.pass_line)} {'met' if passed else '**missed**'}"
        return told

    def __str__(self) -> str:
        return f"{'at least' if self.is_at_least else 'at most'} {number(self.value)}"

    def _reaches(self, got: float, line: float) -> bool:
        return got >= line if self.is_at_least else got <= line


@dataclass(frozen=True)
class Verb:
    """One section of the page. `how`: Markdown bullets; `panels`: title of each small plot to the rows that are its bars;
    `plot`: its file's name."""

    title: str
    aims: Mapping[str, Aim]
    how: str
    panels: Mapping[str, tuple[str, ...]]
    plot: str


TRAIN_AIMS = {
    "jaxml / torch 4x4x128": Aim(1.4, is_at_least=True),
    "jaxml / torch 6x6x384": Aim(1.0, is_at_least=True, pass_line=0.9),
    "first step, cold": Aim(10.0),
    "first step, warm": Aim(4.0),
    "checkpoint stall, share": Aim(0.05),
    "resume": Aim(5.0),
    "seek to step 1,000,000": Aim(1000.0),
    "nanogpt_cpu validation loss": Aim(1.88),
    "torch / nanogpt_cpu, cold": Aim(3.0, is_at_least=True, pass_line=2.0),
    "torch / nanogpt_cpu, warm": Aim(3.0, is_at_least=True, pass_line=2.0),
}

TRAIN_HOW = """\
- **Peak and bandwidth** (`benchmarks/machine.py`): the best of a few short calls at training shapes, by JAX; 2MKN
  operations a product, one read of the matrix.
- **Steps**: `benchmarks/jaxml_steps.py` (the jitted step that `jaxml train` runs) and `benchmarks/torch_nanogpt.py` (our
  own plain PyTorch, eager): the same model, batch, float32 precision, optimizer and clipping, on random tokens. 4x4x128
  has batch 12 and context 64, 6x6x384 batch 16 and context 256 (jaxml: in 4
  microbatches, `train.accumulate`, which is the same gradient). A sample is the median update of a new process, after
  some that do not count. Machine and both sides take turns, every second round backwards; ratios and shares are taken
  round by round. The share counts the model's FLOPs (6N and attention).
- **First step**: from starting `jaxml train experiments/shakespeare.py`, data prepared, to the first line of
  `metrics.jsonl`. Cold has an empty compilation cache, warm a filled one.
- **Checkpoint stall**: the same experiment at its own cadence, killed soon after its second save; `checkpoint_s` of
  the step after each save, and their sum over the time of stepping (waits for data and stalls included, evaluations left
  out). The first save also sets things up, so in a longer run the share is smaller.
- **Resume**: that run is killed; from starting `jaxml resume` on a copy of it, with a filled compilation cache, to its
  first new line of `metrics.jsonl`.
- **Seek**: `TrainBatches.batch(1_000_000)` on the opened data, in a new process each time.
- **nanogpt_cpu**: `experiments/nanogpt_cpu.py` with three seeds (of weights and of the order of rows) against one run of
  `torch_nanogpt.py --train` (2,000 updates, seed 1337) between the first two of ours. Clocks run from the start of the
  process to the evaluation of the whole validation split, which comes last. Preparing the data counts in ours. Cold is
  the first seed, with an empty compilation cache; warm are the other two."""

DECODE_AIMS = {
    "jaxml / bound gpt2-124m, 1 row": Aim(0.8, is_at_least=True),
    "jaxml / transformers gpt2-124m, 1 row": Aim(1.8, is_at_least=True),
    "jaxml / transformers stories260k, 1 row": Aim(10.0, is_at_least=True),
    "jaxml / llama.cpp llama-12x768, 1 row": Aim(0.85, is_at_least=True),
    "jaxml / llama.cpp stories260k, 1 row": Aim(2.0, is_at_least=True),
}

DECODE_HOW = """\
- **Models**: stories260k is the trained 260K-parameter Llama of the assets (random weights where they are not there);
  gpt2-124m has the shape of GPT-2 124M and random weights; llama-12x768 is a Llama of the same size with random weights
  (12 layers, width 768, 12 heads, MLP 2,048, vocabulary 32,000, tied head: 109.5 million parameters, all read for every
  token). Everything is float32, greedy, and uses as many threads as there are cores.
- **Tokens/s**: a call that generates N tokens after a prompt of one token, less a call that generates one: rows x (N - 1)
  over the difference of the medians of at least three rounds in one process. N is 199 for stories260k and 64 for the
  others. Each sample is a new process; all rivals of a model take turns, every second round backwards; shares and ratios
  are taken turn by turn. On stories260k all rivals must give the same tokens.
- **jaxml** (`benchmarks/jaxml_decode.py`): `LanguageModel.generate` on a sealed checkpoint, as scripts call it. Eight
  prompts join one after another, and that is part of the number.
- **Bound** (`benchmarks/bound.py`): the bytes of the weights and of the part of the cache that is in use, which a step
  must read, over the best matrix-vector product in the same process (three shapes from 64 to 512 MB, `W @ x` and
  `x @ W`, before and after). stories260k fits into the cache of a core, and its time is not that of reading.
- **transformers** (`benchmarks/torch_decode.py`): `generate` with its cache, eager, on torch's CPU.
- **llama.cpp** (`benchmarks/llama_cpp_decode.py`): one text through llama-cpp-python, on a GGUF file of the same float32
  weights that `benchmarks/gguf_llama.py` writes; the faster of its own decode and greedy sampler with a float32 cache, and
  of `Llama.generate` with its default, a float16 cache."""

SERVE_AIMS = {"jaxml serve ready, warm": Aim(10.0)}

SERVE_HOW = """\
- **Load** (`benchmarks/http_load.py`): 1, 4 and 8 clients on connections of their own, each asking again as soon as it was
  answered, for 5 s, from one asyncio process on raw sockets that shares the machine with the server. Every request has
  the same prompt of five tokens and is answered by 64, greedily, by stories260k. The client's own share of a core is a
  row of its own.
- **TTFT** is the time from sending a request to its first text, **TPOT** that from its first text to its end over the 63
  tokens after the first (near 0 where both come in one burst). p50 and p95 are over the requests of one load; a p95 stands
  for its worst repeat.
- **jaxml serve** streams over server-sent events at `/v1/completions`; *whole* rows ask without `stream`.
- **LitServe loop** (`benchmarks/litserve_plain.py`): LitServe's own prediction loop over the same `LanguageModel` and
  checkpoint, one request at a time: `stream` behind its streaming loop, and `generate` for the *whole* rows.
- **Ready**: from starting the process to the first 200 of its readiness path. Warm has a filled compilation cache, cold an
  empty one. Each turn starts each server anew, and every second one runs backwards; ratios are taken turn by turn."""

SCALE_AIMS = {
    "sent / least, data=4": Aim(1.05),
    "sent / least, fsdp=4": Aim(1.05),
    "sent / least, tensor=4": Aim(1.25),
    "sent / least, context=4": Aim(1.25),
    "compile 16 / 2 layers, scanned": Aim(1.2),
    "digests, share of the step": Aim(0.02),
}

SCALE_HOW = """\
- **Model** (`benchmarks/scale_step.py`): 4 scanned layers of width 128 with 4 heads, MLP 384, vocabulary 256, tied head,
  float32, AdamW, 8 rows of 256 random tokens; the step that `jaxml train` runs.
- **Overhead**: the median of 20 steps of a new process on four fake CPU devices, which share the machine's cores, over that
  on one device with the same batch: what splitting costs, never what it gains. One device, too, uses all cores. All meshes
  take turns, every second round backwards; ratios are taken round by round.
- **Sent** (`benchmarks/collectives.py`): the bytes that one device sends in a step, read from the text of the compiled
  program; loops count as often as they turn, and each collective goes round a ring. *Least*: `data` reduces each gradient
  once; `fsdp` gathers each weight once and scatters its gradient once; `tensor` sums twice a layer going forward and twice
  going back, and once for the embedding and the head; `context` gathers keys and values once a layer, scatters their
  gradients, and reduces the weights' gradients. XLA's CPU compiler has no reduce-scatter of its own: there a gradient of
  `fsdp` is reduced whole, which sends twice as much.
- **Compile**: the step of a model of width 64, lowered and compiled by a new process without a cache.
- **Digests, precision**: two programs take turns step by step within one process, 40 steps each; the median of the ratios of
  neighbouring steps. CPUs have no arithmetic below float32: low precision costs conversions there."""

VERBS = {
    "train": Verb(
        "Training",
        TRAIN_AIMS,
        TRAIN_HOW,
        {
            "Step 4x4x128, tokens/s": ("jaxml step 4x4x128", "torch step 4x4x128"),
            "Step 6x6x384, tokens/s": ("jaxml step 6x6x384", "torch step 6x6x384"),
            "From the command, s": ("first step, cold", "first step, warm", "resume"),
            "nanoGPT's CPU model, s": (
                "nanogpt_cpu to its evaluation, cold",
                "nanogpt_cpu to its evaluation, warm",
                "torch nanogpt to its evaluation",
            ),
        },
        "benchmarks.svg",
    ),
    "decode": Verb(
        "Decoding",
        DECODE_AIMS,
        DECODE_HOW,
        {
            "stories260k, 1 row, tokens/s": (
                "jaxml stories260k, 1 row",
                "transformers stories260k, 1 row",
                "llama.cpp stories260k, 1 row",
            ),
            "stories260k, 8 rows, tokens/s": ("jaxml stories260k, 8 rows", "transformers stories260k, 8 rows"),
            "124M, 1 row, tokens/s": (
                "bound gpt2-124m, 1 row",
                "jaxml gpt2-124m, 1 row",
                "transformers gpt2-124m, 1 row",
                "jaxml llama-12x768, 1 row",
                "llama.cpp llama-12x768, 1 row",
            ),
            "124M, 8 rows, tokens/s": ("jaxml gpt2-124m, 8 rows", "transformers gpt2-124m, 8 rows"),
        },
        "benchmarks-decode.svg",
    ),
    "serve": Verb(
        "Serving",
        SERVE_AIMS,
        SERVE_HOW,
        {
            f"{what}, {unit}": tuple(
                f"{server} {what}, {streams}"
                for streams in ("1 stream", "4 streams", "8 streams")
                for server in ("jaxml serve", "LitServe loop")
            )
            for what, unit in (("tokens", "tokens/s"), ("TTFT p50", "ms"), ("TPOT p50", "ms"), ("TTFT p95", "ms"))
        },
        "benchmarks-serve.svg",
    ),
    "scale": Verb(
        "Scale",
        SCALE_AIMS,
        SCALE_HOW,
        {
            "Time on four fake devices over one": tuple(
                f"time / one device, {axis}=4" for axis in ("data", "fsdp", "tensor", "context")
            ),
            "Sent over the least": tuple(f"sent / least, {axis}=4" for axis in ("data", "fsdp", "tensor", "context")),
            "Compiling, s": tuple(
                f"compile {layers} layers, {execution}"
                for execution in ("unrolled", "scanned")
                for layers in (2, 8, 16)
            ),
            "Step over that in float32": tuple(
                f"step in {dtype} / float32" for dtype in ("bfloat16", "float16", "float8")
            ),
        },
        "benchmarks-scale.svg",
    ),
}
