"""The engine under threads: one end for every request, cancellation in every state, and errors that stay where they are."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict

import pytest

from jaxml.errors import QueueFullError, RequestError
from jaxml.infer.engine import Engine
from jaxml.infer.request import GREEDY, Event, Request, Sampling

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
    engine = Engine(model, emit=listener, max_batch=2, max_queue=4)
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


def test_a_step_that_fails_ends_its_requests_and_none_that_come_later(engine, listener, model, monkeypatch):
    real, failures = model.decode_steps, []

    def failing(*arguments):
        if not failures:
            real(*arguments)  # its cache was donated and is gone, as after an error of the device
            failures.append("once")
            raise RuntimeError("the device is out of memory")
        return real(*arguments)

    monkeypatch.setattr(model, "decode_steps", failing)
    engine.submit(Request("unlucky", (65,), LONG))
    listener.wait_for(lambda: listener.ended("unlucky"))
    last = listener.events["unlucky"][-1]
    assert (last.finish_reason, last.error) == ("error", "the step failed")
    engine.submit(Request("later", (65,), dataclasses.replace(GREEDY, max_tokens=3)))
    listener.wait_for(lambda: listener.ended("later"))
    assert listener.events["later"][-1].finish_reason == "length"
    stats = engine.stats()
    assert (stats["failed"], stats["finished"], stats["free_places"]) == (1, 1, 2)


def test_closing_ends_what_runs_and_what_waits(model, listener):
    engine = Engine(model, emit=listener, max_batch=1, max_queue=4)
    engine.start()
    for id in ("runs", "waits"):
        engine.submit(Request(id, (65,), LONG))
    listener.wait_for(lambda: listener.events["runs"])
    engine.close()
    assert listener.events["waits"][-1].error == "the engine was closed"
    assert listener.events["runs"][-1].finish_reason is not None
    with pytest.raises(QueueFullError, match="closing"):
        engine.submit(Request("late", (65,), LONG))


def test_warming_up_leaves_nothing_to_compile(model, listener):
    import jax

    compiled = []

    def count(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    engine = Engine(model, emit=listener, max_batch=2, max_queue=64)
    assert engine.warm_up() > 0
    jax.monitoring.register_event_duration_secs_listener(count)
    engine.start()
    asked = [
        Sampling(max_tokens=4, seed=1),
        Sampling(max_tokens=170, temperature=0.0),
        Sampling(max_tokens=4, top_k=3, top_p=0.5, min_p=0.1, num_logprobs=5, stop=("x",)),
        Sampling(max_tokens=4, repetition_penalty=1.1, min_tokens=2, stop_token_ids=(3,)),
    ]
    lengths = (1, 15, 16, 17, 60, 100, 180)
    requests = [
        Request(f"{length}-{index}", (65,) * length, sampling)
        for length in lengths
        for index, sampling in enumerate(asked)
    ]
    try:
        for request in requests:
            engine.submit(request)
        listener.wait_for(lambda: all(listener.ended(request.id) for request in requests))
    finally:
        engine.close()
        jax.monitoring.unregister_event_duration_listener(count)
    assert compiled == []
