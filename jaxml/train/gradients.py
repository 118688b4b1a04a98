"""The loss of a global batch and its gradient, at once or by microbatches, with one result for any split.

Reads `devices.sharding`, `keys`, `models.build`, `models.parameters`, `tasks.contract`; `train.step` calls it inside its
jit.
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
from jaxml.models.classifier import Classifier
from jaxml.models.parameters import use_float8
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
    scale: Float[Array, ""] | None = None,
) -> LossGradients:
    """The loss and gradient of the whole batch; with `accumulate` = A > 1 in a scan over A microbatches.

    Microbatch j holds rows j, A + j, 2A + j, ...: with rows split over devices every device then has its share of each
    microbatch, and nothing moves. Every term is divided by its weight over the *global* batch inside each microbatch,
    so the gradients of the microbatches add up to that of the batch, however ragged the masks (transformers 37766 and
    many others). Gradients are pinned to the parameters' shardings, in promote_types(parameter dtype, float32).

    `scale` multiplies what is differentiated, so that small gradients survive float16, and divides the wide sum of the
    gradients: what is returned is the gradient of `loss` itself, not finite where the scaled one overflowed.
    """

    def terms_of(params: Any, rows: Batch) -> dict[str, Term]:
        dropout_keys_B = None if dropout_key is None else keys.row_keys(dropout_key, rows["row"])
        return task.loss(training_model(bound, params), rows, dropout_keys_B)

    def objective(params: Any, rows: Batch, weights: dict[str, Array] | None):
        terms = terms_of(params, rows)
        weights = _divisors(terms) if weights is None else weights
        means = {name: term.sum / weights[name] for name, term in terms.items()}
        loss = sum(term.coefficient * means[name] for name, term in terms.items())
        return loss if scale is None else loss * scale, (loss, means)

    def gradient_of(rows: Batch, weights: dict[str, Array] | None) -> LossGradients:
        (_, (loss, means)), gradients = jax.value_and_grad(objective, has_aux=True)(params, rows, weights)
        return LossGradients(loss, means, jax.lax.with_sharding_constraint(widen(gradients), shardings))

    if accumulate == 1:
        return _unscaled(gradient_of(batch, None), scale)
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
    return _unscaled(total, scale)


def training_model(bound: BoundModel, params: Any) -> Any:
    """The model of a pass of training: that of `bound.bind`, with the products of its blocks in float8 where the
    precision says so. Pure; call it inside a trace."""
    model = bound.bind(params)
    if bound.policy.is_float8:
        use_float8((model.decoder if isinstance(model, Classifier) else model).blocks)
    return model


def _unscaled(scaled: LossGradients, scale: Array | None) -> LossGradients:
    if scale is None:
        return scaled
    return scaled._replace(gradients=jax.tree.map(lambda leaf: leaf / scale.astype(leaf.dtype), scaled.gradients))


def _divisors(terms: dict[str, Term]) -> dict[str, Array]:
    """A batch without a single counted token has loss 0 and gradient 0, not 0 / 0."""
    return {name: jnp.where(term.weight > 0, term.weight, 1) for name, term in terms.items()}
