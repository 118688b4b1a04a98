"""The engine under threads: one end for every request, cancellation in every state, and errors that stay where they are."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import defaultdict

import pytest

from jaxml.errors import QueueFullError, RequestError
from jaxml.infer.engine import CompiledLateError, Engine, EngineSpec
from jaxml.infer.receipt import replay
from jaxml.infer.request import GREEDY, Constraint, Event, Request, Sampling
from tests.infer.text_device import TextDevice, expected

LONG = dataclasses.replace(GREEDY, max_tokens=180)


class Listener:
    """Collects events and wakes those who wait for some."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = defaultdict(list)
        self._changed = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                self.events[event.id].append(event)
            self._changed.notify_all()

    def wait_for(self, condition, timeout_s: float = 30) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s)

    def ended(self, id: str) -> bool:
        return any(event.finish_reason for event in self.events[id])


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def engine(model, listener):
    """Two places and a queue of four, started."""
    engine = Engine(model, EngineSpec(max_batch=2, max_queue=4), emit=listener)
    engine.start()
    yield engine
    engine.close()


def test_every_request_of_every_thread_ends_once_with_its_own_answer(engine, listener, model):
    sampling = dataclasses.replace(GREEDY, max_tokens=7)
    prompts = {f"{thread}-{index}": (60 + thread, 40 + index) for thread in range(3) for index in range(4)}

    def send(thread: int) -> None:
        for id in (id for id in prompts if id.startswith(f"{thread}-")):
            while True:
                try:
                    engine.submit(Request(id, prompts[id], sampling))
                    break
                except QueueFullError:
                    time.sleep(0.005)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listener.wait_for(lambda: all(listener.ended(id) for id in prompts))
    for id, prompt in prompts.items():
        events = listener.events[id]
        assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
        tokens = tuple(token for event in events for token in event.tokens)
        assert tokens == model.generate([prompt], sampling)[0].tokens
    stats = engine.stats()
    assert (stats["running"], stats["queued"], stats["free_places"]) == (0, 0, 2)
    assert (stats["accepted"], stats["finished"], stats["num_tokens"]) == (12, 12, 84)


def test_cancelling_frees_the_place_in_the_queue_in_prefill_and_while_decoding(engine, listener):
    for id in ("a", "b", "queued"):
        engine.submit(Request(id, (65, 66), LONG))
    listener.wait_for(lambda: listener.events["a"] and listener.events["b"])
    assert engine.stats()["queued"] == 1
    engine.cancel("queued")
    assert engine.stats()["queued"] == 0
    engine.cancel("a")
    seen = len(listener.events["a"])
    engine.submit(Request("next", (67,), dataclasses.replace(GREEDY, max_tokens=3)))
    listener.wait_for(lambda: listener.ended("next"))
    assert len(listener.events["a"]) == seen  # nothing after `cancel` returned
    assert not listener.events["queued"]
    engine.submit(Request("joining", (65,) * 150, LONG))
    engine.cancel("joining")
    engine.cancel("never was")
    engine.cancel("a")
    listener.wait_for(lambda: listener.ended("b"))
    deadline = time.monotonic() + 10
    while engine.stats()["running"] and time.monotonic() < deadline:
        time.sleep(0.005)
    stats = engine.stats()
    assert (stats["running"], stats["queued"], stats["free_places"], stats["cancelled"]) == (0, 0, 2, 3)


def test_a_full_queue_and_a_wrong_request_are_refused_at_once(engine, listener, model):
    for index in range(2):
        engine.submit(Request(f"running {index}", (65,), LONG))
    listener.wait_for(lambda: listener.events["running 0"] and listener.events["running 1"])
    for index in range(4):
        engine.submit(Request(f"waiting {index}", (65,), LONG))
    with pytest.raises(QueueFullError, match="4 waiting"):
        engine.submit(Request("one too many", (65,), LONG))
    wrong = {
        "temperature": Request("w", (65,), Sampling(temperature=float("nan"))),
        "prompt": Request("w", (65,) * 192),
        "id": Request("running 1", (65,)),
    }
    for field, request in wrong.items():
        with pytest.raises(RequestError, match=field):
            engine.submit(request)


def test_a_step_that_fails_ends_its_requests_and_none_that_come_later(engine, listener, monkeypatch):
    runner, failures = engine._runner, []
    real = runner.run

    def failing(*arguments):
        outcomes = real(*arguments)  # its pages were donated and are gone, as after an error of the device
        if not failures:
            failures.append("once")
            raise RuntimeError("the device is out of memory")
        return outcomes

    monkeypatch.setattr(runner, "run", failing)
    engine.submit(Request("unlucky", (65,), LONG))
    listener.wait_for(lambda: listener.ended("unlucky"))
    last = listener.events["unlucky"][-1]
    assert (last.finish_reason, last.error) == ("error", "internal")
    engine.submit(Request("later", (65,), dataclasses.replace(GREEDY, max_tokens=3)))
    listener.wait_for(lambda: listener.ended("later"))
    assert listener.events["later"][-1].finish_reason == "length"
    stats = engine.stats()
    assert (stats["failed"], stats["finished"], stats["free_places"]) == (1, 1, 2)


