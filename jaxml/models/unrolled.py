"""The layout of parameters that decoding is fast in: a leaf of its own for every layer.

Reads `models.spec` and `trees`; `infer` prepares it once at load. It is the canonical layout of the same model with its
pattern of blocks written out in full, so that every module and every check works on it unchanged. Slices of stacked
weights inside a decoding step are copied at every token, which takes up to ten times as long on a CPU; fusing query, key
and value, or gate and up, into one product gained nothing measurable there, and (out, in) weights gained 5 % at one row
and lost 15 % at eight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxml import trees
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
