"""Computes the spans of a step on the device: prompts in pieces, and all rows that decode in one call. Fixed shapes.

Reads `infer.decode`, `infer.decoding_model`, `infer.sampling`, `infer.work` and `models.paged`; `infer.scheduler` drives it,
`infer.flat_runner` is the other one. One thread.

Every program is compiled by `warm_up`; `shapes` lists them. What a step costs is measured while it runs, so that prompts
take no more of the time of those who decode than `STALL` says, and small models draw several tokens a call.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxml.infer.decode import MAX_STEPS, Steps, decode_steps, prefill
from jaxml.infer.decoding_model import DecodingModel
from jaxml.infer.request import MAX_LOGPROBS, Request, Sampling
from jaxml.infer.sampling import Drawn, Rows, empty_rows, make_row, num_words, sample
from jaxml.infer.work import Outcome, Span
from jaxml.models.build import BoundModel
from jaxml.models.paged import PagedCache, Pools, empty_pages

PAGE_SIZE = 16
# Pieces of prompts may take this many times as long as a step of those who decode, in each step.
STALL = 1.5
# What a measurement counts against those before it.
NEWEST = 0.3


class PagedRunner:
    """What both runners share: the pages, the rows of sampling state, and the sides. One row more than `max_rows` is
    there for padding."""

    shares_sides = True

    def __init__(self, model: DecodingModel, *, max_rows: int, num_pages: int, page_size: int = PAGE_SIZE):
        self.model, self.max_rows = model, max_rows
        self.num_pages, self.page_size = num_pages, page_size
        self.num_words = num_words(model.vocab_size)
        # A piece of a prompt may run over the end of the context; the table's last entries are for that.
        self._table_width = -(-model.context_length // page_size) + model.pieces[-1] // page_size
        self.side_tokens = model.pieces[len(model.pieces) // 2]
        self._sides = {
            "scores": jax.jit(partial(_score, model.bound), donate_argnums=1),
            "features": jax.jit(partial(_pool, model.bound), donate_argnums=1),
        }
        self._first = jax.jit(_first, donate_argnums=0)
        self._join = jax.jit(_put, donate_argnums=0)
        self.reset()

    @property
    def shapes(self) -> list[str]:
        """The programs that `warm_up` compiles."""
        return [
            f"scores and features: 1 row of {self.side_tokens} tokens",
            "first token: 1 row",
            f"joining: 1 of {self.max_rows} rows",
        ]

    def reset(self) -> None:
        """See `work.Runner`."""
        policy, spec = self.model.bound.policy, self.model.bound.spec
        self._pools: Pools = empty_pages(spec, self.num_pages, self.page_size, policy.compute)  # type: ignore[arg-type]
        self._rows = jax.tree.map(jnp.asarray, empty_rows(self.max_rows + 1, self.model.vocab_size))

    def join(self, place: int, request: Request, seed: int, answer: Sequence[int], max_tokens: int) -> None:
        """See `work.Runner`."""
        vocab_size = self.model.vocab_size
        row = make_row(
            request.sampling,
            request.prompt,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
            seed=seed,
            eos=self.model.eos,
        )
        if answer:
            counts = np.bincount(answer, minlength=vocab_size).astype(np.int32)[None]
            row = dataclasses.replace(row, counts=counts, num_generated=np.array([len(answer)], np.int32))
        self._rows = self._join(self._rows, row, np.int32(place))

    def warm_up(self) -> None:
        """Compile every program. Nothing may be running."""
        row = Request("", (0,), Sampling(max_tokens=1))
        self.join(self.max_rows, row, 0, (), 1)
        for side in ("scores", "features"):
            self._run_side(Span(self.max_rows, (0,), 0, (), draws=True, side=side, targets=(0,)))

    def table(self, spans: Sequence[Span], num_rows: int) -> np.ndarray:
        """The pages of each span's row; rows beyond them have none."""
        table = np.zeros((num_rows, self._table_width), np.int32)
        for row, span in enumerate(spans):
            table[row, : len(span.pages)] = span.pages
        return table

    def allowed(self, spans: Sequence[Span], num_rows: int) -> np.ndarray:
        """The words of allowed tokens of each span's row."""
        words = np.zeros((num_rows, self.num_words), np.uint32)
        for row, span in enumerate(spans):
            if span.allowed is not None:
                words[row] = span.allowed
        return words

    def draw(self, logits_1V: jax.Array, span: Span) -> Outcome:
        """The token after a span, of which `logits_1V` are."""
        place, words = np.array([span.place], np.int32), self.allowed([span], 1)
        self._rows, drawn = self._first(
            self._rows, logits_1V, place, words, np.int32(span.start + len(span.tokens) - 1)
        )
        return outcome_of(jax.device_get(drawn), 0)

    def _run_side(self, span: Span) -> Outcome:
        """A span whose scores or features are asked for, whatever runs beside it."""
        assert span.side is not None
        count = len(span.tokens)
        tokens, targets = (np.zeros((1, self.side_tokens), np.int32) for _ in range(2))
        tokens[0, :count], targets[0, : len(span.targets)] = span.tokens, span.targets
        start, last, table = np.int32(span.start), np.array([count - 1], np.int32), self.table([span], 1)
        program = self._sides[span.side]
        logits, self._pools, found = program(self.model.params, self._pools, tokens, start, last, targets, table)
        outcome = self.draw(logits, span) if span.draws else Outcome()
        found = jax.device_get(found)
        if span.side == "features":
            return dataclasses.replace(outcome, features=found, is_finite=bool(np.isfinite(found).all()))
        return dataclasses.replace(outcome, scores=tuple(value[:count] for value in found))


