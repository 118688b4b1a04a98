"""Where two runs that should be equal part: the first step, what of it, and the first value of it in float64.

Reads `prove.replay` (both runs), `prove.rerun` (one step in float64) and the digests in metrics.jsonl (`train.digest`);
`cli.diverge` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxml import trees
from jaxml.config.spec import Difference, diff
from jaxml.errors import RunError
from jaxml.observe.metrics_log import Record
from jaxml.prove.claims import Parting
from jaxml.prove.replay import PastRun, Place, open_past_run, state_at
from jaxml.prove.rerun import first_apart, step_in_float64
from jaxml.train.digest import DIGESTS, digest, to_hex
from jaxml.train.lowered import PROVENANCE

# Names of what a step makes, in its order, by the metric that tells whether it is the same.
BY_DIGESTS = {name: name.removeprefix("digest_") for name in DIGESTS}
BY_LOSSES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class Parted:
    """The first step, counted from 1, whose records differ, and the first part of it that does."""

    step: int
    part: str


@dataclass(frozen=True)
class OtherRow:
    """A row of the batch that the two runs fill differently: the number within the batch, and for each run (source, record,
    which is the row of that source) and the places of its documents; empty for a run whose batch has fewer rows."""

    row: int
    records: tuple[tuple[int, ...], ...]
    documents: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Rerun:
    """One step taken again in float64 by both experiments, from one state of run A.

    `parting`: the first value that differs (None: none does). `error`: the largest difference, as a share of its value's
    scale. `num_left_out`: updated elements whose gradient is rounding alone.
    """

    step: int
    origin: Place
    parting: Parting | None
    error: float
    num_left_out: int


@dataclass(frozen=True)
class Divergence:
    """What `jaxml diverge` found. `by`: digests, or losses where a run has none. `fields`: in which the experiments differ.

    `parted` None: equal from `first_step` to `last_step`, the steps that both runs have. `first_state`: the leaves in which
    the states before the first of these differ. `notes`: what the reader should know about the comparison.
    """

    by: str
    first_step: int
    last_step: int
    fields: tuple[Difference, ...]
    parted: Parted | None
    rows: tuple[OtherRow, ...] = ()
    first_state: tuple[trees.LeafDifference, ...] = ()
    reruns: tuple[Rerun, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> str:
        """In one line, what explains the difference."""
        if self.parted is None:
            return f"equal in steps {self.first_step} to {self.last_step}, by {self.by}"
        if self.rows:
            return f"they part at step {self.parted.step}: {len(self.rows)} rows of the batch are other records"
        if self.first_state:
            return f"they part before step {self.first_step}: {self.first_state[0]}"
        found = next((rerun for rerun in self.reruns if rerun.parting is not None), None)
        if found is not None:
            return f"they part at step {found.step}: {found.parting}, in float64"
        if self.reruns:
            return f"they part at step {self.parted.step} by rounding alone: in float64 nothing differs"
        return f"they part at step {self.parted.step}: {self.parted.part}"


def diverge(run_a: str, run_b: str) -> Divergence:
    """Compare two runs, and where they part find out why.

    Raises RunError when a directory is not a run or they have no step in common, and what `assemble` raises where an
    experiment cannot be built here.
    """
    a, b = open_past_run(run_a), open_past_run(run_b)
    common = sorted(a.records.keys() & b.records.keys())
    if not common:
        raise RunError(
            f"comparing {run_a} and {run_b}",
            expected="runs with a step in common",
            got=f"steps {min(a.records)} to {max(a.records)}, and {min(b.records)} to {max(b.records)}",
            todo="train both over the same steps",
        )
    by = "digests" if all(_has_digests(run, common) for run in (a, b)) else "losses"
    parts = BY_DIGESTS if by == "digests" else BY_LOSSES
    parted = first_parted(a.records, b.records, parts)
    told = Divergence(by, common[0], common[-1], tuple(diff(a.assembly.experiment, b.assembly.experiment)), parted)
    if by == "losses":
        note = "no digests in both runs (--train.digests true): losses and gradient norms were compared"
        told = replace(told, notes=(note,))
    return told if parted is None else _explained(told, parted, a, b)


def first_parted(a: Mapping[int, Record], b: Mapping[int, Record], parts: Mapping[str, str]) -> Parted | None:
    """The first step that both have in which one of the metrics `parts` (metric: what it tells of) differs.

    >>> first_parted({1: {"loss": 2.0}, 2: {"loss": 1.0}}, {1: {"loss": 2.0}, 2: {"loss": 1.5}}, {"loss": "loss"})
    Parted(step=2, part='loss')
    """
    for step in sorted(a.keys() & b.keys()):
        for name, part in parts.items():
            if a[step].get(name) != b[step].get(name):
                return Parted(step, part)
    return None


def other_rows(a: PastRun, b: PastRun, step: int) -> tuple[OtherRow, ...]:
    """The rows of a step's batch that are not the same in both runs, column by column. Batches of other shapes differ in
    every row."""
    one, other = a.batches.batch(step - 1), b.batches.batch(step - 1)
    columns = [name for name in one if name not in PROVENANCE]
    num_rows = max(len(one["row"]), len(other["row"]))
    differs = np.ones(num_rows, bool)
    if set(one) == set(other) and all(one[name].shape == other[name].shape for name in one):
        differs = np.array([any((one[n][row] != other[n][row]).any() for n in columns) for row in range(num_rows)])
    sides = ((a, one), (b, other))
    return tuple(
        OtherRow(row, tuple(_record(batch, row) for _, batch in sides), tuple(_places(*side, row) for side in sides))
        for row in np.flatnonzero(differs).tolist()
    )


def _record(batch: Mapping[str, np.ndarray], row: int) -> tuple[int, ...]:
    """(source, record) of a row; empty where the batch has fewer rows."""
    return tuple(int(batch[name][row]) for name in ("source", "record") if row < len(batch[name]))


def _places(run: PastRun, batch: Mapping[str, np.ndarray], row: int) -> tuple[str, ...]:
    return run.assembly.documents_of("train", {name: batch[name][row : row + 1] for name in PROVENANCE})


def _explained(told: Divergence, parted: Parted, a: PastRun, b: PastRun) -> Divergence:
    """The cause, asked in the order in which a step is made: its batch, the state that it starts from, its mathematics."""
    rows = other_rows(a, b, parted.step)
    if rows:
        return replace(told, rows=rows)
    notes = told.notes
    if parted.part == "batch":
        notes += (
            "the batches that were trained on differ, and those that the data gives now do not: it was changed since",
        )
    # A loss tells of the parameters before its step: the step before may have made them differ.
    suspects = [parted.step - 1] if told.by == "losses" and parted.step > told.first_step else []
    first = (suspects or [parted.step])[0]
    state, place = state_at(a, first - 1)
    notes += _note_on_replay(a, place, state)
    if first == told.first_step:
        differences = _states_differ(state, b, first - 1)
        if differences:
            return replace(told, first_state=differences, notes=notes)
    reruns = []
    for step in (*suspects, parted.step):
        if step != first:
            state, place = state_at(a, step - 1)
        reruns.append(_rerun(a, b, jax.device_get(state), place, step))
        if reruns[-1].parting is not None:
            break
    return replace(told, reruns=tuple(reruns), notes=notes)


def _rerun(a: PastRun, b: PastRun, state: Any, place: Place, step: int) -> Rerun:
    both = [step_in_float64(run.assembly, state, run.batches.batch(step - 1), step - 1) for run in (a, b)]
    parting, error, num_left_out = first_apart(*both)
    return Rerun(step, place, parting, error, num_left_out)


def _states_differ(state: Any, b: PastRun, step: int) -> tuple[trees.LeafDifference, ...]:
    """The parameters in which run B begins with other bits than run A; the ones of its optimizer where all of these agree."""
    other, _ = state_at(b, step)
    for part in ("params", "opt_state"):
        differences = trees.compare(jax.device_get(state[part]), jax.device_get(other[part]))
        if differences:
            return tuple(replace(leaf, path=f"{part}.{leaf.path}") for leaf in differences)
    return ()


def _note_on_replay(run: PastRun, place: Place, state: Any) -> tuple[str, ...]:
    """A note where the parameters that a state was brought back to are not those that the run logged there."""
    logged = run.records.get(place.step, {}).get("digest_params")
    if logged is None or logged == to_hex(np.asarray(jax.device_get(jax.jit(digest)(state["params"])))):
        return ()
    return (
        f"{place} of {run.directory.path} does not give the parameters that it logged: another machine, or a changed file",
    )


def _has_digests(run: PastRun, steps: list[int]) -> bool:
    return all(name in run.records[step] for step in steps for name in DIGESTS)
