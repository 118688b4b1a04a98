"""The parameters of a model as those of its quantized form.

Reads `numerics.quantized`, `models.build` and `trees`; `recipes.quantizing` calls it. The arithmetic is per output channel
and looks at the weights alone: no data, no order, no randomness.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxml import trees
from jaxml.models.build import BoundModel
from jaxml.numerics.quantized import quantize_weights


def quantized_params(quantized: BoundModel, params: dict[str, Any]) -> dict[str, Any]:
    """Canonical parameters of the model without `quantization`, as those of `quantized`.

    A matrix that `quantized` stores as `values` and `scales` was `kernel` (in, out) or `table` (out, in) under the same
    name; all other leaves are taken as they are.
    """
    given = trees.flatten(params)
    made: dict[str, Any] = {}
    for path in trees.flatten(quantized.abstract_params):
        owner, _, leaf = path.rpartition(".")
        if leaf == "values":
            made[path], made[f"{owner}.scales"] = _quantize(given, owner)
        elif leaf != "scales":
            made[path] = given[path]
    return trees.unflatten(made)


@jax.jit
def _from_kernel(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    return quantize_weights(jnp.swapaxes(kernel, -1, -2))


_from_table = jax.jit(quantize_weights)


def _quantize(given: dict[str, Any], owner: str) -> tuple[jax.Array, jax.Array]:
    if f"{owner}.table" in given:
        return _from_table(given[f"{owner}.table"])
    return _from_kernel(given[f"{owner}.kernel"])