class FastRunner(PagedRunner):
    """Rows that decode in one call of 1, 2, 4, ... rows, then pieces of prompts, one call for each.

    target_s: how long a call may draw tokens before it reports, if that is more than one.
    """

    def __init__(
        self,
        model: DecodingModel,
        *,
        max_rows: int,
        num_pages: int,
        page_size: int = PAGE_SIZE,
        target_s: float = 0.02,
    ):
        super().__init__(model, max_rows=max_rows, num_pages=num_pages, page_size=page_size)
        self.target_s = target_s
        self.sizes = ladder(max_rows)
        self._decode = jax.jit(partial(_decode, model.bound), donate_argnums=(1, 2))
        self._prefill = jax.jit(partial(_prefill, model.bound), donate_argnums=1)
        self._step_s: dict[int, float] = {}
        self._piece_s: dict[int, float] = {}

    @property
    def shapes(self) -> list[str]:
        rows = ", ".join(map(str, self.sizes))
        pieces = ", ".join(map(str, self.model.pieces))
        return [f"decode: {rows} rows", f"prefill: 1 row of {pieces} tokens", *super().shapes]

    def warm_up(self) -> None:
        super().warm_up()
        for size in self.model.pieces:
            for _ in range(2):  # The second one is timed.
                self._piece(Span(self.max_rows, [0] * min(size, self.model.context_length), 0, ()))
        for size in self.sizes:
            for _ in range(2):
                self._decode_rows([Span(self.max_rows, (0,), 0, ())] * size, 1)
        self.reset()

    def num_steps(self, num_rows: int) -> int:
        """See `work.Runner`."""
        step_s = self._step_s.get(self._size(num_rows), self.target_s)
        return int(np.clip(self.target_s / step_s, 1, MAX_STEPS))

    def shares(self, num_rows: int, lengths: Sequence[int]) -> list[int]:
        """See `work.Runner`."""
        room_s = STALL * self._step_s.get(self._size(num_rows), 0.0) if num_rows else np.inf
        room_tokens = self.model.pieces[-1]
        shares = [0] * len(lengths)
        for index, length in enumerate(lengths):
            most = next((size for size in self.model.pieces if size >= length), self.model.pieces[-1])
            sizes = [size for size in self.model.pieces if size <= most]
            fitting = [size for size in sizes if self._piece_s.get(size, 0.0) <= room_s]
            size = fitting[-1] if fitting else sizes[0]
            if index > 0 and (not fitting or room_tokens < size):
                break
            shares[index] = min(size, length)
            room_s -= self._piece_s.get(size, 0.0)
            room_tokens -= size
        return shares

    def run(self, spans: Sequence[Span], num_steps: int) -> list[Outcome]:
        """See `work.Runner`. Those that decode come first, so that their tokens do not wait."""
        outcomes: dict[int, Outcome] = {}
        deciding = [index for index, span in enumerate(spans) if len(span.tokens) == 1 and span.side is None]
        if deciding:
            found = self._decode_rows([spans[index] for index in deciding], num_steps)
            outcomes.update(zip(deciding, found, strict=True))
        for index, span in enumerate(spans):
            if index not in outcomes:
                outcomes[index] = self._piece(span) if span.side is None else self._run_side(span)
        return [outcomes[index] for index in range(len(spans))]

    def _size(self, num_rows: int) -> int:
        return next(size for size in self.sizes if size >= max(1, num_rows))

    def _decode_rows(self, spans: Sequence[Span], num_steps: int) -> list[Outcome]:
        size = self._size(len(spans))
        places, token, position = (np.full(size, fill, np.int32) for fill in (self.max_rows, 0, 0))
        for row, span in enumerate(spans):
            places[row], token[row], position[row] = span.place, span.tokens[0], span.start
        table, words = self.table(spans, size), self.allowed(spans, size)
        begun = time.perf_counter()
        decoded: tuple[Steps, Pools, Rows] = self._decode(
            self.model.params, self._pools, self._rows, places, token, position, table, words, np.int32(num_steps)
        )
        steps, self._pools, self._rows = decoded
        steps = jax.device_get(steps)
        _note(self._step_s, size, (time.perf_counter() - begun) / max(1, int(steps.num_tokens.max())))
        found = []
        for row in range(len(spans)):
            count = int(steps.num_tokens[row])
            found.append(
                Outcome(
                    steps.tokens[row, :count].tolist(),
                    steps.logprobs[row, :count],
                    steps.top_tokens[row, :count],
                    steps.top_logprobs[row, :count],
                    bool(steps.is_finite[row]),
                )
            )
        return found

    def _piece(self, span: Span) -> Outcome:
        size = next(size for size in self.model.pieces if size >= len(span.tokens))
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(span.tokens)] = span.tokens
        last = np.array([len(span.tokens) - 1], np.int32)
        begun = time.perf_counter()
        logits, self._pools = self._prefill(
            self.model.params, self._pools, tokens, np.int32(span.start), last, self.table([span], 1)
        )
        logits.block_until_ready()
        _note(self._piece_s, size, time.perf_counter() - begun)
        return self.draw(logits, span) if span.draws else Outcome()


