"""The probe of a model: the logits that are sealed when it is saved and reproduced before it is used.

Reads `models.build`, `models.check`, `tasks.spec` and `checkpoint.probe`; `recipes.saving` records with it and
`infer.opening` checks with it, so that both compute one function under one description of its circumstances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxml.checkpoint.probe import probe_tokens
from jaxml.models.build import BoundModel
from jaxml.models.check import decoder_of
from jaxml.models.spec import ExecutionSpec, Quantization
from jaxml.numerics.precision import Policy, dtypes
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import TaskSpec, TextClassification

PROBE_LENGTH = 16


def probe_batch(bound: BoundModel) -> dict[str, jax.Array]:
    """`tokens, positions, segment_ids` int32 [2, T] of the fixed batch: two rows, each one whole segment."""
    decoder = decoder_of(bound.spec)
    tokens = jnp.asarray(probe_tokens(decoder.vocab_size, min(PROBE_LENGTH, decoder.context_length)))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return {"tokens": tokens, "positions": positions, "segment_ids": jnp.ones_like(tokens)}


def probe_function(bound: BoundModel, task: TaskSpec) -> Callable[[Any], jax.Array]:
    """A function of params to the logits of the fixed batch: [2, T, V] of a language model, [2, C] of a classifier."""
    batch = probe_batch(bound)

    def logits(params: Any) -> jax.Array:
        module = bound.bind(params)
        outputs, _ = module(batch["tokens"], batch["positions"], batch["segment_ids"])
        return outputs if isinstance(task, TextClassification) else module.logits(outputs)

    return logits


def circumstances(
    mesh_shape: Mapping[str, int],
    execution: ExecutionSpec,
    precision: PrecisionSpec,
    quantization: Quantization | None = None,
) -> dict[str, str]:
    """What decides the bits of the probe beside the machine: keyword arguments of `probe.record` and `probe.check`."""
    # Axes that came later are named where they are used: checkpoints of before tell of data and fsdp alone.
    shape = {axis: size for axis, size in mesh_shape.items() if size > 1 or axis in ("data", "fsdp")}
    layout = f"{shape}, {execution.layers}, {execution.attention}"
    return {"compute": products(dtypes(precision), quantization), "layout": layout}


def products(policy: Policy, quantization: Quantization | None) -> str:
    """What a model multiplies in, as probes record it: it decides how far two records may be apart."""
    return policy.compute.name if quantization is None else quantization
