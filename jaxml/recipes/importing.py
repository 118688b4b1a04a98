"""From a directory that others published to a sealed checkpoint: `jaxml import`.

Reads `checkpoint.hf`, `checkpoint.hf_tokenizer`, the families, `infer.sealed` and `checkpoint.store`; `cli.import_`
prints the report.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxml import __version__, trees
from jaxml.checkpoint.folders import resolve
from jaxml.checkpoint.hf import PublishedWeights, check_tensors, read_config
from jaxml.checkpoint.hf_tokenizer import read_tokenizer
from jaxml.checkpoint.leaves import describe_leaves
from jaxml.checkpoint.manifest import Manifest, leaf_faults
from jaxml.checkpoint.probe import record
from jaxml.checkpoint.store import CheckpointStore
from jaxml.config.spec import suggest, to_json
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.errors import CheckpointError, Faults
from jaxml.infer.sealed import circumstances, probe_function
from jaxml.inputs.tokenizers import Tokenizer
from jaxml.models.build import BoundModel, bind_model
from jaxml.models.families.config import ignored_keys
from jaxml.models.families.family import Family
from jaxml.models.families.llama import LLAMA
from jaxml.models.families.tensors import PublishedTensor, to_canonical
from jaxml.models.spec import DecoderSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.recipes.imported import ImportedModel

FAMILIES = {family.name: family for family in (LLAMA,)}
STEP = 0  # an imported model has taken no training step
PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint", "safetensors", "tokenizers", "numpy")


@dataclass(frozen=True)
class ImportReport:
    """What was imported. `parameters` counts numbers by the dtype that they were published in; `unused` names tensors that
    were not needed, `ignored` keys of config.json that change no logit; `tokenizer` is empty where there is none."""

    checkpoint: str
    family: str
    parameters: dict[str, int]
    stored_as: str
    num_leaves: int
    num_tensors: int
    unused: tuple[str, ...]
    ignored: tuple[str, ...]
    tokenizer: str
    notes: tuple[str, ...]
    probe: str
    seal: str


def import_model(directory: str | Path, out: str | os.PathLike[str]) -> ImportReport:
    """Write the model of a Hugging Face directory to `out` as a sealed checkpoint of step 0.

    Parameters keep their values exactly: they are stored as bfloat16 if all were published so, else as float32; products
    are in float32. Raises CheckpointError (an `out` that is not empty, a model that is not supported or not whole, every
    fault at once), ConfigError (sizes that do not fit together), DataError (the tokenizer).
    """
    store = resolve(out)
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        got = "files in it" if store.is_dir() else "a file"
        raise CheckpointError(f"--out {store}", expected="a new or empty directory", got=got, todo="name another one")
    config = read_config(directory)
    family = _family(config)
    spec = family.spec_from_config(config)
    tokenizer, notes = read_tokenizer(directory)
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        raise CheckpointError(
            f"tokenizer of {directory}",
            expected=f"at most {spec.vocab_size} ids, the rows of the model's embedding",
            got=f"ids up to {tokenizer.vocab_size - 1}",
            todo="take the tokenizer that the model was trained with",
        )
    name = Path(directory).resolve().name
    with PublishedWeights(directory) as weights:
        tensors = _tensors(family, spec, weights)
        unused = check_tensors(weights.headers, tensors, family.unused, family.tied if spec.tied_head else {})
        parameters = _parameters(tensors, weights)
        stored = "bfloat16" if set(parameters) == {"bfloat16"} else "float32"
        precision = PrecisionSpec(params=stored, compute="float32")
        model = ImportedModel(name, spec, precision=precision, source=name, family=family.name)
        bound = bind_model(model.model, model.precision, model.execution)
        params = _params(family, tensors, unused, weights, bound)
    manifest = _manifest(model, bound, params, tokenizer)
    with CheckpointStore(store) as checkpoints:
        checkpoints.save(STEP, {"params": params}, manifest, None if tokenizer is None else tokenizer.files())
    return ImportReport(
        checkpoint=str(store / str(STEP)),
        family=family.name,
        parameters=parameters,
        stored_as=model.precision.params,
        num_leaves=len(manifest.leaves["params"]),
        num_tensors=len(tensors),
        unused=unused,
        ignored=ignored_keys(config),
        tokenizer=_describe(tokenizer),
        notes=notes,
        probe=manifest.probe["sha256"],
        seal=manifest.seal,
    )


def _family(config: dict[str, Any]) -> Family:
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    raise CheckpointError(
        "config.json: model_type",
        expected=f"one of {', '.join(FAMILIES)}",
        got="nothing" if name is None else repr(name)[:60],
        todo=suggest(str(name), list(FAMILIES)),
    )


def _tensors(family: Family, spec: DecoderSpec, weights: PublishedWeights) -> tuple[PublishedTensor, ...]:
    """The tensors of the spec, once it is plausible that the files hold so many layers."""
    if spec.num_layers > len(weights.headers):
        raise CheckpointError(
            "config.json: number of layers",
            expected=f"one that {len(weights.headers)} tensors can fill",
            got=str(spec.num_layers),
            todo="take the config.json that belongs to these weights",
        )
    return family.tensors(spec)


def _parameters(tensors: tuple[PublishedTensor, ...], weights: PublishedWeights) -> dict[str, int]:
    """How many numbers were published in each dtype."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[weights.headers[tensor.name].dtype] += math.prod(tensor.shape)
    return dict(counts)


