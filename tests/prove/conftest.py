"""A small experiment that has on at once what could go wrong, shrunk once; float64 and quick compiles while a test runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxml.data.spec import TextSource
from jaxml.devices.spec import MeshSpec
from jaxml.inputs.spec import CharTokenizerSpec
from jaxml.models.spec import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, RopeSpec
from jaxml.prove import resuming
from jaxml.prove.prove import proving
from jaxml.prove.shrink import Small, shrink
from jaxml.prove.subject import Subject
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import LanguageModeling
from tests.tiny import TEXT, tiny_experiment

ATTENTION = AttentionSpec(num_heads=2, num_kv_heads=1, head_width=4, rope=RopeSpec(), has_bias=True, window=20)


def packed_experiment(directory: Path) -> Experiment:
    """One layer, over two sources, 2 to 1, packed by best fit; z-loss, clipping and an average."""
    experiment = tiny_experiment(directory)
    text = TEXT.read_text()
    for name, piece in {"a": text[:6_000], "b": text[20_000:26_000]}.items():
        (directory / f"{name}.txt").write_text(piece)
    sources = tuple(
        TextSource(str(directory / f"{name}.txt"), documents="line", name=name, weight=weight)
        for name, weight in (("a", 2), ("b", 1))
    )
    model = DecoderSpec(
        vocab_size=99,
        context_length=24,
        width=8,
        num_layers=1,
        blocks=(BlockSpec(ATTENTION, MlpSpec(12)),),
        dropout=0.1,
    )
    return replace(
        experiment,
        model=model,
        task=LanguageModeling(z_loss=1e-3),
        data=replace(experiment.data, sources=sources, tokenizer=CharTokenizerSpec(), sequence_length=24),
        train=replace(experiment.train, accumulate=1),
        optimizer=replace(experiment.optimizer, ema_decay=0.9, clip_norm=0.5),
        mesh=MeshSpec(data=2, fsdp=2),
    )


@pytest.fixture(autouse=True)
def _proving() -> Iterator[None]:
    with proving():
        yield


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The shrunken experiment, with its data."""
    directory = tmp_path_factory.mktemp("prove")
    return shrink(packed_experiment(directory), directory / "small")


@pytest.fixture
def subject(small: Small, tmp_path: Path) -> Subject:
    """With no program yet: what a test patches is traced anew."""
    return Subject(small.experiment, small.prepared, tmp_path, wants_float32=False)


@pytest.fixture(scope="session")
def straight(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a straight run, which tests copy."""
    directory = tmp_path_factory.mktemp("straight")
    with proving(), open(os.devnull, "w") as nowhere:
        resuming.straight_run(Subject(small.experiment, small.prepared, directory, False), nowhere, None)
    return directory


@pytest.fixture
def with_straight_run(straight: Path, subject: Subject) -> Subject:
    """A subject whose straight run is there already."""
    shutil.copytree(straight / "straight", subject.directory / "straight")
    return subject


@pytest.fixture
def change(small: Small, tmp_path: Path) -> Callable[..., Subject]:
    """A subject of the small experiment with parts replaced by field: change(optimizer=dict(rule=Lion()))."""

    def changed(**parts: dict[str, object]) -> Subject:
        new = {name: replace(getattr(small.experiment, name), **fields) for name, fields in parts.items()}
        return Subject(replace(small.experiment, **new), small.prepared, tmp_path, wants_float32=False)

    return changed
