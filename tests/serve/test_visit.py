"""What a request asks and costs is told to its account and its watch, where there are any."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxml.infer.request import LANES, Event
from jaxml.serve.errors import error_reply
from jaxml.serve.gate import ACCOUNT, BODY, CALLER, LEFT, WATCHED
from jaxml.serve.keys import Caller
from jaxml.serve.metrics import Metrics
from jaxml.serve.rates import RateLimitError, Rates, Tier
from jaxml.serve.visit import Visit


def visit(**more: Any) -> Visit:
    left = asyncio.get_running_loop().create_future()
    return Visit({BODY: {}, LEFT: left, **more})


def test_without_keys_rates_and_metrics_nothing_is_missing() -> None:
    async def test() -> None:
        one = visit()
        assert (one.tenant, one.lanes) == ("", LANES)
        one.asked("small", 1, 1, 2)
        one.event(Event("x"))

    asyncio.run(test())


def test_the_caller_says_whose_it_is_and_which_lanes_it_has() -> None:
    async def test() -> None:
        one = visit(**{CALLER: Caller("acme", "free", ("batch",))})
        assert (one.tenant, one.lanes) == ("acme", ("batch",))

    asyncio.run(test())


@pytest.mark.parametrize(("spent", "then_left"), [(None, 100), (30, 70)])
def test_what_is_admitted_and_not_used_is_given_back_at_the_end(spent: int | None, then_left: int) -> None:
    async def test() -> None:
        account = Rates([Tier("t", tokens_per_minute=100)], now=lambda: 0.0).open("acme", "t")
        one = visit(**{ACCOUNT: account})
        one.asked("small", 10, 1, 90)
        assert account.headers()["x-ratelimit-remaining-tokens"] == "10"
        if spent is not None:
            one.started(lambda: spent)
        one.left.set_result(None)
        await asyncio.sleep(0)
        assert account.headers()["x-ratelimit-remaining-tokens"] == str(then_left)

    asyncio.run(test())


def test_who_has_used_up_its_tokens_is_told_when_to_come_back() -> None:
    async def test() -> None:
        account = Rates([Tier("t", tokens_per_minute=60)], now=lambda: 0.0).open("acme", "t")
        one = visit(**{ACCOUNT: account})
        one.asked("small", 10, 1, 60)
        with pytest.raises(RateLimitError) as caught:
            one.asked("small", 10, 1, 30)
        reply = error_reply(caught.value)
        assert (reply.status, reply.headers, reply.body["error"]["code"]) == (
            429,
            {"Retry-After": "30"},
            "rate_limit_exceeded",
        )

    asyncio.run(test())


def test_the_watch_is_told_the_model_the_tokens_and_every_event() -> None:
    async def test() -> None:
        metrics = Metrics(["small"])
        watched = metrics.begin("acme", "free")
        one = visit(**{WATCHED: watched})
        one.asked("small", 12, 1, 20)
        one.event(Event("x", (1, 2), "ab", (), "length", 2, queue_s=0.5))
        watched.end(200)
        assert watched.model == "small"
        text = metrics.render({"small": {}}).decode()
        assert any("prompt" in line and line.endswith(" 12.0") for line in text.splitlines())

    asyncio.run(test())
