"""`prove`: shrink an experiment, try every claim on the small copy, and write what was found.

Reads the files of claims, `prove.shrink`, `prove.report` and `prove.page`; `cli.prove` and tests call it. Eight devices must
be there (fake ones, on a CPU: `jax.config.update("jax_num_cpu_devices", 8)` before the first use of JAX).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import jax

from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.errors import ConfigError, DeviceError, JaxmlError, RunError
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.opening import Opened, open_checkpoint
from jaxml.infer.predict import TextClassifier
from jaxml.observe.progress import Stream, Unbreakable
from jaxml.prove import (
    accumulation,
    checkpoints,
    decoding,
    evaluation,
    lowering,
    order,
    predicting,
    resuming,
    serving,
    sharding,
)
from jaxml.prove.claims import Claim
from jaxml.prove.meshes import NUM_DEVICES, STANDARD, mesh_name
from jaxml.prove.page import render_page
from jaxml.prove.report import Proof, error_text, print_table
from jaxml.prove.shrink import RULE, shrink
from jaxml.prove.subject import ProgramKey, Subject
from jaxml.recipes.checks import check_experiment
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.run_directory import RunDirectory, write_whole

# In the order of the table; each is one of the claims of the issue.
KINDS = ("sharded", "accumulated", "resumed", "evaluated", "decoded", "served", "restored", "lowered")
COMPILERS = max(2, (os.cpu_count() or 2) // 2)  # programs that are compiled at once
# What jaxml refuses with, and what XLA raises for a program that it cannot compile or run: the claim has failed. Anything
# else is a mistake in the code, the user's or ours: it ends the proof with its traceback, and nothing is called proven.
REFUSALS = (JaxmlError, jax.errors.JaxRuntimeError)
FILES = ("proof.json", "proof.html")
SCRATCH = "small"  # the folder of the small copy's data and runs; it is made anew


@dataclass(frozen=True)
class Trial:
    """A claim to be tried: its kind, what the table calls its group and itself, and how."""

    kind: str
    group: str
    name: str
    run: Callable[[], Claim]


def prove(
    experiment: Experiment,
    out_dir: str | os.PathLike[str],
    *,
    only: Sequence[str] = KINDS,
    wants_float32: bool = True,
    cache_dir: str | None = None,
    stream: Stream | None = None,
) -> Proof:
    """Try the claims of these kinds; write proof.json and proof.html to `out_dir`, and the table to `stream` (stderr).

    `wants_float32`: measure the errors in float32 too, which takes about twice as long. `cache_dir`: where compiled
    programs are kept (None: nowhere; then every restart of the small run compiles again).
    A claim that jaxml or XLA refuses has failed, and the others go on. Raises ConfigError, DataError and DeviceError for an
    experiment that could not run, RunError for an `out_dir` that is something else; any other exception goes on its way,
    and no proof is written.
    """
    begun, out, told = time.monotonic(), Path(out_dir), Unbreakable(stream or sys.stderr)
    _check(experiment, only)
    scratch = _scratch(out)
    with proving(), contextlib.ExitStack() as stack:
        small = shrink(experiment, scratch)
        check_experiment(small.experiment, dict(build_mesh(small.experiment.mesh).shape))
        _introduce(experiment.name, small.changes, told)
        subject = Subject(small.experiment, small.prepared, scratch, wants_float32)
        laboratory = Laboratory(subject, stack, cache_dir)
        workers = stack.enter_context(ThreadPoolExecutor(COMPILERS, thread_name_prefix="jaxml-prove"))
        stack.callback(workers.shutdown, wait=True, cancel_futures=True)
        subject.compile_ahead(_keys(subject, only), workers)
        trials, notes = laboratory.trials(only)
        claims = _tried(trials, told)
    ordered = sorted(claims, key=lambda pair: KINDS.index(pair[0]))
    notes = (*small.prepared.notes, *notes)
    proof = Proof(
        experiment.name, tuple(claim for _, claim in ordered), RULE, small.changes, notes, time.monotonic() - begun
    )
    print_table(proof.claims, told)
    for note in notes:
        print(f"note: {note}", file=told, flush=True)
    write_whole(out / FILES[0], json.dumps(proof.to_json(), indent=1, allow_nan=False).encode())
    meshes = tuple(dict.fromkeys((small.experiment.mesh, *STANDARD)))
    write_whole(out / FILES[1], render_page(proof, meshes).encode())
    return proof


@contextlib.contextmanager
def proving() -> Iterator[None]:
    """float64 is on, and XLA compiles with few optimisations (the claims are about mathematics); then all is as it was."""
    wanted = {"jax_enable_x64": True, "jax_disable_most_optimizations": True}
    before = {name: jax.config.values[name] for name in wanted}  # not what a context manager overrides
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


class Laboratory:
    """What the claims of one proof share beside the subject: the straight run, its opened checkpoint, the service."""

    def __init__(self, subject: Subject, stack: contextlib.ExitStack, cache_dir: str | None):
        self.subject, self._stack, self._cache_dir = subject, stack, cache_dir
        # The runs' own words are for somebody who looks for them.
        self.log = stack.enter_context((subject.directory / "runs.log").open("w", encoding="utf-8"))

    @cached_property
    def run(self) -> RunDirectory:
        """The straight run."""
        return resuming.straight_run(self.subject, self.log, self._cache_dir)

    @cached_property
    def opened(self) -> Opened:
        """Its last checkpoint."""
        return open_checkpoint(self.run.path)

    @cached_property
    def model(self) -> LanguageModel:
        return LanguageModel(self.opened)

    @cached_property
    def classifier(self) -> TextClassifier:
        return TextClassifier(self.opened)

    @cached_property
    def service(self) -> serving.Service:
        """The service on the straight run, which is started when this is first asked for."""
        log = self.subject.directory / "service.log"
        return self._stack.enter_context(serving.Service(self.run.path, log, self._cache_dir))

    def trials(self, only: Sequence[str]) -> tuple[list[Trial], tuple[str, ...]]:
        """(the trials of these kinds in the order in which they run, notes on what cannot be tried here)."""
        s, every, notes = self.subject, [], []
        every.append(Trial("resumed", resuming.GROUP, "kills", lambda: resuming.resumed(s, self.log, self._cache_dir)))
        every.append(Trial("resumed", resuming.GROUP, "record ids", lambda: order.ordered(s)))
        if "served" in only and not all(importlib.util.find_spec(module) for module in ("litserve", "msgpack")):
            notes.append("the served answer was not compared: the extra 'serve' is not installed")
            only = [kind for kind in only if kind != "served"]
        for mesh in sharding.meshes_of(s):
            every.append(Trial("sharded", sharding.GROUP, mesh_name(mesh), partial(self._sharded, mesh)))
        for microbatches, mesh in accumulation.SPLITS:
            name = f"{microbatches} microbatches"
            every.append(
                Trial("accumulated", accumulation.GROUP, name, partial(accumulation.accumulated, s, microbatches, mesh))
            )
        every.append(Trial("evaluated", evaluation.GROUP, "record ids", lambda: evaluation.counted(s)))
        every.append(Trial("evaluated", evaluation.GROUP, "sums", lambda: evaluation.summed(s)))
        every += self._answers()
        every.append(Trial("restored", checkpoints.GROUP, "other meshes", lambda: checkpoints.round_trip(s, self.run)))
        every.append(Trial("lowered", lowering.GROUP, "compiled steps", lambda: lowering.lowered(s)))
        chosen = [trial for trial in every if trial.kind in only]
        if "served" in only:  # it compiles in its own process while others are tried
            first = next((index for index, trial in enumerate(chosen) if trial.kind != "resumed"), 0)
            chosen[first] = replace(chosen[first], run=self._with_service(chosen[first].run))
        return chosen, tuple(notes)

    def _sharded(self, mesh: MeshSpec) -> Claim:
        return sharding.sharded(self.subject, mesh)

    def _with_service(self, run: Callable[[], Claim]) -> Callable[[], Claim]:
        def started() -> Claim:
            _ = self.service
            return run()

        return started

    def _answers(self) -> list[Trial]:
        s = self.subject
        if s.is_classifier:
            return [
                Trial("decoded", predicting.GROUP, "batched is single", lambda: predicting.alone(s, self.classifier)),
                Trial(
                    "decoded",
                    predicting.GROUP,
                    "as evaluated",
                    lambda: predicting.as_trained(s, self.opened, self.classifier),
                ),
                Trial(
                    "served",
                    predicting.GROUP,
                    "served is predicted",
                    lambda: serving.served_labels(s, self.classifier, self.service),
                ),
            ]
        return [
            Trial("decoded", decoding.GROUP, "cached logits", lambda: decoding.cached(s, self.opened)),
            Trial("decoded", decoding.GROUP, "batched is single", lambda: decoding.batched(s, self.model)),
            Trial(
                "served",
                decoding.GROUP,
                "served is generated",
                lambda: serving.served_text(s, self.model, self.service),
            ),
        ]


def _tried(trials: Sequence[Trial], stream: Stream) -> list[tuple[str, Claim]]:
    found = []
    for number, trial in enumerate(trials, 1):
        begun = time.monotonic()
        if stream.isatty():  # the line of a claim that ended takes its place
            print(f"[{number}/{len(trials)}] {trial.group}: {trial.name} ...", end="\x1b[K\r", file=stream, flush=True)
        try:
            claim = trial.run()
        except REFUSALS as error:
            claim = Claim(trial.group, trial.name, math.inf, 0.0, f"{type(error).__name__}: {error}")
        claim = replace(claim, seconds=time.monotonic() - begun)
        found.append((trial.kind, claim))
        told = f"{claim.verdict}, {error_text(claim, claim.error)} ({claim.seconds:.1f} s)"
        end = "\x1b[K\n" if stream.isatty() else "\n"
        print(f"[{number}/{len(trials)}] {claim.group}: {claim.name}: {told}", end=end, file=stream, flush=True)
    return found


def _keys(subject: Subject, only: Sequence[str]) -> list[ProgramKey]:
    keys = sharding.keys_of(subject) if "sharded" in only else []
    return keys + (accumulation.keys_of(subject) if "accumulated" in only else [])


def _check(experiment: Experiment, only: Sequence[str]) -> None:
    unknown = [kind for kind in only if kind not in KINDS]
    if unknown or not only:
        got = ", ".join(unknown) or "none"
        raise ConfigError("the claims to try", expected=f"some of {', '.join(KINDS)}", got=got, todo="correct --only")
    check_experiment(experiment, {axis: max(size, 1) for axis, size in dataclasses.asdict(experiment.mesh).items()})
    if len(jax.devices()) < NUM_DEVICES:
        raise DeviceError(
            "the devices to prove on",
            expected=f"{NUM_DEVICES} devices, which may be fake ones",
            got=f"{len(jax.devices())} of kind {jax.devices()[0].device_kind}",
            todo='call jax.config.update("jax_num_cpu_devices", 8) before JAX is first used, or use `jaxml prove`',
        )


def _scratch(out: Path) -> Path:
    """An empty folder for the small copy. Raises RunError for a place that holds something else."""
    others = [] if not out.is_dir() else [entry.name for entry in out.iterdir()]
    foreign = [name for name in others if name not in (*FILES, SCRATCH)]
    if foreign or (out.exists() and not out.is_dir()):
        raise RunError(
            f"the directory {out}",
            expected="a new one, an empty one, or that of an earlier proof",
            got=f"{', '.join(sorted(foreign)[:3])} in it" if foreign else "a file",
            todo="name another --out",
        )
    for name in FILES:  # an earlier proof says nothing about this one
        (out / name).unlink(missing_ok=True)
    if (out / SCRATCH).exists():
        shutil.rmtree(out / SCRATCH)
    (out / SCRATCH).mkdir(parents=True)
    return out / SCRATCH


def _introduce(name: str, changes: Sequence[str], stream: Stream) -> None:
    print(f"jaxml prove: {name}, a small copy of it on {NUM_DEVICES} devices, in float64:", file=stream)
    for line in (*RULE, "", *changes, ""):
        print(f"  {line}", file=stream, flush=True)
