"""Claim 1, sharded equals single: loss, gradients, moments and parameters after a step, on every mesh.

Reads `prove.subject`, `prove.meshes` and `prove.parting`; `prove.prove` runs it. The rows are ragged, dropout is on, and
every step begins in the state in which the one on one device began, so that errors do not add up.
"""

from __future__ import annotations

from dataclasses import replace

from jaxml.devices.spec import MeshSpec
from jaxml.prove.claims import BOUND, Claim
from jaxml.prove.meshes import SINGLE, STANDARD, mesh_name
from jaxml.prove.parting import apart, part
from jaxml.prove.subject import ProgramKey, Subject

GROUP = "sharded equals single"


def meshes_of(subject: Subject) -> list[MeshSpec]:
    """The experiment's own mesh, then the standard set, each once."""
    every = [subject.experiment.mesh, *STANDARD]
    return [mesh for mesh in dict.fromkeys(every) if mesh != SINGLE]


def keys_of(subject: Subject) -> list[ProgramKey]:
    """The programs that the claims of this file ask for, the ones on one device first."""
    meshes = [SINGLE, *(fitted(subject, mesh) for mesh in meshes_of(subject))]
    return [(mesh, subject.experiment.train.accumulate, p) for mesh in meshes for p in subject.precisions]


def sharded(subject: Subject, mesh: MeshSpec) -> Claim:
    """The steps on `mesh` against those on one device, with the experiment's own accumulation."""
    return compare_steps(subject, GROUP, mesh_name(mesh), mesh, subject.experiment.train.accumulate, None)


def fitted(subject: Subject, mesh: MeshSpec) -> MeshSpec:
    """The mesh without a token axis where that does not divide the tokens of a row: they then stay whole."""
    return mesh if subject.experiment.data.sequence_length % mesh.context == 0 else replace(mesh, context=1)


def compare_steps(subject: Subject, group: str, name: str, mesh: MeshSpec, accumulate: int, like: int | None) -> Claim:
    """Steps on a mesh by `accumulate` microbatches against steps on one device by `like` (None: as many) of them."""
    whole, asked = accumulate if like is None else like, mesh
    mesh = fitted(subject, asked)
    errors, num_left_out, got, expected = {}, 0, [], []
    for precision in reversed(subject.precisions):  # float64 last: what follows is about it
        expected = subject.expected(whole, precision)
        got = subject.taken(mesh, accumulate, precision, expected)
        errors[precision], num_left_out = apart(got, expected)
    program = subject.program(mesh, accumulate, "float64")
    details = [f"replicated: {note}" for note in replicated(program.notes)]
    if mesh != asked:
        details.append(
            f"whole rows: context={asked.context} does not divide {subject.experiment.data.sequence_length} tokens"
        )
    if num_left_out:
        details.append(f"{num_left_out} elements left out, whose gradient is rounding alone")
    claim = Claim(group, name, errors["float64"], BOUND, "; ".join(details), errors.get("float32"))
    if claim.verdict == "pass":
        return claim
    keys = ((mesh, accumulate, "float64"), (SINGLE, whole, "float64"))
    parting, picture = part(subject, keys, got, expected)
    return replace(claim, parting=parting, pictures=(replace(picture, title=f"{name}: {picture.title}"),))


def replicated(notes: list[str]) -> list[str]:
    """The notes of a program with one entry for each reason: `tensor=2 divides none of heads=3 (4 leaves)`."""
    counts: dict[str, int] = {}
    for note in notes:
        reason = note.partition(": replicated, ")[2]
        counts[reason] = counts.get(reason, 0) + 1
    return [f"{reason} ({count} {'leaf' if count == 1 else 'leaves'})" for reason, count in counts.items()]