def _params(
    family: Family,
    tensors: tuple[PublishedTensor, ...],
    unused: tuple[str, ...],
    weights: PublishedWeights,
    bound: BoundModel,
) -> dict[str, Any]:
    """Canonical parameters on the host, in the dtype of stored parameters; all finite, and tied copies equal."""
    faults = Faults(CheckpointError)

    def read(name: str) -> np.ndarray:
        values = weights.read(name)
        if not np.isfinite(values).all():
            todo = "download the weights again, or take another model"
            faults.add(f"tensor {name}", expected="finite numbers", got="infinities or NaN", todo=todo)
        return values

    leaves = dict(to_canonical(tensors, read, bound.policy.params))
    for name in unused:
        if name in family.tied and not np.array_equal(weights.read(name), weights.read(family.tied[name])):
            todo = "set tie_word_embeddings to false in config.json if the two are meant to differ"
            faults.add(f"tensor {name}", expected=f"a copy of {family.tied[name]}", got="other values", todo=todo)
    params = trees.unflatten(leaves)
    faults.found += leaf_faults("params", describe_leaves(bound.abstract_params), describe_leaves(params))
    faults.raise_if_any()
    return params


def _manifest(model: ImportedModel, bound: BoundModel, params: dict[str, Any], tokenizer: Tokenizer | None) -> Manifest:
    mesh = build_mesh(MeshSpec(data=1, fsdp=1), devices=jax.devices()[:1])
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Manifest(
        step=STEP,
        experiment=to_json(model),
        versions={"jaxml": __version__, **{name: importlib.metadata.version(name) for name in PACKAGES}},
        seed=0,
        batch_size=0,
        tokenizer_fingerprint="" if tokenizer is None else tokenizer.fingerprint,
        data_fingerprint="",
        lineage=({"started": started, "mode": "import", "source": model.source},),
        leaves={"params": describe_leaves(params)},
        probe=record(_probe(model, bound, params, mesh), **circumstances(mesh.shape, model.execution, model.precision)),
        backend=jax.default_backend(),
    )


def _probe(model: ImportedModel, bound: BoundModel, params: dict[str, Any], mesh: Mesh) -> np.ndarray:
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(probe_function(bound, model.task))(params))


def _describe(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    ends = [f"{role} {id_}" for role, id_ in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)) if id_ is not None]
    return ", ".join([f"{tokenizer.vocab_size} ids", *ends, f"fingerprint {tokenizer.fingerprint[:16]}"])
