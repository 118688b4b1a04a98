"""A checkpoint's loss on the data that its run held out, as the run itself measures it.

Reads `recipes.assemble`, `recipes.evaluate` and `infer.opening`; `cli.eval` calls it. It needs the training code, because
the held-out split is part of the prepared data.
"""

from __future__ import annotations

import os
from dataclasses import replace

import jax

from jaxml.config.spec import from_json
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.errors import CheckpointError, DeviceError
from jaxml.infer.opening import open_checkpoint
from jaxml.observe.progress import Stream
from jaxml.recipes.assemble import assemble
from jaxml.recipes.evaluate import evaluate
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.preparing import Teller
from jaxml.recipes.saving import refuse_other_data


def evaluate_held_out(path: str | os.PathLike[str], stream: Stream) -> dict[str, float]:
    """Metrics `eval_*` of the checkpoint at `path` (averaged parameters, where it has some) over its held-out split.

    On the run's own mesh where the devices here have room for it, else on one device. Words about data that has to be
    prepared go to `stream`. Raises CheckpointError: nothing usable there, an imported model, which has no such data, or
    data that is not what the run had; DataError where the sources are gone.
    """
    opened = open_checkpoint(path)
    experiment = from_json(opened.manifest.experiment)
    owner = f"the checkpoint of step {opened.described.step} in {opened.described.directory}"
    if not isinstance(experiment, Experiment):
        raise CheckpointError(
            f"the held-out data of {owner}",
            expected="a model that was trained by jaxml, with its data",
            got=f"an {type(experiment).__name__}",
            todo="name a text with --text, or a set with --set",
        )
    experiment = replace(experiment, execution=opened.bound.execution)  # its attention may be of another backend
    try:
        build_mesh(experiment.mesh)
    except DeviceError:
        experiment = replace(experiment, mesh=MeshSpec(data=1, fsdp=1))
    assembly = assemble(experiment, Teller(stream))
    refuse_other_data(opened.manifest, assembly.prepared, owner)
    program = assembly.program
    metrics = evaluate(assembly, jax.device_put(opened.params, program.eval_params(program.state_shardings)))
    assert metrics is not None
    return metrics
