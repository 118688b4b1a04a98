"""The dynamic loss scale of float16: what it starts as, and what it becomes after a step. Pure, made for `jit`.

Reads `numerics.spec`; `train.state` holds it, `train.step` moves it and `train.guard` judges it. Small gradients become
zero in float16, so the loss is multiplied by a scale and the float32 gradient divided by it. A step whose scaled gradient
overflows is left out and the scale halves; after a number of good steps it doubles (Micikevicius et al. 2018,
arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxml.numerics.spec import LossScaleSpec

# `scale` float32; int32: `good_steps` since the scale last changed, `skipped` updates in all, `skipped_in_a_row`.
LossScale: TypeAlias = dict[str, Float[Array, ""] | Int[Array, ""]]


def initial_loss_scale(spec: LossScaleSpec) -> LossScale:
    """The loss scale before the first step."""
    counts = {name: jnp.zeros((), jnp.int32) for name in ("good_steps", "skipped", "skipped_in_a_row")}
    return {"scale": jnp.asarray(spec.initial, jnp.float32), **counts}


def next_loss_scale(
    spec: LossScaleSpec, now: LossScale, is_applied: Bool[Array, ""], is_overflow: Bool[Array, ""]
) -> LossScale:
    """The loss scale after a step that was applied, or left out for an overflow, or (neither) left out because the loss
    itself was not finite, which says nothing about the scale.

    >>> spec, no, yes = LossScaleSpec(initial=8.0), jnp.array(False), jnp.array(True)
    >>> after = next_loss_scale(spec, initial_loss_scale(spec), no, yes)
    >>> {name: value.item() for name, value in after.items()}
    {'scale': 4.0, 'good_steps': 0, 'skipped': 1, 'skipped_in_a_row': 1}
    """
    scale, overflow = now["scale"], is_overflow.astype(jnp.int32)
    good_steps = now["good_steps"] + is_applied
    grows = good_steps >= spec.growth_interval
    grown = jnp.where(grows, jnp.minimum(2 * scale, spec.largest), scale)
    return {
        "scale": jnp.where(is_overflow, jnp.maximum(scale / 2, spec.smallest), grown),
        "good_steps": jnp.where(is_overflow | grows, 0, good_steps),
        "skipped": now["skipped"] + overflow,
        "skipped_in_a_row": jnp.where(is_applied, 0, now["skipped_in_a_row"] + overflow),
    }