def test_a_step_that_does_not_come_back_ends_all_requests_and_the_engine_goes_on_when_it_does(model, listener):
    """The watchdog answers for the thread that hangs; what the late step says is dropped."""
    returned, stuck = threading.Event(), threading.Event()
    device = TextDevice(1, 20, 4)
    real = device.run

    def hanging(*arguments):
        if device.num_runs == 2:
            returned.wait(20)
        return real(*arguments)

    device.run = hanging
    engine = Engine(model, EngineSpec(watchdog_s=0.2), emit=listener, on_stuck=stuck.set, runner=device)
    engine.start()
    sampling = Sampling(max_tokens=30, seed=11)
    for id in ("runs", "waits"):
        engine.submit(Request(id, (1, 2), sampling))
    assert stuck.wait(20)
    assert [listener.events[id][-1].error for id in ("runs", "waits")] == ["stuck", "stuck"]
    assert engine.stats()["stuck"] == 1
    with pytest.raises(QueueFullError, match="stuck"):
        engine.submit(Request("late", (1, 2), sampling))
    returned.set()
    deadline = time.monotonic() + 20
    while engine.stats()["stuck"] and time.monotonic() < deadline:
        time.sleep(0.005)
    engine.submit(Request("later", (1, 2), sampling))
    listener.wait_for(lambda: listener.ended("later"))
    engine.close()
    right = expected((1, 2), 11, 30)
    tokens = [token for event in listener.events["later"] for token in event.tokens]
    assert tokens == (right[:-1] if listener.events["later"][-1].finish_reason == "stop" else right)
    assert sum(bool(event.finish_reason) for event in listener.events["runs"]) == 1


def test_closing_ends_what_runs_and_what_waits(model, listener):
    engine = Engine(model, EngineSpec(max_batch=1, max_queue=4), emit=listener)
    engine.start()
    for id in ("runs", "waits"):
        engine.submit(Request(id, (65,), LONG))
    listener.wait_for(lambda: listener.events["runs"])
    engine.close()
    assert listener.events["waits"][-1].error == "closed"
    assert listener.events["runs"][-1].finish_reason is not None
    with pytest.raises(QueueFullError, match="closing"):
        engine.submit(Request("late", (65,), LONG))


@pytest.mark.parametrize("mode", ["fast", "invariant"])
def test_nothing_is_compiled_once_it_is_warm(model, listener, mode):
    """Over requests of every kind, with a cache that is too small for all of them; strict would raise at the end."""
    spec = EngineSpec(mode=mode, max_batch=2, max_queue=64, strict=True, cache_bytes=70_000, step_tokens=24)
    engine = Engine(model, spec, emit=listener)
    engine.warm_up()
    engine.start()
    asked = [
        Sampling(max_tokens=4, seed=1),
        Sampling(max_tokens=170, temperature=0.0),
        Sampling(max_tokens=4, top_k=3, top_p=0.5, min_p=0.1, num_logprobs=5, stop=("x",)),
        Sampling(max_tokens=4, repetition_penalty=1.1, min_tokens=2, stop_token_ids=(3,), logit_bias=((5, 3.0),)),
        Sampling(max_tokens=4, num_prompt_logprobs=3, constraint=Constraint("choice", '["yes", "no"]')),
    ]
    requests = [
        Request(f"{length}-{index}", (65,) * length, sampling, wants_receipt=True)
        for length in (1, 16, 17, 100, 180)
        for index, sampling in enumerate(asked)
    ]
    requests += [Request(f"{length}-embedded", (66,) * length, wants_embedding=True) for length in (3, 70)]
    for request in requests:
        engine.submit(request)
    listener.wait_for(lambda: all(listener.ended(request.id) for request in requests), 60)
    engine.close()
    stats = engine.stats()
    assert (stats["compiles"], stats["finished"], stats["pages_used"]) == (0, len(requests), 0)
    assert min(stats["busy_s"], stats["schedule_s"], stats["num_cached_tokens"]) > 0
    for length in (1, 100):
        (yes,) = ["".join(event.text for event in listener.events[f"{length}-4"])]
        assert yes in ("yes", "no")


def test_a_strict_engine_raises_when_something_was_compiled_late(model, listener):
    engine = Engine(model, EngineSpec(max_batch=1, strict=True), emit=listener)
    engine.start()
    engine.submit(Request("cold", (65,), dataclasses.replace(GREEDY, max_tokens=2)))
    listener.wait_for(lambda: listener.ended("cold"))
    with pytest.raises(CompiledLateError, match="compiled since"):
        engine.close()


def test_a_receipt_gives_the_same_answer_again_and_is_refused_elsewhere(model, listener):
    """In a busy engine first; alone in an engine of its own then."""
    spec = EngineSpec(mode="invariant", max_batch=2, step_tokens=24, cache_bytes=70_000)
    engine = Engine(model, spec, emit=listener)
    engine.start()
    sampling = Sampling(max_tokens=12, temperature=0.9, logit_bias=((70, 2.0),), num_logprobs=1, ignore_eos=True)
    engine.submit(Request("asked", tuple(range(40, 90)), sampling, wants_receipt=True))
    for index in range(3):
        engine.submit(Request(str(index), (65 + index,) * 30, Sampling(max_tokens=20)))
    listener.wait_for(lambda: all(listener.ended(id) for id in ("asked", "0", "1", "2")))
    engine.close()
    receipt = json.loads(json.dumps(listener.events["asked"][-1].receipt))
    tokens, events = replay(model, receipt)
    assert tokens == receipt["tokens"] == [token for event in listener.events["asked"] for token in event.tokens]
    first, again = ([item for event in e for item in event.logprobs] for e in (listener.events["asked"], events))
    assert first == again
    wrong = {
        "checkpoint": {**receipt, "checkpoint": "another"},
        "engine.mode": {**receipt, "engine": {**receipt["engine"], "mode": "fast"}},
        "receipt": {name: value for name, value in receipt.items() if name != "prompt"},
    }
    for field, bad in wrong.items():
        with pytest.raises(RequestError, match=field):
            replay(model, bad)
