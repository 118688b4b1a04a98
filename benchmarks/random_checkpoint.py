"""A sealed checkpoint of a preset with random weights and no tokenizer, for timing what no one trained.

`decode_rows` starts it as a process of its own; it prints one JSON object.

    python benchmarks/random_checkpoint.py gpt2_124m OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

from jaxml import keys
from jaxml.checkpoint.leaves import describe_leaves
from jaxml.checkpoint.manifest import Manifest
from jaxml.checkpoint.probe import record
from jaxml.checkpoint.store import CheckpointStore
from jaxml.config.spec import to_json
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.infer.sealed import circumstances, probe_function
from jaxml.models import presets
from jaxml.models.build import bind_model
from jaxml.models.cost import num_parameters
from jaxml.models.spec import DecoderSpec, ExecutionSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import LanguageModeling


def write(directory: Path, name: str, model: DecoderSpec) -> None:
    """The weights with which training would begin, at step 0 of a store in `directory`, with a manifest as imports have."""
    task, precision, execution = LanguageModeling(), PrecisionSpec(), ExecutionSpec()
    bound = bind_model(model, precision, execution)
    mesh = build_mesh(MeshSpec(data=1, fsdp=1), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = jax.jit(bound.init)(keys.root_key(0))
        logits = jax.jit(probe_function(bound, task))(params)
    parts = {"model": model, "task": task, "precision": precision, "execution": execution}
    manifest = Manifest(
        step=0,
        experiment={"name": name, "data": {}, **{part: to_json(spec) for part, spec in parts.items()}},
        versions={"jax": jax.__version__},
        seed=0,
        batch_size=0,
        tokenizer_fingerprint="",
        data_fingerprint="",
        leaves={"params": describe_leaves(params)},
        probe=record(logits, **circumstances(mesh.shape, execution, precision)),
        backend=jax.default_backend(),
    )
    with CheckpointStore(directory) as store:
        store.save(0, {"params": params}, manifest, None)


def main(preset: str, out: str) -> None:
    model = getattr(presets, preset)()
    write(Path(out), preset, model)
    print(json.dumps({"path": out, "parameters": num_parameters(model)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
