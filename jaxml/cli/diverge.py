"""`jaxml diverge RUN_A RUN_B`: where two runs that should be equal part, and why. Reads `prove.diverge`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxml.cli.experiment_file import parser
from jaxml.config.spec import from_json
from jaxml.devices.spec import MeshSpec
from jaxml.recipes.run_directory import RunDirectory, require_record

if TYPE_CHECKING:
    from jaxml.prove.diverge import Divergence

DESCRIPTION = """Compare two runs step by step: by the 64-bit digests of batch, gradients and parameters that runs with
--train.digests true log, else by their losses. At the first step that differs: the records of the batch that do, or that
step again in float64, by both experiments, from the checkpoint of RUN_A before it, and the first value that differs.

Exit code 0 when they are equal, 1 when they are not."""
MOST_LINES = 12


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, compare, and return what was found."""
    options = parser("diverge", DESCRIPTION)
    options.add_argument("run_a", help="a run directory")
    options.add_argument("run_b", help="the run directory of the run that should be equal")
    given = options.parse_args(arguments)
    use_fake_devices([given.run_a, given.run_b])
    from jaxml.prove.diverge import diverge

    found = diverge(given.run_a, given.run_b)
    return {"text": "\n".join(lines_of(found)), **to_json(found)}, 0 if found.parted is None else 1


def use_fake_devices(run_dirs: list[str]) -> None:
    """On a CPU, make as many devices as the largest of the runs' meshes needs, so that what many devices trained can be
    looked into on one machine. Elsewhere it changes nothing."""
    import math

    import jax
    from jax._src import xla_bridge

    records = [require_record(RunDirectory(Path(run_dir))) for run_dir in run_dirs]
    meshes: list[MeshSpec] = [from_json(record.experiment).mesh for record in records]
    needed = max(math.prod(size for size in asdict(mesh).values() if size != -1) for mesh in meshes)
    if needed > 1 and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_num_cpu_devices", needed)


def to_json(found: Divergence) -> dict[str, Any]:
    """Every field of the result, without the text."""
    return {**asdict(found), "verdict": found.verdict, "is_equal": found.parted is None}


def lines_of(found: Divergence) -> list[str]:
    """The result for people: the verdict first."""
    lines = [found.verdict]
    if found.parted is not None:
        lines.append(f"  first step that differs: {found.parted.step} ({found.parted.part} first, by {found.by})")
    for row in found.rows[:MOST_LINES]:
        sides = [
            f"{name}: source {record[0]}, record {record[1]} ({', '.join(documents)})"
            if record
            else f"{name}: no such row"
            for name, record, documents in zip("AB", row.records, row.documents, strict=True)
        ]
        lines.append(f"  row {row.row}: {'; '.join(sides)}")
    lines += [f"  before the first step: {leaf}" for leaf in found.first_state[:MOST_LINES]]
    for rerun in found.reruns:
        told = "nothing differs" if rerun.parting is None else str(rerun.parting)
        lines.append(f"  step {rerun.step} again in float64, from {rerun.origin} of A: {told}")
        lines.append(f"    largest error {rerun.error:.2g} of a value's scale; {rerun.num_left_out} elements left out")
    hidden = max(0, len(found.rows) - MOST_LINES) + max(0, len(found.first_state) - MOST_LINES)
    lines += [f"  and {hidden} more (--json has them all)"] * (hidden > 0)
    lines += [f"  experiment.{field.path}: {field.expected} -> {field.got}" for field in found.fields]
    return lines + [f"  note: {note}" for note in found.notes]
