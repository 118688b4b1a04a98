"""Which dtype each kind of number has, as data. No jax.

Reads `config.spec`; `numerics.precision` turns names into dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxml.config.spec import Spec


@dataclass(frozen=True)
class PrecisionSpec(Spec):
    """`params` are stored and updated in one dtype, products `compute` in another; reductions, norms and the loss are
    in promote_types(compute, float32)."""

    params: Literal["float32", "float64", "bfloat16"] = "float32"
    compute: Literal["float32", "float64", "bfloat16"] = "float32"
