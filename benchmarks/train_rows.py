"""Measures the rows of `benchmarks/run.py train`, section by section: each a function of a Plan that returns rows.

Reads `interleave`, `plan`, `processes`; what the rows must reach and how the page tells it stands in `verbs`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.interleave import Row, ratio, take_turns
from benchmarks.plan import JAXML, Plan, script, told
from benchmarks.processes import environment, last_line, run_json, time_until

SHAKESPEARE = "experiments/shakespeare.py"
NANOGPT_CPU = "experiments/nanogpt_cpu.py"
# name -> flags of the model, updates that count, updates before them: 5 to 15 s a sample on two cores.
SIZES = {
    "4x4x128": ("--layers 4 --heads 4 --width 128 --context 64 --batch 12", 100, 5),
    "6x6x384": ("--layers 6 --heads 6 --width 384 --context 256 --batch 16", 5, 2),
}
# `train.accumulate` for jaxml's side: the same batch and gradient in microbatches whose activations fit into the cache.
ACCUMULATE = {"4x4x128": "1", "6x6x384": "4"}
START_REPEATS = 3
SEEDS = (1, 2, 3)
TORCH_SEED = 1337
SAVES = 2


def steps(plan: Plan) -> list[Row]:
    """The machine's peaks and the training step of both sides at both sizes, all in the same turns."""
    rivals: dict[str, Callable[[], dict[str, Any]]] = {"machine": script(plan, sys.executable, "machine.py")}
    for size, (flags, count, warm_up) in SIZES.items():
        if plan.is_quick:
            count, warm_up = 1, 1
        words = [*flags.split(), "--time-steps", str(count), "--warm-up", str(warm_up)]
        rivals[f"jaxml {size}"] = script(
            plan, sys.executable, "jaxml_steps.py", *words, "--accumulate", ACCUMULATE[size]
        )
        if plan.torch_python is not None:
            rivals[f"torch {size}"] = script(plan, plan.torch_python, "torch_nanogpt.py", *words)
    samples = take_turns({name: told(name, run) for name, run in rivals.items()}, plan.repeats, warm_ups=0)

    peaks = [sample["product_gflop_per_s"] for sample in samples["machine"]]
    rows = [
        Row("product peak, float32", "GFLOP/s", tuple(peaks)),
        Row("matrix-vector bandwidth", "GB/s", tuple(sample["vector_gbytes_per_s"] for sample in samples["machine"])),
    ]
    for size in SIZES:
        sides = [side for side in ("jaxml", "torch") if f"{side} {size}" in samples]
        speeds = {
            side: Row(f"{side} step {size}", "tokens/s", tuple(s["tokens_per_s"] for s in samples[f"{side} {size}"]))
            for side in sides
        }
        rows += speeds.values()
        done = [sample["gflop_per_s"] for sample in samples[f"jaxml {size}"]]
        shares = tuple(ours / peak for ours, peak in zip(done, peaks, strict=True))
        rows.append(Row(f"share of the product peak {size}", "ratio", shares))
        if not plan.without_torch(f"torch step {size}, jaxml / torch {size}"):
            rows.append(Row(f"jaxml / torch {size}", "ratio", ratio(speeds, "jaxml", "torch").values))
    return rows


def start(plan: Plan) -> list[Row]:
    """From the command to the first line of metrics.jsonl, with an empty and with a filled compilation cache."""
    _prepare(SHAKESPEARE)
    warm = plan.directory("cache")

    def first_step(cache: Path) -> float:
        run = plan.directory("run")
        command = [*JAXML, "train", SHAKESPEARE, "--run-dir", str(run)]
        metrics = run / "metrics.jsonl"
        return time_until(command, lambda: bool(last_line(metrics)), environment(cache), run / "log", stop=True)[0]

    first_step(warm)
    rivals = {"cold": lambda: first_step(plan.directory("cache")), "warm": lambda: first_step(warm)}
    telling = {name: told(f"first step, {name}", run) for name, run in rivals.items()}
    samples = take_turns(telling, 1 if plan.is_quick else START_REPEATS, warm_ups=0)
    return [Row(f"first step, {name}", "s", tuple(seconds)) for name, seconds in samples.items()]


def checkpoint(plan: Plan) -> list[Row]:
    """What saves cost a run of the experiment at its own cadence, then the time from `jaxml resume` to its next step."""
    _prepare(SHAKESPEARE)
    environ, straight = environment(plan.directory("cache")), plan.directory("run")
    flags = ["--checkpoint.every", "4"] if plan.is_quick else []
    every = 4 if plan.is_quick else _cadence()
    # A quarter of the cadence after the last save, so that it is complete on disk when the run is killed.
    enough = SAVES * every + every // 4
    command = [*JAXML, "train", SHAKESPEARE, "--run-dir", str(straight), *flags]
    metrics = straight / "metrics.jsonl"
    time_until(command, lambda: last_line(metrics).get("step", 0) >= enough, environ, straight / "log", stop=True)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]

    def resumed() -> float:
        copy = plan.directory("resumed")
        shutil.copytree(straight, copy, dirs_exist_ok=True)

        def has_stepped() -> bool:
            # The file first ends as it was, then with the saved step's line; a step taken again has other timings.
            return last_line(copy / "metrics.jsonl") not in [{}, *lines]

        return time_until([*JAXML, "resume", str(copy)], has_stepped, environ, copy / "log", stop=True)[0]

    seconds = take_turns({"resume": told("resume", resumed)}, plan.repeats, warm_ups=0 if plan.is_quick else 1)
    return [*stall_rows(lines), Row("resume", "s", tuple(seconds["resume"]))]


