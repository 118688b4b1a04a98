"""Names for the values inside a model, in the order in which the program makes them.

Reads `models.spec`; `models` names its values with it, `execution.saved_names` chooses among them what
rematerialisation keeps, and `prove` compares two runs by them. A name is an identity in the traced program and gone in
the compiled one.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Shaped

from jaxml.models.spec import VALUE_NAMES


def named(x: Shaped[Array, "*shape"], name: str) -> Shaped[Array, "*shape"]:
    """`x` itself, called `name` (one of `spec.VALUE_NAMES`) in the traced program."""
    assert name in VALUE_NAMES, name
    return checkpoint_name(x, name)


def policy_of(kind: str, saved_names: tuple[str, ...]):
    """What `jax.checkpoint` may keep for the backward pass: nothing ("full"), products without a batch dimension, which
    are the projections ("dots"), or the values of these names ("names")."""
    policies = jax.checkpoint_policies
    match kind:
        case "dots":
            return policies.dots_with_no_batch_dims_saveable
        case "names":
            return policies.save_only_these_names(*saved_names)
        case _:
            return policies.nothing_saveable
