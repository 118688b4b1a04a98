"""The rows that are decoded together: requests join and leave between steps. One thread, no queue, no HTTP.

Reads `infer.decoding_model`, `infer.sampling` and `infer.text`; `LanguageModel.generate` and `infer.engine` drive it.

A step takes a few tokens for every running row, then one piece of the prompt of the request that is joining, if one is. A
request is prefilled in a cache of one row and then copied to its row of the batch. The number of rows follows the load in
powers of two, because a step with eight rows takes several times as long as one with one; the capacity of a row follows the
longest text in the batch, because attention pays for every slot. The cache is copied when either changes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxml.infer.decode import MAX_STEPS, Steps
from jaxml.infer.decoding_model import DecodingModel
from jaxml.infer.request import Event, FinishReason, Request, TokenLogprob
from jaxml.infer.sampling import Rows, empty_rows
from jaxml.infer.text import TextStream
from jaxml.models.cache import Cache

FIRST_CAPACITY = 128


@dataclass
class Seat:
    """A request that has a row, or is about to. `num_cached`: tokens of its prompt that are in the cache."""

    request: Request
    row: Rows
    max_tokens: int
    text: TextStream | None
    num_cached: int = 0
    num_tokens: int = 0
    stop_tokens: frozenset[int] = field(default_factory=frozenset)

    @property
    def num_slots(self) -> int:
        """Slots of the cache that the next token needs: those of all tokens so far, of which the last is not in it yet."""
        return len(self.request.prompt) + self.num_tokens


class Batch:
    """At most `max_rows` requests at once, running and joining together.

    target_s: how long a step may decode before it reports, if that is more than one token: small models pay more for
    leaving and entering the jitted loop than for a token.
    """

    def __init__(self, model: DecodingModel, max_rows: int = 8, target_s: float = 0.02):
        self.model, self.max_rows, self.target_s = model, max_rows, target_s
        self.sizes, self.capacities = _ladder(1, max_rows, 2), _ladder(FIRST_CAPACITY, model.capacity, 4)
        self._joining: deque[Seat] = deque()
        self._seats: list[Seat | None] = [None]
        self._capacity = self.capacities[0]
        self._cache, self._rows = model.empty_cache(1, self._capacity), empty_rows(1, model.vocab_size)
        self._scratch = model.empty_cache(1, model.capacity)
        self._step_s: dict[tuple[int, int], float] = {}

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return sum(seat is not None for seat in self._seats)

    @property
    def num_places(self) -> int:
        """Requests that could be added now."""
        return self.max_rows - self.num_running - len(self._joining)

    @property
    def has_place(self) -> bool:
        return self.num_places > 0

    @property
    def is_busy(self) -> bool:
        return bool(self._joining) or self.num_running > 0

    def add(self, request: Request) -> None:
        """Take a request in. Raises RequestError when it cannot be right or its prompt does not fit."""
        row = self.model.make_row(request)
        tokenizer, stop = self.model.tokenizer, request.sampling.stop
        if stop:
            tokenizer = self.model.opened.require_tokenizer()
        seat = Seat(
            request,
            row,
            self.model.limit(request),
            None if tokenizer is None else TextStream(tokenizer, request.prompt, stop),
            stop_tokens=frozenset((*self.model.eos, *request.sampling.stop_token_ids)),
        )
        self._joining.append(seat)

    def remove(self, id: str) -> bool:
        """Forget a request, wherever it is; its place is free at once. False when it is not here."""
        for seat in self._joining:
            if seat.request.id == id:
                self._joining.remove(seat)
                return True
        for index, seat in enumerate(self._seats):
            if seat is not None and seat.request.id == id:
                self._seats[index] = None
                return True
        return False

    def step(self) -> list[Event]:
        """A few tokens for each running request, then one piece of prefill; the events of requests that advanced.

        In this order, so that a first token is told as soon as it is there.
        """
        events = self._decode() if self.num_running else []
        if self._joining:
            events += self._advance_prefill()
        return events

    def warm_up(self) -> int:
        """Compile everything that steps can run; returns the number of programs. The batch must be empty."""
        vocab_size, row = self.model.vocab_size, self.model.make_row(Request("", (0,)))
        for size in self.model.pieces:
            length = min(size, self.model.context_length)
            logits, self._scratch, _ = self.model.prefill([0] * length, 0, self._scratch)
            self.model.sample(logits, row)
        programs = len(self.model.pieces) + 1
        for capacity in self.capacities:
            for size in self.sizes:
                cache, rows = self.model.empty_cache(size, capacity), empty_rows(size, vocab_size)
                cache, rows = _insert(cache, rows, self._scratch, row, np.int32(0))
                _, cache, rows = self.model.decode_steps(cache, rows, np.zeros(size, bool), 1)
                others = [(other, capacity) for other in _neighbours(self.sizes, size)]
                others += [(size, other) for other in _neighbours(self.capacities, capacity)]
                for new_size, new_capacity in others:
                    _take(cache, rows, np.zeros(new_size, np.int32), new_capacity)
                programs += 2 + len(others)
        return programs

    def _advance_prefill(self) -> list[Event]:
        seat = self._joining[0]
        prompt = seat.request.prompt
        logits, self._scratch, seat.num_cached = self.model.prefill(prompt, seat.num_cached, self._scratch)
        if seat.num_cached < len(prompt):
            return []
        self._joining.popleft()
        row, drawn = self.model.sample(logits, seat.row)
        first = jax.device_get(drawn)
        one = [value[:, None] for value in first]
        steps = Steps(one[0], one[1], one[2], one[3], np.ones(1, np.int32))
        event = self._event(seat, steps, 0)
        if event.finish_reason is None:
            self._fit(self.num_running + 1, seat.num_slots)
            index = self._seats.index(None)
            self._cache, self._rows = _insert(self._cache, self._rows, self._scratch, row, np.int32(index))
            self._seats[index] = seat
        return [event]

    def _decode(self) -> list[Event]:
        self._fit(self.num_running + bool(self._joining))
        shape = (len(self._seats), self._capacity)
        running = np.array([seat is not None for seat in self._seats])
        per_step = self._step_s.get(shape, self.target_s)
        # While a request joins, the others take one token between two pieces of its prompt.
        target_s = 0.0 if self._joining else self.target_s
        room = self._capacity + 1 - max(seat.num_slots for seat in self._seats if seat is not None)
        num_steps = int(np.clip(target_s / per_step, 1, min(MAX_STEPS, room)))
        begun = time.perf_counter()
        steps, self._cache, self._rows = self.model.decode_steps(self._cache, self._rows, running, num_steps)
        steps = jax.device_get(steps)
        made = max(1, int(steps.num_tokens.max()))
        self._step_s[shape] = (time.perf_counter() - begun) / made
        events = []
        for index, seat in enumerate(self._seats):
            if seat is None:
                continue
            event = self._event(seat, steps, index)
            events.append(event)
            if event.finish_reason is not None:
                self._seats[index] = None
        return events

    def _event(self, seat: Seat, steps: Steps, row: int) -> Event:
        """What a request's new tokens mean: text, an end, log-probabilities."""
        tokens = steps.tokens[row, : int(steps.num_tokens[row])].tolist()
        seat.num_tokens += len(tokens)
        reason: FinishReason | None = None
        if tokens and tokens[-1] in seat.stop_tokens and seat.num_tokens > 0:
            reason = "stop"
            tokens.pop()
        elif seat.num_tokens >= seat.max_tokens:
            reason = "length"
        text = ""
        if seat.text is not None:
            before = seat.text.num_tokens_used
            text = seat.text.push(tokens)
            if seat.text.stopped:
                dropped = len(tokens) - (seat.text.num_tokens_used - before)
                tokens = tokens[: len(tokens) - dropped]
                seat.num_tokens -= dropped + (reason == "stop")
                reason = "stop"
            elif reason is not None:
                text += seat.text.flush()  # which may complete a stop string
                reason = "stop" if seat.text.stopped else reason
        return Event(
            seat.request.id,
            tuple(tokens),
            text,
            _logprobs(seat.request, steps, row, tokens),
            reason,
            seat.num_tokens,
        )

    def _fit(self, num_rows: int, num_slots: int = 1) -> None:
        """Make the batch as small as holds `num_rows` rows and, in each, the slots that its next token needs; at least
        `num_slots`. Rows that run are kept."""
        needed = max([num_slots, *(seat.num_slots for seat in self._seats if seat is not None)])
        capacity = next(size for size in self.capacities if size >= needed)
        size = next(size for size in self.sizes if size >= max(1, num_rows))
        # One step of one ladder at a time: those are the copies that are compiled.
        while self._capacity != capacity:
            self._copy(len(self._seats), _towards(self.capacities, self._capacity, capacity))
        while len(self._seats) != size:
            self._copy(_towards(self.sizes, len(self._seats), size), self._capacity)

    def _copy(self, size: int, capacity: int) -> None:
        kept = list(range(len(self._seats)))
        if size != len(kept):
            kept = [index for index, seat in enumerate(self._seats) if seat is not None]
        taken = kept + [0] * (size - len(kept))
        self._cache, self._rows = _take(self._cache, self._rows, np.array(taken, np.int32), capacity)
        self._seats = [self._seats[index] for index in kept] + [None] * (size - len(kept))
        self._capacity = capacity


