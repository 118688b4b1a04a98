"""Small checkpoints that were never trained, written as training writes them: random weights, sealed, with tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from jaxml.inputs.tokenizers import ByteTokenizer, Tokenizer
from jaxml.models.build import bind_model
from jaxml.models.spec import AttentionSpec, BlockSpec, ClassifierSpec, DecoderSpec, ExecutionSpec, MlpSpec, RopeSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import LanguageModeling, TaskSpec, TextClassification

LABELS = ("ham", "spam", "other")
ROW_LENGTH = 24


def small_decoder(is_causal: bool = True, context_length: int = 256) -> DecoderSpec:
    """2 layers of width 16 over bytes."""
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_width=8, rope=RopeSpec())
    return DecoderSpec(
        vocab_size=257,
        context_length=context_length,
        width=16,
        num_layers=2,
        blocks=(BlockSpec(attention, MlpSpec(width=32)),),
        is_causal=is_causal,
    )


def write_language_model(directory: Path, tokenizer: Tokenizer | None = None, scale: float = 3.0) -> Path:
    """A language model over bytes, at step 1 of a store in `directory`."""
    return write(directory, small_decoder(), LanguageModeling(), {}, tokenizer, scale)


def write_classifier(directory: Path, too_long: str = "truncate") -> Path:
    """A classifier of texts into three classes, with rows of `ROW_LENGTH` bytes."""
    data = {"sequence_length": ROW_LENGTH, "too_long": too_long}
    model = ClassifierSpec(small_decoder(is_causal=False, context_length=32), num_classes=len(LABELS))
    return write(directory, model, TextClassification(labels=LABELS), data)


def write(
    directory: Path,
    model: Any,
    task: TaskSpec,
    data: dict[str, Any],
    tokenizer: Tokenizer | None = None,
    scale: float = 3.0,
) -> Path:
    """Save random parameters of `model` with a manifest like that of a run.

    scale: of the weights, against those with which training begins, so that answers depend visibly on what was asked.
    """
    tokenizer = tokenizer or ByteTokenizer()
    precision, execution = PrecisionSpec(), ExecutionSpec()
    bound = bind_model(model, precision, execution)
    mesh = build_mesh(MeshSpec(data=1, fsdp=1), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = jax.jit(bound.init)(keys.root_key(3))
        params = jax.tree.map(lambda leaf: scale * leaf, params)
        logits = jax.jit(probe_function(bound, task))(params)
    parts = {"model": model, "task": task, "precision": precision, "execution": execution}
    manifest = Manifest(
        step=1,
        experiment={"name": "small", "data": data, **{name: to_json(part) for name, part in parts.items()}},
        versions={},
        seed=0,
        batch_size=1,
        tokenizer_fingerprint=tokenizer.fingerprint,
        data_fingerprint="",
        leaves={"params": describe_leaves(params)},
        probe=record(logits, **circumstances(mesh.shape, execution, precision)),
        backend=jax.default_backend(),
        labels=task.labels if isinstance(task, TextClassification) else (),
    )
    with CheckpointStore(directory) as store:
        store.save(1, {"params": params}, manifest, tokenizer.files())
    return directory