def ladder(last: int) -> list[int]:
    """Powers of two up to `last`, and `last`.

    >>> ladder(6), ladder(1)
    ([1, 2, 4, 6], [1])
    """
    return sorted({last, *(2**power for power in range(last.bit_length()) if 2**power < last)})


def outcome_of(drawn: Drawn, row: int) -> Outcome:
    """The outcome of a row that drew one token. `drawn` is on the host."""
    here = slice(row, row + 1)
    return Outcome(
        [int(drawn.token[row])],
        np.asarray(drawn.logprob[here]),
        np.asarray(drawn.top_tokens[here]),
        np.asarray(drawn.top_logprobs[here]),
        bool(drawn.is_finite[row]),
    )


def taken(rows: Rows, places: Any, position: Any, words: Any) -> Rows:
    """The state of the rows at `places`, whose last token is at `position`. Padding (the last place) is done."""
    here = jax.tree.map(lambda leaf: leaf[places], rows)
    is_padding = places == rows.is_done.shape[0] - 1
    return dataclasses.replace(here, position=position, allowed=words, is_done=jnp.asarray(is_padding))


def noted(rows: Rows, places: Any, after: Rows) -> Rows:
    """The state with what the rows at `places` drew."""
    return dataclasses.replace(
        rows,
        counts=jnp.asarray(rows.counts).at[places].set(after.counts),
        num_generated=jnp.asarray(rows.num_generated).at[places].set(after.num_generated),
    )


