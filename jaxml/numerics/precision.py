"""Turns the dtype names of a precision spec into dtypes, and casts trees of parameters.

Reads `numerics.spec` and `errors`; `models` computes in `compute` and `train` stores in `params`. Reductions, norms,
the softmax and the loss are in `accumulate` = promote_types(compute, float32): never a literal float32, so that proofs
can run the same code in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxml.errors import ConfigError, Faults
from jaxml.numerics.spec import FASTEST, LossScaleSpec, PrecisionSpec, precision_faults, resolved


class Policy(NamedTuple):
    """The dtypes of stored parameters, of products, of reductions, and of what a model gives (logits).

    `is_float8`: the training products of the blocks are made in float8, out of and into `compute`
    (`numerics.float8`). `loss_scale`: how the loss is scaled, where `compute` is float16; None elsewhere.
    """

    params: jnp.dtype
    compute: jnp.dtype
    accumulate: jnp.dtype
    output: jnp.dtype
    is_float8: bool = False
    loss_scale: LossScaleSpec | None = None


def dtypes(spec: PrecisionSpec, backend: str | None = None) -> Policy:
    """The dtypes that a spec names on a backend (None: the one that JAX uses by default).

    Raises ConfigError when float64 is asked for and JAX has it switched off, and for a loss scale that cannot be right.

    >>> dtypes(PrecisionSpec(compute="bfloat16")).accumulate
    dtype('float32')
    """
    backend = jax.default_backend() if backend is None else backend
    faults = Faults(ConfigError)
    faults.found.extend(precision_faults(spec))
    faults.raise_if_any()
    if "float64" in (spec.params, spec.compute) and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ConfigError(
            "precision",
            expected="float32 or bfloat16, or jax_enable_x64 switched on",
            got=f"params {spec.params}, compute {spec.compute} with jax_enable_x64 off",
            todo="run under jax.enable_x64(True), or choose float32",
        )
    is_float8 = spec.compute == "float8"
    name = FASTEST.get(backend, "float32") if is_float8 else resolved(spec, backend).compute
    scale = spec.loss_scale if name == "float16" else None
    compute = jnp.dtype(name)
    wide = accumulate_dtype(compute)
    return Policy(jnp.dtype(spec.params), compute, wide, wide, is_float8, scale)


def describe(policy: Policy) -> str:
    """One line for a person: which dtype is where.

    >>> describe(dtypes(PrecisionSpec(compute="float16")))
    'params float32, compute float16 (loss scale from 32768), accumulate float32, output float32'
    """
    special = " (float8 products)" if policy.is_float8 else ""
    if policy.loss_scale is not None:
        special = f" (loss scale from {policy.loss_scale.initial:g})"
    return (
        f"params {policy.params.name}, compute {policy.compute.name}{special}, "
        f"accumulate {policy.accumulate.name}, output {policy.output.name}"
    )


def accumulate_dtype(compute: Any) -> jnp.dtype:
    """The dtype of reductions over values of dtype `compute`."""
    return jnp.promote_types(compute, jnp.float32)


def cast_floating(tree: Any, dtype: Any) -> Any:
    """The tree with its floating-point leaves in `dtype`; integers, booleans and keys are left alone."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
