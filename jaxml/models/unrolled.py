"""The layout of parameters that decoding is fast in: a leaf of its own for every layer, and matrices as (out, in).

Reads `models.build`, `models.decoder`, `models.parameters`, `models.spec` and `trees`; `infer` prepares it once at load. It
is the canonical layout of the same model with its pattern of blocks written out in full, so that every module works on it.
Slices of stacked weights inside a decoding step are copied at every token, which takes up to ten times as long on a CPU;
(out, in) matrices take 0.6 to 0.9 of the time of (in, out) ones for 2 to 32 rows, and no more for one; fusing query, key and
value, or gate and up, into one product gained nothing measurable there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxml import trees
from jaxml.models.build import BoundModel
from jaxml.models.decoder import Decoder
from jaxml.models.parameters import Linear
from jaxml.models.spec import DecoderSpec


def unrolled_spec(spec: DecoderSpec) -> DecoderSpec:
    """The same decoder with one block of the pattern for every layer."""
    return dataclasses.replace(spec, blocks=spec.blocks * (spec.num_layers // len(spec.blocks)))


def unrolled_params(spec: DecoderSpec, params: dict[str, Any]) -> dict[str, Any]:
    """Canonical parameters of `spec` as those of `unrolled_spec(spec)`: leaf (L/p, ...) of `blocks.<i>` becomes L/p leaves
    (1, ...) of `blocks.<i>`, `blocks.<i + p>` and so on."""
    period = len(spec.blocks)
    flat: dict[str, Any] = {}
    for path, leaf in trees.flatten(params).items():
        room, _, rest = path.partition(".")
        if room != "blocks":
            flat[path] = leaf
            continue
        index, _, name = rest.partition(".")
        for row in range(leaf.shape[0]):
            flat[f"blocks.{int(index) + row * period}.{name}"] = leaf[row : row + 1]
    return trees.unflatten(flat)


def for_decoding(bound: BoundModel) -> BoundModel:
    """The same model over parameters whose matrices are as `out_in` leaves them."""
    model = nnx.merge(bound.graphdef, bound.abstract_params)
    assert isinstance(model, Decoder)
    model.is_out_in = True
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.is_out_in = True
    return dataclasses.replace(bound, graphdef=nnx.split(model)[0])


def out_in(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with every kernel, stacked or not, as (..., out, in)."""

    def turned(path: str, leaf: jax.Array) -> jax.Array:
        return leaf.swapaxes(-1, -2) if path.rpartition(".")[2] == "kernel" else leaf

    return trees.unflatten({path: turned(path, leaf) for path, leaf in trees.flatten(params).items()})
