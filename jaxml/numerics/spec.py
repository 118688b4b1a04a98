"""Which dtype each kind of number has, and how a float16 loss is scaled, as data. No jax.

Reads `config.spec` and `errors`; `numerics.precision` turns names into dtypes, `numerics.loss_scale` follows
`LossScaleSpec`, `recipes.checks` asks for faults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jaxml.config.spec import Spec
from jaxml.errors import Fault

# What "auto" computes in: the fastest dtype with float32's range. GPUs and TPUs have matrix units for bfloat16; on CPUs half
# precision gains nothing (docs/adr/0008-precision.md). A backend that is not named here gets float32.
FASTEST: dict[str, Literal["float32", "bfloat16"]] = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}


@dataclass(frozen=True)
class LossScaleSpec(Spec):
    """The dynamic loss scale of float16 training (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    All scales are best powers of two: multiplying and dividing by them is exact.
    `initial`: 2^15 lifts gradients down to 2^-39 above float16's smallest number, 2^-24. Too high costs one skipped
    update for every factor of two, too low rounds small gradients to zero unseen; so it starts high.
    `growth_interval`: updates without overflow after which the scale doubles. If every doubling overflows, one update in
    200 is left out; runs of a few hundred steps still find their scale.
    `smallest`: below 1 the scale would shrink gradients that do not fit float16 by themselves: then the run stops.
    `largest`: 2^24 makes 1 of float16's smallest number; more cannot help, and gradients that are all zero would double
    the scale to infinity.
    """

    initial: float = 2.0**15
    growth_interval: int = 200
    smallest: float = 1.0
    largest: float = 2.0**24


@dataclass(frozen=True)
class PrecisionSpec(Spec):
    """`params` are stored and updated in one dtype, products are computed in another; reductions, norms, the loss and what
    the model gives (logits) are in promote_types(compute, float32).

    `compute`: "auto" is the fast one of the backend (`FASTEST`). "float16" trains with a dynamic loss scale. "float8"
    makes the training products of the blocks in float8 (e4m3 forward, e5m2 for incoming gradients) and everything else,
    evaluation and decoding included, in the dtype of "auto"; it needs the extra `float8`.
    `loss_scale` is read for float16 only.
    """

    params: Literal["float32", "float64", "bfloat16"] = "float32"
    compute: Literal["auto", "float32", "float64", "bfloat16", "float16", "float8"] = "auto"
    loss_scale: LossScaleSpec = LossScaleSpec()


def resolved(spec: PrecisionSpec, backend: str) -> PrecisionSpec:
    """The spec with the dtype that "auto" means on a backend ("cpu", "gpu", "tpu"): what records say.

    >>> resolved(PrecisionSpec(), "gpu").compute
    'bfloat16'
    """
    return replace(spec, compute=FASTEST.get(backend, "float32")) if spec.compute == "auto" else spec


def precision_faults(spec: PrecisionSpec) -> list[Fault]:
    """What is wrong with a precision, apart from what JAX has to be asked: a loss scale that cannot move as it should."""
    scale = spec.loss_scale
    if spec.compute != "float16" or (
        0 < scale.smallest <= scale.initial <= scale.largest and scale.growth_interval >= 1
    ):
        return []
    return [
        Fault(
            "precision.loss_scale",
            expected="0 < smallest <= initial <= largest, and a growth_interval of at least 1",
            got=f"smallest {scale.smallest:g}, initial {scale.initial:g}, largest {scale.largest:g}, "
            f"growth_interval {scale.growth_interval}",
            todo="leave precision.loss_scale at its defaults, or correct these fields",
        )
    ]
