"""From a checkpoint to something that can run: verified, its probe reproduced, its tokenizer at hand.

Reads `checkpoint`, `models.build`, `models.check`, `inputs.tokenizers`, `devices.mesh` and `infer.sealed`; the language model, the
classifier, scoring and serving begin here.

A manifest's experiment is read by its parts (model, task, precision, execution): to resolve it whole would import the
training code that wrote it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxml.checkpoint.folders import find_checkpoint, read_manifest, read_tokenizer_files, resolve
from jaxml.checkpoint.manifest import Manifest
from jaxml.checkpoint.params import load_params
from jaxml.checkpoint.probe import check
from jaxml.config.spec import from_json
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.errors import CheckpointError, ConfigError, JaxmlError
from jaxml.infer.sealed import circumstances, probe_function
from jaxml.inputs.tokenizers import Tokenizer, load_tokenizer
from jaxml.models.build import BoundModel, bind_model
from jaxml.models.check import decoder_of
from jaxml.models.spec import ExecutionSpec, ModelSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import TaskSpec


@dataclass(frozen=True)
class Described:
    """What a checkpoint's manifest says, without any array. `data` is the experiment's data spec as JSON (imported
    models have none)."""

    directory: str
    step: int
    manifest: Manifest
    name: str
    model: ModelSpec
    task: TaskSpec
    precision: PrecisionSpec
    execution: ExecutionSpec
    data: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint that gave its sealed logits here. `params` are canonical, on the devices of `mesh`."""

    described: Described
    bound: BoundModel
    params: dict[str, Any]
    mesh: Mesh
    tokenizer: Tokenizer | None

    @property
    def manifest(self) -> Manifest:
        return self.described.manifest

    @property
    def model(self) -> ModelSpec:
        return self.described.model

    @property
    def task(self) -> TaskSpec:
        return self.described.task

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names in order; none for a language model."""
        return self.manifest.labels

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises CheckpointError for a checkpoint that was saved without one."""
        if self.tokenizer is None:
            raise CheckpointError(
                f"the tokenizer of checkpoint {self.described.directory}, step {self.described.step}",
                expected="the files of the tokenizer that it was trained with",
                got="a checkpoint that was saved without one",
                todo="resume the run for one step to save it again, or ask with token ids",
            )
        return self.tokenizer


def describe_checkpoint(path: str | os.PathLike[str]) -> Described:
    """What the checkpoint at a run, checkpoints or step directory says it is; no array and no device is touched.

    Raises CheckpointError: nothing complete there, a broken seal, a spec that this jaxml does not know.
    """
    directory, step = find_checkpoint(path)
    manifest = read_manifest(resolve(directory), step)
    sealed = manifest.experiment
    try:
        parts = {name: from_json(sealed[name]) for name in ("model", "task", "precision", "execution")}
    except (KeyError, ConfigError) as error:
        raise CheckpointError(
            f"the experiment in {directory}, step {step}",
            expected="a model, a task, a precision and an execution that this jaxml knows",
            got=str(error)[:300],
            todo="open it with the jaxml that wrote it",
        ) from error
    name = str(sealed.get("name", "")) or "model"
    return Described(directory, step, manifest, name, data=sealed.get("data") or {}, **parts)


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """The model at `path`, on one device, after it has reproduced its probe.

    Raises CheckpointError where `describe_checkpoint` does, and when the arrays do not give the sealed logits: exact
    bits under the recorded circumstances, a stated bound and the same top tokens elsewhere.
    """
    described = describe_checkpoint(path)
    if "float64" in (described.precision.params, described.precision.compute):
        jax.config.update("jax_enable_x64", True)
    bound = _bind(described)
    mesh = build_mesh(MeshSpec(data=1, fsdp=1), devices=jax.devices()[:1])
    step_folder = os.path.join(described.directory, str(described.step))
    params, _ = load_params(step_folder, mesh, bound.logical_axes)
    opened = Opened(described, bound, params, mesh, _tokenizer(described))
    faults = check(
        described.manifest.probe,
        probe_logits(opened),
        **circumstances(mesh.shape, bound.execution, described.precision, decoder_of(described.model).quantization),
    )
    if faults:
        raise CheckpointError.from_faults(faults)
    return opened


def probe_logits(opened: Opened) -> np.ndarray:
    """The logits of the probe batch by the full forward pass on the canonical parameters."""
    with jax.set_mesh(opened.mesh):
        return np.asarray(jax.jit(probe_function(opened.bound, opened.task))(opened.params))


def _bind(described: Described) -> BoundModel:
    """The model as it was executed, or by this backend's own attention where the recorded one cannot run here."""
    try:
        return bind_model(described.model, described.precision, described.execution)
    except ConfigError:
        return bind_model(described.model, described.precision, replace(described.execution, attention="auto"))


def _tokenizer(described: Described) -> Tokenizer | None:
    files = read_tokenizer_files(resolve(described.directory), described.step)
    if not files:
        return None
    where = f"the tokenizer of checkpoint {described.directory}, step {described.step}"
    with _folder_of(files) as folder:
        try:
            tokenizer = load_tokenizer(folder)
        except JaxmlError as error:
            todo = "take another checkpoint: this one was changed or damaged after it was saved"
            raise CheckpointError(
                where, expected="files that load", got=str(error)[:300].replace(str(folder), "it"), todo=todo
            ) from error
    if tokenizer.fingerprint != described.manifest.tokenizer_fingerprint:
        raise CheckpointError(
            where,
            expected=f"the fingerprint that is sealed, {described.manifest.tokenizer_fingerprint[:16]}",
            got=tokenizer.fingerprint[:16],
            todo="take another checkpoint: this one was changed or damaged after it was saved",
        )
    return tokenizer


@contextlib.contextmanager
def _folder_of(files: dict[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="jaxml-tokenizer-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        yield Path(folder)
