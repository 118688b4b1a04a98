"""Claim 2, accumulation equals the full batch: ragged masks, dropout, on one device and over a mesh.

Reads `prove.sharding` for the comparison of steps; `prove.prove` runs it.
"""

from __future__ import annotations

from jaxml.devices.spec import MeshSpec
from jaxml.prove.claims import Claim
from jaxml.prove.meshes import SINGLE, mesh_name
from jaxml.prove.sharding import compare_steps
from jaxml.prove.subject import ProgramKey, Subject

GROUP = "accumulation equals the full batch"
SPREAD = MeshSpec(data=2, fsdp=2)
SPLITS = ((2, SINGLE), (3, SPREAD))  # microbatches, and where


def accumulated(subject: Subject, microbatches: int, mesh: MeshSpec) -> Claim:
    """Steps by microbatches on `mesh` against the same steps at once on one device."""
    name = f"{microbatches} microbatches, {mesh_name(mesh)}"
    return compare_steps(subject, GROUP, name, mesh, microbatches, 1)


def keys_of(subject: Subject) -> list[ProgramKey]:
    """The programs that the claims of this file ask for."""
    wanted = [(1, SINGLE), *SPLITS]
    return [(mesh, microbatches, precision) for microbatches, mesh in wanted for precision in subject.precisions]
