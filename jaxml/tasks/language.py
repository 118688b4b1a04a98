"""Next-token prediction: cross entropy in chunks that never hold all logits, z-loss, exact evaluation sums.

Reads `tasks.contract`, `tasks.spec` and `devices.sharding`; `tasks.build` makes it. Sums and logarithms run in the dtype
of the logits, which the model gives in promote_types(compute, float32). z-loss: Chowdhery et al. 2022 (PaLM), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxml.devices.sharding import TOKEN_AXIS, axis_size
from jaxml.tasks.contract import Batch, Term, require_mask
from jaxml.tasks.spec import LanguageModeling


@dataclass(frozen=True)
class LanguageModelingTask:
    """Batch: `tokens, targets, positions, segment_ids` int32 [B, T] and `loss_mask` bool [B, T]."""

    spec: LanguageModeling
    logits_chunk_bytes: int
    rows_interact: ClassVar[bool] = False

    def loss(self, model, batch: Batch, dropout_keys_B: Key[Array, " B"] | None) -> dict[str, Term]:
        """`loss`: cross entropy in nats a token. `z_loss` (if its coefficient is above 0): mean of
        logsumexp(logits)^2."""
        nll_B, square_B, _ = self._row_sums(model, batch, dropout_keys_B)
        weight = _count(batch).astype(nll_B.dtype)
        terms = {"loss": Term(nll_B.sum(), weight, 1.0)}
        if self.spec.z_loss > 0:
            terms["z_loss"] = Term(square_B.sum(), weight, self.spec.z_loss)
        return terms

    def evaluate(self, model, batch: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
        """Sums: `nll` in nats, `num_tokens` (int32, exact). No outputs of single rows."""
        nll_B, _, _ = self._row_sums(model, batch, None)
        return {"nll": nll_B.sum(), "num_tokens": _count(batch)}, {}

    def summarize(self, sums: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """`eval_loss` (nats a token), `perplexity` (infinite beyond e^700), `num_tokens`; without tokens only the
        last."""
        num_tokens = int(sums["num_tokens"])
        if num_tokens == 0:
            return {"num_tokens": 0}
        loss = float(sums["nll"]) / num_tokens
        return {"eval_loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "num_tokens": num_tokens}

    def row_losses(self, model, batch: Batch) -> Float[Array, " B"]:
        """Mean cross entropy of each row's unmasked tokens (0 for a row without any)."""
        nll_B, _, num_tokens_B = self._row_sums(model, batch, None)
        return nll_B / jnp.maximum(num_tokens_B, 1)

    def _row_sums(self, model, batch: Batch, dropout_keys_B: Key[Array, " B"] | None):
        features_BTD, _ = model(batch["tokens"], batch["positions"], batch["segment_ids"], dropout_keys_B)
        mask_BT = require_mask(batch, "loss_mask")
        nll_B, square_B = chunked_row_sums(
            model.logits, features_BTD, batch["targets"], mask_BT, self.logits_chunk_bytes
        )
        return nll_B, square_B, mask_BT.sum(axis=1, dtype=jnp.int32)


def chunked_row_sums(
    head: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    features_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    chunk_bytes: int,
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """For each row the sums over unmasked tokens of the cross entropy and of logsumexp(logits)^2.

    Once the logits of the batch would exceed `chunk_bytes`, `head` sees a run of tokens of every row at a time, in a
    scan whose body is rematerialised, so neither the forward nor the backward pass holds more than one chunk. Chunks
    are cut along T and not along B because the mesh always splits rows: each chunk stays spread over all devices.
    """
    logits = jax.eval_shape(head, features_BTD)
    num_tokens = targets_BT.shape[1]
    num_chunks = min(num_tokens, math.ceil(logits.size * logits.dtype.itemsize / chunk_bytes))
    if num_chunks <= 1:
        return _row_sums_of(head(features_BTD), targets_BT, mask_BT)
    # Where the mesh splits the tokens too, a chunk has a piece of every device's stretch, for the same reason.
    stretches = axis_size(TOKEN_AXIS) if num_tokens % axis_size(TOKEN_AXIS) == 0 else 1
    stretch = num_tokens // stretches
    piece = math.ceil(stretch / min(num_chunks, stretch))
    num_chunks = math.ceil(stretch / piece)

    def split(array):
        rows, rest = array.shape[0], array.shape[2:]
        stretched = array.reshape(rows, stretches, stretch, *rest)
        padding = [(0, 0), (0, 0), (0, num_chunks * piece - stretch)] + [(0, 0)] * len(rest)
        pieces = jnp.pad(stretched, padding).reshape(rows, stretches, num_chunks, piece, *rest)
        return jnp.moveaxis(pieces, 2, 0).reshape(num_chunks, rows, stretches * piece, *rest)

    @jax.checkpoint
    def sums_of_chunk(features_BCD, targets_BC, mask_BC):
        return _row_sums_of(head(features_BCD), targets_BC, mask_BC)

    def add_chunk(sums, chunk):
        return jax.tree.map(jnp.add, sums, sums_of_chunk(*chunk)), None

    zeros_B = jnp.zeros(targets_BT.shape[0], logits.dtype)
    sums, _ = jax.lax.scan(add_chunk, (zeros_B, zeros_B), (split(features_BTD), split(targets_BT), split(mask_BT)))
    return sums


def _row_sums_of(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    partition_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # "clip": the target of a masked token may be any number; out of range it would read NaN, which `where` keeps out of
    # the sum but not out of its gradient.
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1, mode="clip")[..., 0]
    nll_BT = jnp.where(mask_BT, partition_BT - target_BT, 0)
    square_BT = jnp.where(mask_BT, jnp.square(partition_BT), 0)
    return nll_BT.sum(axis=1), square_BT.sum(axis=1)


def _count(batch: Batch) -> Int[Array, ""]:
    return require_mask(batch, "loss_mask").sum(dtype=jnp.int32)
