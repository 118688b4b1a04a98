"""Claim 6, the checkpoint round trip, on another mesh, is the identity.

Reads `recipes.saving`, `checkpoint.store` and `prove.subject`; `prove.prove` runs it on the straight run's last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import jax

from jaxml import trees
from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.checkpoint.store import CheckpointStore, find_checkpoint
from jaxml.devices.spec import MeshSpec
from jaxml.prove.claims import Claim, exact
from jaxml.prove.meshes import SINGLE, mesh_name
from jaxml.prove.subject import Subject
from jaxml.recipes.run_directory import RunDirectory, RunRecord
from jaxml.recipes.saving import Saver

GROUP = "the checkpoint round trip is the identity"
OTHER = MeshSpec(data=2, fsdp=2, tensor=2)


def round_trip(subject: Subject, run: RunDirectory) -> Claim:
    """The last checkpoint of `run` on one device, saved from OTHER, and back on the experiment's own mesh: every bit."""
    directory, step = find_checkpoint(run.path)
    states, chain = [], [SINGLE, OTHER, subject.experiment.mesh]
    source: str | Path = directory
    for number, mesh in enumerate(chain):
        assembly = subject.assembly(mesh)
        record = RunRecord("prove", "running", None, {})
        with CheckpointStore(source, CheckpointSpec()) as store:
            state, skipped = Saver(assembly, store, record).restore(step)
        states.append(jax.device_get(state))
        source = subject.directory / f"trip{number}"
        with CheckpointStore(source, CheckpointSpec()) as store:
            Saver(assembly, store, record).save(state, skipped, {})
            store.wait()
    faults = [
        f"restored on {mesh_name(mesh)}: {difference}"
        for mesh, state in zip(chain[1:], states[1:], strict=True)
        for difference in trees.compare(states[0], state)
    ]
    return exact(GROUP, "other meshes", faults, " -> ".join(mesh_name(mesh) for mesh in chain))
