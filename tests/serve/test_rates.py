"""No tenant gets more than its tier allows in any minute beyond one burst, and what it did not need is given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.errors import RequestError
from jaxml.serve.rates import Bucket, RateLimitError, Rates, Tier, retry_after


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


STEPS = st.lists(st.tuples(st.floats(0, 90), st.integers(0, 120)), max_size=30)


@given(st.integers(1, 100), STEPS)
def test_what_a_bucket_gives_in_any_time_is_one_burst_and_the_rate(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    taken: list[tuple[float, int]] = []
    for passed_s, amount in steps:
        clock.now_s += passed_s
        if bucket.take(amount) == 0.0:
            taken.append((clock.now_s, amount))
    for first, (since_s, _) in enumerate(taken):
        given_out = 0
        for at_s, amount in taken[first:]:
            given_out += amount
            assert given_out <= per_minute + per_minute * (at_s - since_s) / 60 + 1e-3


@given(st.integers(1, 100), st.integers(0, 100), st.integers(1, 100))
def test_after_the_time_that_it_says_a_bucket_gives(per_minute: int, first: int, second: int) -> None:
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    bucket.take(first)
    wait_s = bucket.take(second)
    if second > per_minute:
        assert wait_s == float("inf")
    elif wait_s:
        clock.now_s += wait_s * 0.9
        assert bucket.take(second) > 0
        clock.now_s += wait_s * 0.1
        assert bucket.take(second) == 0


def test_requests_are_counted_by_tenant_and_come_back_with_time() -> None:
    clock = Clock()
    rates = Rates([Tier("free", requests_per_minute=2)], clock)
    for _ in range(2):
        rates.open("a", "free")
    with pytest.raises(RateLimitError) as refused:
        rates.open("a", "free")
    assert refused.value.retry_after_s == pytest.approx(30) and retry_after(refused.value) == "30"
    rates.open("b", "free")
    clock.now_s += 30
    rates.open("a", "free")


def test_requests_at_once_are_free_again_when_they_are_closed() -> None:
    rates = Rates([Tier("free", max_concurrent=1)], Clock())
    account = rates.open("a", "free")
    with pytest.raises(RateLimitError, match="at once"):
        rates.open("a", "free")
    account.close()
    account.close()
    rates.open("a", "free")
    with pytest.raises(RateLimitError):
        rates.open("a", "free")


def test_tokens_are_admitted_at_their_most_and_settled_at_what_they_were() -> None:
    clock = Clock()
    rates = Rates([Tier("free", tokens_per_minute=100)], clock)
    account = rates.open("a", "free")
    account.admit(80)
    with pytest.raises(RateLimitError, match="tokens"):
        rates.open("a", "free").admit(30)
    account.settle(10)
    account.settle(10)
    assert account.headers()["x-ratelimit-remaining-tokens"] == "90"
    more = rates.open("a", "free")
    more.admit(90)
    more.settle(150)  # An answer may need more than was thought; the next one waits for it.
    with pytest.raises(RateLimitError) as refused:
        rates.open("a", "free").admit(1)
    assert refused.value.retry_after_s == pytest.approx(61 * 0.6)


def test_more_than_a_minute_ever_gives_is_the_request_s_own_fault() -> None:
    account = Rates([Tier("free", tokens_per_minute=100)], Clock()).open("a", "free")
    with pytest.raises(RequestError, match="at most 100 tokens"):
        account.admit(101)


def test_what_is_left_is_said_in_openais_headers() -> None:
    clock = Clock()
    account = Rates([Tier("free", requests_per_minute=60, tokens_per_minute=600)], clock).open("a", "free")
    account.admit(6)
    assert account.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "594",
        "x-ratelimit-reset-tokens": "600ms",
    }
    assert Rates([], clock).open("a", "default").headers() == {}


def test_tiers_that_cannot_be_right_say_all_of_it() -> None:
    wrong = Tier("x", 0, -1, 0, ())
    assert [fault.failed.rpartition(".")[2] for fault in wrong.faults()] == [
        "requests_per_minute",
        "tokens_per_minute",
        "max_concurrent",
        "lanes",
    ]
    assert Tier("x", 1, 1, 1, ("batch",)).faults() == []
