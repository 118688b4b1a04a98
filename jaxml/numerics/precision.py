"""Turns the dtype names of a precision spec into dtypes, and casts trees of parameters.

Reads `numerics.spec` and `errors`; `models` computes in `compute` and `train` stores in `params`. Reductions, norms,
the softmax and the loss are in `accumulate` = promote_types(compute, float32): never a literal float32, so that proofs
can run the same code in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxml.errors import ConfigError
from jaxml.numerics.spec import PrecisionSpec


class Policy(NamedTuple):
    """The dtypes of stored parameters, of products, and of reductions."""

    params: jnp.dtype
    compute: jnp.dtype
    accumulate: jnp.dtype


def dtypes(spec: PrecisionSpec) -> Policy:
    """The dtypes that a spec names. Raises ConfigError when float64 is asked for and JAX has it switched off.

    >>> dtypes(PrecisionSpec(compute="bfloat16")).accumulate
    dtype('float32')
    """
    if "float64" in (spec.params, spec.compute) and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ConfigError(
            "precision",
            expected="float32 or bfloat16, or jax_enable_x64 switched on",
            got=f"params {spec.params}, compute {spec.compute} with jax_enable_x64 off",
            todo="run under jax.enable_x64(True), or choose float32",
        )
    compute = jnp.dtype(spec.compute)
    return Policy(jnp.dtype(spec.params), compute, accumulate_dtype(compute))


def accumulate_dtype(compute: Any) -> jnp.dtype:
    """The dtype of reductions over values of dtype `compute`."""
    return jnp.promote_types(compute, jnp.float32)


def cast_floating(tree: Any, dtype: Any) -> Any:
    """The tree with its floating-point leaves in `dtype`; integers, booleans and keys are left alone."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
