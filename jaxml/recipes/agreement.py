"""How far a changed language model is from the one that it was made of, over the same held-out tokens.

Reads `infer.evaluation`, `infer.scoring` and, for the data that a run held out, `recipes.preparing`; `recipes.quantizing`
judges by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxml.config.spec import from_json
from jaxml.errors import ConfigError, RequestError
from jaxml.infer.evaluation import windows
from jaxml.infer.opening import Opened
from jaxml.infer.scoring import language_model_spec, padded_length
from jaxml.infer.text import encode_prompt
from jaxml.models.build import BoundModel
from jaxml.observe.progress import Stream
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.preparing import Teller, prepare_data
from jaxml.recipes.saving import refuse_other_data


class Piece(NamedTuple):
    """Token ids, at most one more than the context; those from index `counted_from` (at least 1) on are predicted and
    counted."""

    ids: Int[np.ndarray, " _"]
    counted_from: int

    @property
    def num_counted(self) -> int:
        return len(self.ids) - self.counted_from


@dataclass(frozen=True)
class Agreement:
    """`nats_before`, `nats_after`: minus the log-probability of all `num_tokens` counted tokens. `num_agreeing`: places at
    which both models find the same token the most likely. `largest_logit_error`: over all places and all tokens."""

    nats_before: float
    nats_after: float
    num_agreeing: int
    num_tokens: int
    largest_logit_error: float

    @property
    def perplexity_before(self) -> float:
        return _perplexity(self.nats_before / self.num_tokens)

    @property
    def perplexity_after(self) -> float:
        return _perplexity(self.nats_after / self.num_tokens)

    @property
    def perplexity_increase(self) -> float:
        """As a share: 0.05 is 5 % more."""
        return math.expm1(min((self.nats_after - self.nats_before) / self.num_tokens, 700.0))

    @property
    def greedy_agreement(self) -> float:
        return self.num_agreeing / self.num_tokens


def pieces_of_text(opened: Opened, text: str, max_tokens: int) -> list[Piece]:
    """The first `max_tokens` of a text in windows that overlap by half, each token counted once, as `jaxml eval --text`
    cuts it. Raises RequestError for a text with nothing to count."""
    context = language_model_spec(opened).context_length
    ids = np.asarray(encode_prompt(opened.require_tokenizer(), text), np.int64)[: max_tokens + 1]
    if len(ids) < 2:
        expected = "a text with a token that has another one before it"
        raise RequestError("the held-out text", expected=expected, got=f"{len(ids)} tokens", todo="give a longer text")
    cut = windows(len(ids), context, max(1, context // 2))
    return [Piece(ids[window.start : window.end], window.counted_from - window.start) for window in cut]


def pieces_of_run(opened: Opened, max_tokens: int, stream: Stream) -> list[Piece]:
    """Segments of the data that the checkpoint's run held out, in order, until they have `max_tokens`.

    Words about data that has to be prepared go to `stream`. Raises ConfigError for a checkpoint that no run wrote;
    CheckpointError where the data is not what the run had, DataError where its sources are gone.
    """
    experiment = from_json(opened.manifest.experiment)
    owner = f"the checkpoint of step {opened.described.step} in {opened.described.directory}"
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            "--text",
            expected=f"a held-out text, because {owner} has no data of its own",
            got="nothing",
            todo="name a text that the model was not trained on",
        )
    prepared = prepare_data(experiment, Teller(stream))
    refuse_other_data(opened.manifest, prepared, owner)
    pieces: list[Piece] = []
    left = max_tokens
    for source, num_rows in enumerate(prepared.num_rows("held_out")):
        for row in range(num_rows):
            for document, start, length in prepared.segments("held_out", source, row).tolist():
                if left <= 0:
                    return pieces
                taken = min(length, left)
                pieces.append(Piece(np.asarray(prepared.tokens(document, start, taken + 1), np.int64), 1))
                left -= taken
    if not pieces:
        raise ConfigError("--text", expected="a held-out text", got="a run that held out nothing", todo="name a text")
    return pieces


def compare(before: Opened, after: Opened, pieces: Sequence[Piece]) -> Agreement:
    """Both models over the same pieces, by the full forward pass. The two have one vocabulary and one context."""
    spec = language_model_spec(before)
    by_length: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_length.setdefault(padded_length(len(piece.ids) - 1, spec.context_length), []).append(piece)
    nats = np.zeros(2)
    num_agreeing, largest = 0, 0.0
    for length, group in sorted(by_length.items()):
        num_rows = max(1, before.bound.execution.logits_chunk_bytes // (4 * length * spec.vocab_size))
        num_rows = min(num_rows, 1 << (len(group) - 1).bit_length())
        for start in range(0, len(group), num_rows):
            batch = _batch(group[start : start + num_rows], num_rows, length)
            with jax.set_mesh(before.mesh):
                found = jax.device_get(_compare((before.bound, after.bound), (before.params, after.params), *batch))
            nats += np.asarray(found[0], np.float64)
            num_agreeing += int(found[1])
            largest = max(largest, float(found[2])) if np.isfinite(found[2]) else math.inf
    num_tokens = sum(piece.num_counted for piece in pieces)
    return Agreement(float(nats[0]), float(nats[1]), num_agreeing, num_tokens, largest)


def _batch(pieces: Sequence[Piece], num_rows: int, length: int) -> tuple[np.ndarray, ...]:
    """`inputs`, `targets`, `segment_ids` int32 and `is_counted` bool [B, T]."""
    inputs, targets, segments = (np.zeros((num_rows, length), np.int32) for _ in range(3))
    is_counted = np.zeros((num_rows, length), bool)
    for row, piece in enumerate(pieces):
        end = len(piece.ids) - 1
        inputs[row, :end], targets[row, :end], segments[row, :end] = piece.ids[:-1], piece.ids[1:], 1
        is_counted[row, piece.counted_from - 1 : end] = True
    return inputs, targets, segments, is_counted


@partial(jax.jit, static_argnums=0)
def _compare(
    models: tuple[BoundModel, BoundModel],
    params: tuple[Any, Any],
    inputs_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    is_counted_BT: Array,
) -> tuple[Float[Array, " 2"], Int[Array, ""], Float[Array, ""]]:
    """(nats of each model, places of one mind, largest difference of a logit) over the counted places."""
    positions_BT = jnp.broadcast_to(jnp.arange(inputs_BT.shape[1], dtype=jnp.int32), inputs_BT.shape)
    both = []
    for model, values in zip(models, params, strict=True):
        module = model.bind(values)
        both.append(module.logits(module(inputs_BT, positions_BT, segment_ids_BT)[0]))

    def nats(logits_BTV: Array) -> Array:
        picked_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
        return jnp.sum((jax.nn.logsumexp(logits_BTV, axis=-1) - picked_BT) * is_counted_BT)

    is_same_BT = both[0].argmax(-1) == both[1].argmax(-1)
    errors_BT = jnp.max(jnp.abs(both[0] - both[1]), axis=-1)
    largest = jnp.max(jnp.where(is_counted_BT, errors_BT, 0.0))
    return jnp.stack([nats(logits) for logits in both]), jnp.sum(is_same_BT & is_counted_BT), largest


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
