"""Computes every step with one program of one shape, so that nothing that runs beside a request changes a bit of it.

Reads `infer.runner`, `infer.sampling`, `infer.work` and `models.paged`; `infer.scheduler` drives it in the place of the
fast runner.

A step takes `num_tokens` tokens, those of prompts and of rows that decode alike, each as a row of its own with its position
and the pages of its request. Products over so many rows give a row the same bits wherever it lies and whatever the others
are (He et al. 2025, "Defeating Nondeterminism in LLM Inference", on batch invariance), and attention goes over the pages of
a row in the order of its own text. So neighbours, the order of arrival, the cut of a prompt into pieces, pre-emption and
pages that others filled are without effect on the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxml.infer.decoding_model import DecodingModel
from jaxml.infer.runner import PAGE_SIZE, PagedRunner, outcome_of
from jaxml.infer.sampling import Drawn, Rows, sample
from jaxml.infer.work import Outcome, Span, share_out
from jaxml.models.build import BoundModel
from jaxml.models.paged import PagedCache, Pools


class FlatRunner(PagedRunner):
    """`num_tokens` tokens a step, at least one for each of `max_rows` rows and one page. Scores and features have a program
    of their own, of one row and one size; the pages that it fills are not shared with others."""

    shares_sides = False

    def __init__(
        self, model: DecodingModel, *, max_rows: int, num_pages: int, num_tokens: int, page_size: int = PAGE_SIZE
    ):
        super().__init__(model, max_rows=max_rows, num_pages=num_pages, page_size=page_size)
        self.num_tokens = num_tokens
        self._step = jax.jit(partial(_step, model.bound), donate_argnums=(1, 2))

    @property
    def shapes(self) -> list[str]:
        return [f"step: {self.num_tokens} tokens of {self.max_rows} rows", *super().shapes]

    def warm_up(self) -> None:
        """See `PagedRunner`."""
        super().warm_up()
        self.run([Span(self.max_rows, (0,), 0, ())], 1)
        self.reset()

    def num_steps(self, num_rows: int) -> int:
        """See `work.Runner`: one, for each has the same shape."""
        return 1

    def shares(self, num_rows: int, lengths: Sequence[int]) -> list[int]:
        """See `work.Runner`: what is left of a step, the oldest first."""
        return share_out(self.num_tokens - num_rows, lengths, self.page_size)

    def run(self, spans: Sequence[Span], num_steps: int) -> list[Outcome]:
        """See `work.Runner`."""
        flat = [span for span in spans if span.side is None]
        outcomes = iter(self._run_flat(flat) if flat else ())
        return [next(outcomes) if span.side is None else self._run_side(span) for span in spans]

    def _run_flat(self, spans: Sequence[Span]) -> list[Outcome]:
        num_rows = self.max_rows + 1
        tokens, positions, owner = (np.zeros(self.num_tokens, np.int32) for _ in range(3))
        owner[:] = self.max_rows
        sampled_at, last = (np.zeros(num_rows, np.int32) for _ in range(2))
        draws = np.zeros(num_rows, np.bool_)
        table = np.zeros((num_rows, self._table_width), np.int32)
        words = np.zeros((num_rows, self.num_words), np.uint32)
        begin = 0
        for span in spans:
            here = slice(begin, begin + len(span.tokens))
            tokens[here], owner[here] = span.tokens, span.place
            positions[here] = np.arange(span.start, span.start + len(span.tokens))
            begin = here.stop
            sampled_at[span.place], last[span.place] = begin - 1, span.start + len(span.tokens) - 1
            draws[span.place] = span.draws
            table[span.place, : len(span.pages)] = span.pages
            if span.allowed is not None:
                words[span.place] = span.allowed
        stepped: tuple[Drawn, Pools, Rows] = self._step(
            self.model.params,
            self._pools,
            self._rows,
            tokens,
            positions,
            table[owner],
            sampled_at,
            last,
            draws,
            words,
        )
        drawn, self._pools, self._rows = stepped
        drawn = jax.device_get(drawn)
        return [outcome_of(drawn, span.place) if span.draws else Outcome() for span in spans]


def _step(
    model: BoundModel,
    params: Any,
    pools: Pools,
    rows: Rows,
    tokens_N: Any,
    positions_N: Any,
    table_NM: Any,
    sampled_at_R: Any,
    last_R: Any,
    draws_R: Any,
    words_RW: Any,
) -> Any:
    decoder = model.bind(params)
    features_N1D, cache = decoder.extend(tokens_N[:, None], positions_N, PagedCache(pools.keys, pools.values, table_NM))
    logits_RV = decoder.logits(features_N1D[:, 0][sampled_at_R])
    here = dataclasses.replace(rows, position=last_R, allowed=words_RW, is_done=jnp.asarray(~draws_R))
    after, drawn = sample(logits_RV, here)
    kept = dataclasses.replace(rows, counts=after.counts, num_generated=after.num_generated)
    return drawn, Pools(cache.keys, cache.values), kept
