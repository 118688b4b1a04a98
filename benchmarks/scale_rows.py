"""Measures the rows of `benchmarks/run.py scale`, section by section: each a function of a Plan that returns rows.

Reads `interleave`, `plan` and `scale_step.py`, which it starts; what the rows must reach and how the page tells it stands in
`verbs`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.interleave import Row, take_turns
from benchmarks.plan import Plan, script, told

AXES = ("data", "fsdp", "tensor", "context")
DEVICES = 4
DEPTHS = (2, 8, 16)
# What of `precision.compute` is compared with float32; float8 needs an extra package.
PRECISIONS = ("bfloat16", "float16", "float8")
TIME_STEPS, PAIRED_STEPS = 20, 40


def overhead(plan: Plan) -> list[Row]:
    """The step on four fake devices along each axis against one device, on the same batch and the same cores."""
    words = ["--time-steps", "2" if plan.is_quick else str(TIME_STEPS)]
    rivals = {"one device": _step(plan, *words)}
    rivals |= {f"{axis}={DEVICES}": _step(plan, *words, "--mesh", f"{axis}={DEVICES}") for axis in AXES}
    samples = take_turns({name: told(name, run) for name, run in rivals.items()}, plan.repeats, warm_ups=0)
    seconds = {name: tuple(sample["step_s"] for sample in taken) for name, taken in samples.items()}
    rows = [Row(f"step, {name}", "ms", tuple(1e3 * s for s in values)) for name, values in seconds.items()]
    single = seconds.pop("one device")
    for name, values in seconds.items():
        rows.append(
            Row(f"time / one device, {name}", "ratio", tuple(a / b for a, b in zip(values, single, strict=True)))
        )
    return rows


def collectives(plan: Plan) -> list[Row]:
    """What one device sends in a step, from the compiled program, against the least that it has to."""
    rows = []
    for axis in AXES:
        name = f"{axis}={DEVICES}"
        rows += moved_rows(name, told(f"sent, {name}", _step(plan, "--mesh", name))())
    return rows


def moved_rows(name: str, sample: dict[str, Any]) -> list[Row]:
    """Megabytes by kind of collective, in all, and over the least."""
    kinds, least = sample["moved_bytes"], sample["smallest_bytes"]
    rows = [Row(f"sent by {kind}, {name}", "MB", (size / 1e6,)) for kind, size in sorted(kinds.items()) if size >= 1e4]
    total = sum(kinds.values())
    return [*rows, Row(f"sent, {name}", "MB", (total / 1e6,)), Row(f"sent / least, {name}", "ratio", (total / least,))]


def compiling(plan: Plan) -> list[Row]:
    """Seconds to compile the step, by depth, unrolled and scanned."""
    depths = DEPTHS[:2] if plan.is_quick else DEPTHS
    rivals = {
        f"{layers} layers, {execution}": _step(plan, "--layers", str(layers), "--execution", execution, "--width", "64")
        for execution in ("unrolled", "scanned")
        for layers in depths
    }
    samples = take_turns({name: told(name, run) for name, run in rivals.items()}, min(plan.repeats, 3), warm_ups=0)
    seconds = {name: tuple(sample["compile_s"] for sample in taken) for name, taken in samples.items()}
    rows = [Row(f"compile {name}", "s", values) for name, values in seconds.items()]
    first, last = depths[0], depths[-1]
    for execution in ("unrolled", "scanned"):
        pairs = zip(seconds[f"{last} layers, {execution}"], seconds[f"{first} layers, {execution}"], strict=True)
        rows.append(Row(f"compile {last} / {first} layers, {execution}", "ratio", tuple(a / b for a, b in pairs)))
    return rows


def digests(plan: Plan) -> list[Row]:
    """The share of the step that digests take: programs with and without them in turns within one process."""
    measure = told("digests", _step(plan, "--against", "digests", *_paired(plan)))
    return [
        Row("digests, share of the step", "ratio", tuple(measure()["ratio"] - 1 for _ in range(plan.repeats)), True)
    ]


def precision(plan: Plan) -> list[Row]:
    """The step in each low precision over that in float32, in turns within one process. On a CPU none is meant to pay."""
    rows = []
    for compute in PRECISIONS:
        name = f"step in {compute} / float32"
        if compute == "float8" and importlib.util.find_spec("qwix") is None:
            plan.skipped[name] = "no Qwix (extra `float8`)"
            continue
        measure = told(name, _step(plan, "--against", compute, *_paired(plan)))
        rows.append(Row(name, "ratio", tuple(measure()["ratio"] for _ in range(plan.repeats))))
    return rows


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "overhead": overhead,
    "collectives": collectives,
    "compile": compiling,
    "digests": digests,
    "precision": precision,
}


def _step(plan: Plan, *words: str) -> Callable[[], dict[str, Any]]:
    return script(plan, sys.executable, "scale_step.py", *words)


def _paired(plan: Plan) -> list[str]:
    return ["--time-steps", "2" if plan.is_quick else str(PAIRED_STEPS)]
