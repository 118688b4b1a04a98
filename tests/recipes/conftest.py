"""The small run that these tests share: two sources, packing, dropout, accumulation, an EMA, several epochs."""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.data.spec import TextSource
from jaxml.infer.sealed import probe_function
from jaxml.recipes import assemble as assemble_module
from jaxml.recipes import saving
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.train import TrainOptions, TrainResult, train
from jaxml.train.step import build_program
from tests.tiny import TEXT, tiny_experiment

STEPS = 24
NOWHERE = open(os.devnull, "w")  # noqa: SIM115
atexit.register(NOWHERE.close)

# One program for each set of specs, however many runs use it: what is compiled is a pure function of them.
shared_program = cache(build_program)
shared_probe = cache(probe_function)


def share_programs(patch: pytest.MonkeyPatch) -> None:
    """Runs of equal specs have one program, and one program has one probe."""
    patch.setattr(assemble_module, "build_program", shared_program)
    patch.setattr(saving, "probe_function", shared_probe)


@pytest.fixture(autouse=True)
def _share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    share_programs(monkeypatch)


def small_experiment(directory: Path) -> Experiment:
    """24 steps of 4 rows over two sources, 2 to 1, of which the first has about 40 rows: the run crosses epoch borders."""
    experiment = tiny_experiment(directory)
    text = TEXT.read_text()
    names = {"a": text[:700], "b": text[20_000:21_000]}
    for name, piece in names.items():
        (directory / f"{name}.txt").write_text(piece)
    sources = tuple(
        TextSource(str(directory / f"{name}.txt"), documents="line", name=name, weight=weight)
        for name, weight in (("a", 2), ("b", 1))
    )
    return dataclasses.replace(
        experiment,
        data=dataclasses.replace(experiment.data, sources=sources),
        train=dataclasses.replace(experiment.train, steps=STEPS, eval_every=8),
        optimizer=dataclasses.replace(experiment.optimizer, ema_decay=0.9),
        checkpoint=CheckpointSpec(every=4, keep_last=3),
    )


@dataclasses.dataclass(frozen=True)
class StraightRun:
    experiment: Experiment
    run_dir: Path
    result: TrainResult


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> StraightRun:
    """The uninterrupted run that every resumed one has to equal."""
    directory = tmp_path_factory.mktemp("straight")
    experiment = small_experiment(directory)
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        result = train(experiment, directory / "run", quiet())
    return StraightRun(experiment, directory / "run", result)


def quiet(**options: object) -> TrainOptions:
    """Options of a run whose words go nowhere."""
    return TrainOptions(stream=NOWHERE, **options)


@pytest.fixture
def change(straight: StraightRun) -> Callable[..., Experiment]:
    """The small experiment with parts replaced by field: change(train=dict(steps=3))."""

    def changed(**parts: dict[str, object]) -> Experiment:
        replaced = {
            name: dataclasses.replace(getattr(straight.experiment, name), **fields) for name, fields in parts.items()
        }
        return dataclasses.replace(straight.experiment, **replaced)

    return changed
