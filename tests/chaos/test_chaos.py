"""`nox -s chaos`: kill -9 at random moments for minutes, on the shakespeare experiment at a size that takes a while.

Everything is on that could disturb exact numbers: two sources mixed, packing, dropout, accumulation, an average of the
weights, several epochs. `CHAOS_SECONDS` (default 240) bounds the killing; the seed is printed, `CHAOS_SEED` repeats it.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from jaxml.checkpoint.compare import compare
from jaxml.observe.metrics_log import read_metrics
from tests.chaos.kills import run_with_kills, start

ROOT = Path(__file__).resolve().parents[2]
FILE = """
import dataclasses
from pathlib import Path
from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.data.spec import TextSource
from jaxml.models.presets import nanogpt_cpu
from tests.tiny import TEXT, tiny_experiment
def config():
    experiment = tiny_experiment(Path({directory!r}))
    replace = dataclasses.replace
    parts = tuple(TextSource(str(TEXT), documents="line", name=n, weight=w) for n, w in (("a", 2), ("b", 1)))
    return replace(
        experiment,
        model=replace(nanogpt_cpu(257), dropout=0.1),
        data=replace(experiment.data, sources=parts, sequence_length=64),
        train=replace(experiment.train, steps={steps}, batch_size=8, eval_every=50, eval_batches=4),
        optimizer=replace(experiment.optimizer, ema_decay=0.99),
        checkpoint=CheckpointSpec(every=10, keep_last=3),
    )
"""
STEPS = 400


@pytest.mark.slow
def test_a_run_killed_at_random_moments_equals_the_straight_one(tmp_path: Path) -> None:
    seconds = float(os.environ.get("CHAOS_SECONDS", "240"))
    seed = int(os.environ.get("CHAOS_SEED", str(time.time_ns() % 10**6)))
    print(f"\nCHAOS_SEED={seed} CHAOS_SECONDS={seconds:.0f}")
    file = tmp_path / "experiment.py"
    file.write_text(FILE.format(directory=str(tmp_path), steps=STEPS))
    environment = {"PYTHONPATH": str(ROOT), "JAXML_CACHE": str(ROOT / ".cache" / "chaos")}
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    process = start(["train", str(file), "--run-dir", str(straight)], tmp_path / "straight.log", environment)
    assert process.wait(timeout=1200) == 0, (tmp_path / "straight.log").read_text()
    draw = random.Random(seed)
    began = time.monotonic()
    moments = []

    def after(delay_s: float):
        due: list[float] = []

        def is_time() -> bool:
            if not due:
                due.append(time.monotonic() + delay_s)
            return time.monotonic() >= due[0]

        return is_time

    # Kills come at any moment of a process's life: imports, compile, steps, evaluation, saves.
    while sum(moments) < seconds:
        moments.append(draw.choice([draw.uniform(0.2, 4.0), draw.uniform(4.0, 14.0)]))
    hits = run_with_kills(str(file), run_dir, [], [after(m) for m in moments], environment, limit_s=1200)
    print(f"{hits} kills in {time.monotonic() - began:.0f} s")
    assert hits >= 4
    numbers = ("loss", "grad_norm", "eval_loss")
    curves = [
        [(r["step"], *(r.get(n) for n in numbers)) for r in read_metrics(d / "metrics.jsonl")]
        for d in (straight, run_dir)
    ]
    assert curves[0] == curves[1]
    assert [row[0] for row in curves[1]] == list(range(1, STEPS + 1))
    difference = compare(straight, run_dir)
    assert difference.is_same, difference