def _ladder(first: int, last: int, factor: int) -> list[int]:
    """Sizes from `first` to `last`, each `factor` times the one before, the last one less.

    >>> _ladder(1, 6, 2), _ladder(128, 512, 4), _ladder(128, 64, 4)
    ([1, 2, 4, 6], [128, 512], [64])
    """
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(factor * sizes[-1], last))
    return sizes


def _towards(ladder: list[int], now: int, goal: int) -> int:
    """The next size of the ladder on the way from one to another."""
    return ladder[ladder.index(now) + (1 if goal > now else -1)]


def _neighbours(ladder: list[int], size: int) -> list[int]:
    """The sizes next to one on the ladder."""
    place = ladder.index(size)
    return [ladder[other] for other in (place - 1, place + 1) if 0 <= other < len(ladder)]


@partial(jax.jit, donate_argnums=(0, 1))
def _insert(cache: Cache, rows: Rows, one_cache: Cache, one_row: Rows, index: Any) -> tuple[Cache, Rows]:
    """The batch with one row's cache (as far as it fits; more is not in use) and state at `index`."""
    capacity = cache.capacity

    def put(into: Any, new: Any) -> Any:
        return jax.lax.dynamic_update_slice_in_dim(into, new.astype(into.dtype), index, axis=0)

    one_cache = jax.tree.map(lambda leaf: leaf[:, :capacity], one_cache)
    return jax.tree.map(put, cache, one_cache), jax.tree.map(put, rows, one_row)


@partial(jax.jit, static_argnums=3)
def _take(cache: Cache, rows: Rows, index: Any, capacity: int) -> tuple[Cache, Rows]:
    """The rows at `index` (R), each with its first `capacity` slots; new slots hold zeros."""

    def fit(leaf: Any) -> Any:
        new = max(0, capacity - leaf.shape[1])
        return jnp.pad(leaf[:, :capacity][index], ((0, 0), (0, new), (0, 0), (0, 0)))

    return jax.tree.map(fit, cache), jax.tree.map(lambda leaf: leaf[index], rows)


def _logprobs(request: Request, steps: Steps, row: int, tokens: list[int]) -> tuple[TokenLogprob, ...]:
    wanted = request.sampling.num_logprobs
    if wanted is None:
        return ()
    found = []
    for place, token in enumerate(tokens):
        top = zip(steps.top_tokens[row, place, :wanted], steps.top_logprobs[row, place, :wanted], strict=True)
        pairs = tuple((int(other), float(value)) for other, value in top if np.isfinite(value))
        found.append(TokenLogprob(token, float(steps.logprobs[row, place]), pairs))
    return tuple(found)
