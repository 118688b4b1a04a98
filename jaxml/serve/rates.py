"""How much a tenant may ask: requests and tokens a minute, and requests at once, by its tier. No jax, no HTTP.

Reads `errors` and `infer.request`; `serve.keys` says whose a request is, `serve.guard` counts requests before their bodies
are read, the endpoints count tokens once they know how many may be generated.

One API process serves everything, so its own memory is the whole account; the clock is the monotonic one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxml.errors import Fault, JaxmlError, RequestError
from jaxml.infer.request import LANES, Lane

MINUTE_S = 60.0
# When a place among those at once is free again is not known; a client may as well ask after this.
CONCURRENT_RETRY_S = 1.0


class RateLimitError(JaxmlError):
    """A tenant has used up what its tier allows for now. retry_after_s: when the same request would be let in."""

    def __init__(self, failed: str, *, expected: str, got: str, todo: str, retry_after_s: float = 1.0):
        super().__init__(failed, expected=expected, got=got, todo=todo)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Tier:
    """What each tenant of a tier may ask for; None: as much as it likes. lanes: where its requests may queue."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    lanes: tuple[Lane, ...] = LANES

    def faults(self) -> list[Fault]:
        """Every field that cannot be right."""
        named = f"tiers.{self.name}"
        numbers = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
        found = [
            Fault(f"{named}.{name}", "at least 1, or left out", str(value), "raise it, or leave it out for no limit")
            for name in numbers
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if not self.lanes or not set(self.lanes) <= set(LANES):
            expected = f"some of {', '.join(LANES)}"
            found.append(Fault(f"{named}.lanes", expected, ", ".join(self.lanes) or "none", "correct them"))
        return found


DEFAULT_TIER = Tier("default")


class Bucket:
    """Holds at most `per_minute`, and fills at that rate; full at first. What is taken may be given back.

    >>> clock = iter([0.0, 0.0, 0.0, 1.0])
    >>> bucket = Bucket(60, lambda: next(clock))
    >>> bucket.take(60), bucket.take(1), bucket.take(1)
    (0.0, 1.0, 0.0)
    """

    def __init__(self, per_minute: int, now: Callable[[], float]):
        self.size = per_minute
        self._per_s = per_minute / MINUTE_S
        self._now, self._level, self._at = now, float(per_minute), now()

    def take(self, amount: float) -> float:
        """0 and it is taken; or how many seconds from now it could be, and nothing is. (Infinity: never.)"""
        if amount > self.size:
            return math.inf
        missing = amount - self.level()
        # Adding up fractions of a second loses some; a request must not wait for a rounding error.
        if missing > 1e-6:
            return missing / self._per_s
        self._level -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        """A negative amount takes more, also of what is not there yet."""
        self._level = min(self.size, self.level() + amount)

    def level(self) -> float:
        """What is in it now."""
        now = self._now()
        self._level = min(self.size, self._level + (now - self._at) * self._per_s)
        self._at = now
        return self._level

    def full_in_s(self) -> float:
        """When it is full if nothing is taken."""
        return (self.size - self.level()) / self._per_s


class _Ledger:
    """What one tenant has used of its tier."""

    def __init__(self, tier: Tier, now: Callable[[], float]):
        self.tier = tier
        self.requests = Bucket(tier.requests_per_minute, now) if tier.requests_per_minute else None
        self.tokens = Bucket(tier.tokens_per_minute, now) if tier.tokens_per_minute else None
        self.num_open = 0


class Rates:
    """The accounts of all tenants. now: a monotonic clock, seconds."""

    def __init__(self, tiers: Iterable[Tier] = (DEFAULT_TIER,), now: Callable[[], float] = time.monotonic):
        self._tiers = {tier.name: tier for tier in tiers}
        self._now = now
        self._ledgers: dict[tuple[str, str], _Ledger] = {}

    def open(self, tenant: str, tier: str) -> Account:
        """One more request of a tenant; `close` the account with its answer. Raises RateLimitError.

        A tier that is not known has no limits: `serve.keys` lets no such key in.
        """
        ledger = self._ledgers.get((tenant, tier))
        if ledger is None:
            ledger = self._ledgers[tenant, tier] = _Ledger(self._tiers.get(tier, DEFAULT_TIER), self._now)
        most = ledger.tier.max_concurrent
        if most is not None and ledger.num_open >= most:
            raise _too_many("requests at once", f"at most {most}", f"{most} are running", CONCURRENT_RETRY_S)
        if ledger.requests is not None and (wait_s := ledger.requests.take(1)):
            raise _too_many("requests", f"at most {ledger.requests.size} a minute", "more", wait_s)
        ledger.num_open += 1
        return Account(ledger)


class Account:
    """What one request takes of its tenant's account."""

    def __init__(self, ledger: _Ledger):
        self._ledger = ledger
        self._admitted = 0
        self._is_open = True

    def admit(self, num_tokens: int) -> None:
        """Take the most that the request can need: its prompt, and all that may be generated.

        Raises RateLimitError, or RequestError for more than the tier ever allows.
        """
        tokens = self._ledger.tokens
        if tokens is None:
            return
        wait_s = tokens.take(num_tokens)
        if math.isinf(wait_s):
            raise RequestError(
                "max_tokens",
                expected=f"prompt and answers of at most {tokens.size} tokens together, the limit of a minute",
                got=f"{num_tokens}",
                todo="ask for fewer tokens or fewer answers",
            )
        if wait_s:
            raise _too_many("tokens", f"at most {tokens.size} a minute", f"{num_tokens} more", wait_s)
        self._admitted += num_tokens

    def settle(self, num_tokens: int) -> None:
        """The request is over: it has needed so many. What was admitted beyond that is given back. Once."""
        admitted, self._admitted = self._admitted, 0
        if self._ledger.tokens is not None and admitted:
            self._ledger.tokens.give_back(admitted - num_tokens)

    def close(self) -> None:
        """The answer is sent, or will not be. More calls do nothing."""
        if self._is_open:
            self._is_open = False
            self._ledger.num_open -= 1

    def headers(self) -> dict[str, str]:
        """What is left, in the names that OpenAI's API gives it; nothing for what is not limited."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self._ledger.requests), ("tokens", self._ledger.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.size)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level())))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.full_in_s())
        return found


def duration(seconds: float) -> str:
    """As OpenAI writes it in headers.

    >>> [duration(s) for s in (0, 0.0123, 1.5, 59.9996, 61, 3600)]
    ['0ms', '13ms', '1.5s', '1m0s', '1m1s', '60m0s']
    """
    milliseconds = math.ceil(seconds * 1e3)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1e3:g}s"
    minutes, rest = divmod(math.ceil(milliseconds / 1e3), 60)
    return f"{minutes}m{rest}s"


def retry_after(error: RateLimitError) -> str:
    """The value of Retry-After: whole seconds, at least one, after which the request is let in."""
    return str(max(1, math.ceil(error.retry_after_s)))


def _too_many(what: str, expected: str, got: str, wait_s: float) -> RateLimitError:
    todo = f"try again in {duration(wait_s)}"
    return RateLimitError(f"the rate of {what}", expected=expected, got=got, todo=todo, retry_after_s=wait_s)
