"""Claim 4, evaluation counts each record once: on batch sizes that divide nothing, on one device and on the own mesh.

Reads `prove.subject`, `data.batches` and `recipes.evaluate`; `prove.prove` runs it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxml.data.batches import EvalBatches
from jaxml.devices.spec import MeshSpec
from jaxml.prove.claims import BOUND, Claim, distances, exact, worst
from jaxml.prove.meshes import SINGLE, mesh_name
from jaxml.prove.subject import Subject, first_state
from jaxml.recipes.evaluate import evaluate_rows
from jaxml.train.step import Program

GROUP = "evaluation counts each record once"
SIZES = (1, 5, 7, 24)
COUNTED = (5, 7)  # the sizes whose sums are computed; none divides the records


def counted(subject: Subject) -> Claim:
    """Every held-out record in exactly one row, for every batch size."""
    prepared, faults = subject.prepared, []
    wanted = {(source, record) for source, rows in enumerate(prepared.num_rows("held_out")) for record in range(rows)}
    for size in SIZES:
        batches = EvalBatches(prepared, size)
        seen: Counter[tuple[int, int]] = Counter()
        for index in range(len(batches)):
            batch = batches.batch(index)
            rows = zip(batch["source"].tolist(), batch["record"].tolist(), strict=True)
            seen.update(row for row in rows if row[1] >= 0)
        for source, record in sorted(wanted | set(seen)):
            times = seen[source, record]
            if times != ((source, record) in wanted):
                what = f"batches of {size}: record {record} of source {prepared.source_names[source]!r}"
                faults.append(f"{what} counted {times} times")
    return exact(GROUP, "record ids", faults, f"{len(wanted)} records, batches of {', '.join(map(str, SIZES))}")


def summed(subject: Subject) -> Claim:
    """The same sums and the same outputs of each record, however the records are cut into batches."""
    trials: list[tuple[MeshSpec, int]] = [(SINGLE, size) for size in COUNTED]
    own = subject.experiment.mesh
    if own != SINGLE:
        trials.append((own, subject.experiment.train.batch_size))
    found: list[dict[str, np.ndarray]] = []
    params: Any = None
    for mesh, size in trials:
        assembly = subject.assembly(mesh, eval_batch_size=size)
        if params is None:
            params = _params(assembly.program, subject.experiment.train.seed)
        placed = jax.device_put(params, assembly.program.eval_params(assembly.program.state_shardings))
        measured = evaluate_rows(assembly, placed)
        assert measured is not None, "nobody asked it to stop"
        found.append(_without_padding(*measured) | _counts(subject))
    errors = {}
    for (mesh, size), values in zip(trials[1:], found[1:], strict=True):
        for path, error in distances(values, found[0]).items():
            errors[f"{path} with batches of {size} on {mesh_name(mesh)}"] = error
    errors |= distances(_told(found[0]), _counts(subject))
    name = max(errors, key=lambda path: errors[path])
    detail = f"sums of batches of {', '.join(str(size) for _, size in trials)}"
    return Claim(GROUP, "sums and rows", worst(errors), BOUND, name if errors[name] > BOUND else detail)


def _params(program: Program, seed: int) -> Any:
    return program.eval_params(first_state(program, seed))


def _without_padding(sums: dict[str, np.ndarray], rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    kept = rows.get("is_valid")
    return sums | {f"rows.{name}": column if kept is None else column[kept] for name, column in rows.items()}


def _counts(subject: Subject) -> dict[str, np.ndarray]:
    """How much there is to count, read from the prepared rows and not from batches."""
    prepared = subject.prepared
    rows = prepared.num_rows("held_out")
    if subject.is_classifier:
        return {"num_rows": np.asarray(sum(rows))}
    lengths = (
        prepared.segments("held_out", source, row)["length"].sum()
        for source, count in enumerate(rows)
        for row in range(count)
    )
    return {"num_tokens": np.asarray(sum(int(length) for length in lengths))}


def _told(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values[name] for name in ("num_rows", "num_tokens") if name in values}