def _note(measured: dict[int, float], size: int, seconds: float) -> None:
    before = measured.get(size)
    # The first call may have compiled.
    measured[size] = seconds if before is None or seconds < before / 4 else before + NEWEST * (seconds - before)


def _put(rows: Rows, row: Rows, place: Any) -> Rows:
    return jax.tree.map(
        lambda into, new: jax.lax.dynamic_update_slice_in_dim(into, new.astype(into.dtype), place, axis=0), rows, row
    )


def _first(rows: Rows, logits_1V: Any, place: Any, words: Any, position: Any) -> tuple[Rows, Drawn]:
    after, drawn = sample(logits_1V, taken(rows, place, position[None], words))
    return noted(rows, place, after), drawn


def _decode(
    model: BoundModel,
    params: Any,
    pools: Pools,
    rows: Rows,
    places: Any,
    token: Any,
    position: Any,
    table: Any,
    words: Any,
    num_steps: Any,
) -> Any:
    here = dataclasses.replace(taken(rows, places, position, words), token=token)
    steps, cache, after = decode_steps(model, params, PagedCache(pools.keys, pools.values, table), here, num_steps)
    return steps, Pools(cache.keys, cache.values), noted(rows, places, after)


def _prefill(model: BoundModel, params: Any, pools: Pools, tokens: Any, start: Any, last: Any, table: Any) -> Any:
    logits, cache = prefill(model, params, tokens, start, last, PagedCache(pools.keys, pools.values, table))
    return logits, Pools(cache.keys, cache.values)


def _score(
    model: BoundModel, params: Any, pools: Pools, tokens: Any, start: Any, last: Any, targets: Any, table: Any
) -> Any:
    """(logits after the last token, pools, (log-probabilities of the targets, most likely tokens and theirs))."""
    decoder = model.bind(params)
    features_1TD, cache = decoder.extend(tokens, start, PagedCache(pools.keys, pools.values, table))
    logits_TV = decoder.logits(features_1TD[0])
    log_probs_TV = jax.nn.log_softmax(logits_TV, axis=-1).astype(jnp.float32)
    num_top = min(MAX_LOGPROBS, log_probs_TV.shape[1])
    top_logprobs, top_tokens = jax.lax.top_k(log_probs_TV, num_top)
    fill = ((0, 0), (0, MAX_LOGPROBS - num_top))
    chosen = jnp.take_along_axis(log_probs_TV, targets[0, :, None], axis=-1)[:, 0]
    scores = (chosen, jnp.pad(top_tokens, fill), jnp.pad(top_logprobs, fill, constant_values=-jnp.inf))
    return logits_TV[last], Pools(cache.keys, cache.values), scores


def _pool(
    model: BoundModel, params: Any, pools: Pools, tokens: Any, start: Any, last: Any, targets: Any, table: Any
) -> Any:
    """(logits after the last token, pools, the sum of the features up to it)."""
    decoder = model.bind(params)
    features_1TD, cache = decoder.extend(tokens, start, PagedCache(pools.keys, pools.values, table))
    is_token = jnp.arange(tokens.shape[1]) <= last[0]
    total_D = jnp.where(is_token[:, None], features_1TD[0].astype(jnp.float32), 0).sum(0)
    return decoder.logits(features_1TD[0][last]), Pools(cache.keys, cache.values), total_D
