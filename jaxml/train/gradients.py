"""The loss of a global batch and its gradient, at once or by microbatches, with one result for any split.

Reads `devices.sharding`, `keys`, `models.build`, `tasks.contract`; `train.step` calls it inside its jit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key

from jaxml import keys
from jaxml.devices.sharding import constrain_batch
from jaxml.models.build import BoundModel
from jaxml.tasks.contract import Batch, Task, Term
from jaxml.train.state import widen


class LossGradients(NamedTuple):
    """`loss` = sum over terms of coefficient * sum / weight; `means`: sum / weight of each term; `gradients` of
    `loss`."""

    loss: Float[Array, ""]
    means: dict[str, Float[Array, ""]]
    gradients: Any


def loss_gradients(
    bound: BoundModel,
    task: Task,
    params: Any,
    batch: Batch,
    dropout_key: Key[Array, ""] | None,
    accumulate: int,
    mesh: Mesh,
    shardings: Any,
) -> LossGradients:
    """The loss and gradient of the whole batch; with `accumulate` = A > 1 in a scan over A microbatches.

    Microbatch j holds rows j, A + j, 2A + j, ...: with rows split over devices every device then has its share of each
    microbatch, and nothing moves. Every term is divided by its weight over the *global* batch inside each microbatch,
    so the gradients of the microbatches add up to that of the batch, however ragged the masks (transformers 37766 and
    many others). Gradients are pinned to the parameters' shardings, in promote_types(parameter dtype, float32).
    """

    def terms_of(params: Any, rows: Batch) -> dict[str, Term]:
        dropout_keys_B = None if dropout_key is None else keys.row_keys(dropout_key, rows["row"])
        return task.loss(bound.bind(params), rows, dropout_keys_B)

    def scaled_loss(params: Any, rows: Batch, weights: dict[str, Array] | None):
        terms = terms_of(params, rows)
        weights = _divisors(terms) if weights is None else weights
        means = {name: term.sum / weights[name] for name, term in terms.items()}
        return sum(term.coefficient * means[name] for name, term in terms.items()), means

    def gradient_of(rows: Batch, weights: dict[str, Array] | None) -> LossGradients:
        (loss, means), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(params, rows, weights)
        return LossGradients(loss, means, jax.lax.with_sharding_constraint(widen(gradients), shardings))

    if accumulate == 1:
        return gradient_of(batch, None)
    # This traces the whole batch through the model for the weights alone. They depend on the batch only, so XLA removes
    # the forward pass as dead code: nothing of it is computed or held.
    weights = _divisors(terms_of(params, batch))
    microbatches = {name: jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0) for name, x in batch.items()}

    def add_microbatch(total: LossGradients, rows: Batch) -> tuple[LossGradients, None]:
        part = gradient_of({name: constrain_batch(x, mesh) for name, x in rows.items()}, weights)
        return jax.tree.map(jnp.add, total, part), None

    zeros = LossGradients(
        jnp.zeros((), next(iter(weights.values())).dtype),
        jax.tree.map(jnp.zeros_like, weights),
        jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, widen(params)), shardings),
    )
    total, _ = jax.lax.scan(add_microbatch, zeros, microbatches)
    return total


def _divisors(terms: dict[str, Term]) -> dict[str, Array]:
    """A batch without a single counted token has loss 0 and gradient 0, not 0 / 0."""
    return {name: jnp.where(term.weight > 0, term.weight, 1) for name, term in terms.items()}