def stall_rows(lines: list[dict[str, float]]) -> list[Row]:
    """From metrics.jsonl: seconds that each save held up the step after it, and their share of the time of stepping."""
    stalls = [line["checkpoint_s"] for line in lines if line["checkpoint_s"] > 0]
    stepping = sum(line["step_s"] + line["data_wait_s"] + line["checkpoint_s"] for line in lines)
    return [
        Row("checkpoint stall, a save", "s", tuple(stalls), is_bound=True),
        Row("checkpoint stall, share", "ratio", (sum(stalls) / stepping,), is_bound=True),
    ]


def seek(plan: Plan) -> list[Row]:
    """The batch of step 1,000,000 in a new process each time."""
    _prepare(SHAKESPEARE)
    samples = take_turns({"seek": script(plan, sys.executable, "seek.py", SHAKESPEARE)}, plan.repeats, warm_ups=0)
    return [Row("seek to step 1,000,000", "ms", tuple(s["seek_ms"] for s in samples["seek"]), is_bound=True)]


def nanogpt(plan: Plan) -> list[Row]:
    """nanoGPT's CPU model to its validation loss: jaxml with an empty compilation cache, torch, jaxml with a filled one."""
    cache = plan.directory("cache")
    runs: list[tuple[float, float, float]] = []
    theirs: dict[str, Any] = {}
    for turn, seed in enumerate(SEEDS[: 2 if plan.is_quick else None]):
        runs.append(told(f"nanogpt_cpu seed {seed}", lambda seed=seed: _nanogpt_run(plan, seed, cache))())
        if turn == 0 and plan.torch_python is not None:
            words = ["--train", "--seed", str(TORCH_SEED), *(["--updates", "20"] if plan.is_quick else [])]
            begun = time.perf_counter()
            theirs = told("torch nanogpt", script(plan, plan.torch_python, "torch_nanogpt.py", *words))()
            # Where the system does not tell when a process started, its own clock is wrong: never more than ours.
            theirs["wall_s"] = min(theirs["wall_s"], time.perf_counter() - begun)
    passed, ended, losses = zip(*runs, strict=True)
    kinds = {"cold": passed[:1], "warm": passed[1:]}
    rows = [Row(f"nanogpt_cpu to its evaluation, {kind}", "s", seconds) for kind, seconds in kinds.items()]
    rows.append(Row("nanogpt_cpu to its end", "s", ended, is_bound=True))
    rows.append(Row("nanogpt_cpu validation loss", "nats", losses, is_bound=True))
    if not plan.without_torch("torch nanogpt to its evaluation and its loss, torch / nanogpt_cpu"):
        rows.append(Row("torch nanogpt to its evaluation", "s", (theirs["wall_s"],)))
        rows.append(Row("torch nanogpt validation loss", "nats", (theirs["validation_loss"],)))
        for kind, seconds in kinds.items():
            rows.append(Row(f"torch / nanogpt_cpu, {kind}", "ratio", tuple(theirs["wall_s"] / s for s in seconds)))
    return rows


def _nanogpt_run(plan: Plan, seed: int, cache: Path) -> tuple[float, float, float]:
    """(seconds to the evaluation, seconds to the end, loss) of a process that also prepares its data."""
    run, prepared = plan.directory("run"), plan.directory("data") / "prepared"
    command = [sys.executable, NANOGPT_CPU, "--run-dir", str(run), "--data.prepared", str(prepared)]
    command += ["--train.seed", str(seed), "--data.seed", str(seed)]
    if plan.is_quick:
        command += ["--train.steps", "30", "--train.eval-batches", "2"]
    metrics, environ = run / "metrics.jsonl", environment(cache)
    passed_s, ended_s = time_until(command, lambda: "eval_loss" in last_line(metrics), environ, run / "log", stop=False)
    return passed_s, ended_s, last_line(metrics)["eval_loss"]


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {
    "steps": steps,
    "start": start,
    "checkpoint": checkpoint,
    "seek": seek,
    "nanogpt": nanogpt,
}


def _prepare(experiment: str) -> None:
    run_json([*JAXML, "data", "prepare", experiment, "--json"], environment())


def _cadence() -> int:
    """The experiment's own `checkpoint.every`."""
    from jaxml.cli.experiment_file import load_experiment

    return load_experiment(SHAKESPEARE, []).checkpoint.every
