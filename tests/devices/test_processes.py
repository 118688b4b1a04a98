"""Agreement between processes: the real key-value store of jax, with a thread for each process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jax._src.lib import _jax

from jaxml.devices import processes as module
from jaxml.devices.processes import ManyProcesses, Processes
from jaxml.errors import ConfigError, DataError
from jaxml.launch.local import free_port

COUNT = 3


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[ManyProcesses]]]:
    """connected(asked): three processes; `asked[i]()` says whether process i was asked to stop."""
    monkeypatch.setattr(module, "WATCH_EVERY_S", 0.005)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, COUNT)
    clients = [_jax.get_distributed_runtime_client(address, index, init_timeout=20) for index in range(COUNT)]
    together(COUNT, lambda index: clients[index].connect())
    made: list[ManyProcesses] = []

    def connect(asked: list[Callable[[], bool]] | None = None) -> list[ManyProcesses]:
        for index, client in enumerate(clients):
            made.append(ManyProcesses(client, index, COUNT, asked[index] if asked else lambda: False))
        return made

    yield connect
    for process in made:
        process.close()
    together(COUNT, lambda index: clients[index].shutdown())
    service.shutdown()


def together(count: int, job: Callable[[int], Any]) -> list[Any]:
    """`job(index)` in a thread for each index; what they give, or the first exception."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=30) for future in [pool.submit(job, index) for index in range(count)]]


def outcome(job: Callable[[], Any]) -> Any:
    """What a job gives, or the text of the ConfigError that it raises."""
    try:
        return job()
    except ConfigError as error:
        return str(error)


def test_one_process_agrees_with_itself() -> None:
    asked = [False]
    alone = Processes(lambda: asked[0])
    assert (alone.is_first, alone.count, alone.should_stop(), alone.is_asked_to_leave()) == (True, 1, False, False)
    assert alone.from_first(lambda: {"a": [1]}) == {"a": [1]}
    assert alone.all_same("x", {"a": "1"}) and not alone.all_same("x", None)
    asked[0] = True
    assert alone.should_stop() and alone.is_asked_to_leave()


def test_what_the_first_process_decides_all_are_told_in_order(connected) -> None:
    found = connected()
    calls: list[int] = []

    def decide(index: int) -> list[Any]:
        return [
            found[index].from_first(lambda number=number: calls.append(index) or {"is": number}) for number in (1, 2)
        ]

    assert together(COUNT, decide) == [[{"is": 1}, {"is": 2}]] * COUNT
    assert set(calls) == {0}


def test_an_error_of_the_first_process_is_raised_in_all(connected) -> None:
    found = connected()

    def fail() -> None:
        raise DataError("the data", expected="some", got="none", todo="bring some")

    def decide(index: int) -> str:
        with pytest.raises(DataError) as caught:
            found[index].from_first(fail)
        return str(caught.value)

    assert len(set(together(COUNT, decide))) == 1


def test_equal_facts_go_on_and_one_that_leaves_takes_all_with_it(connected) -> None:
    found = connected()
    assert together(COUNT, lambda index: found[index].all_same("a", {"x": "1"})) == [True] * COUNT
    assert together(COUNT, lambda index: found[index].all_same("b", None if index == 1 else {"x": "1"})) == [False] * 3


def test_every_process_with_other_facts_is_named_with_each_fact_in_all(connected) -> None:
    found = connected()
    facts = [{"x": "1", "y": "2"}, {"x": "1", "y": "3"}, {"x": "5"}]
    told = together(COUNT, lambda index: outcome(lambda: found[index].all_same("a", facts[index])))
    assert len(set(told)) == 1
    assert "3 faults" in told[0]
    for line in ("y of process 1 of 3\n  expected: 2, as in process 0\n  got:      3", "x of process 2 of 3"):
        assert line in told[0]


@pytest.mark.parametrize("seed", range(6))
def test_all_stop_at_the_same_point_whoever_is_asked_and_however_fast_each_is(connected, seed: int) -> None:
    """Two are asked at any time, even in steps of different length, with a barrier every few points as steps have it."""
    draw = random.Random(seed)
    points, length = 400, draw.randint(1, 5)
    asked_at = {draw.randrange(COUNT): draw.randrange(1, 60), draw.randrange(COUNT): draw.randrange(1, 60)}
    at = [0] * COUNT
    found = connected([lambda i=i: i in asked_at and at[i] >= asked_at[i] for i in range(COUNT)])
    barrier = threading.Barrier(COUNT, timeout=20)
    pauses = [[draw.choice((0, 0, 0, 0.002)) for _ in range(points)] for _ in range(COUNT)]

    def run(index: int) -> int:
        for point in range(points):
            if found[index].should_stop():
                return point
            at[index] = point
            time.sleep(pauses[index][point] + 0.0005)
            if point % length == 0:
                barrier.wait()
        return points

    stopped = together(COUNT, run)
    assert len(set(stopped)) == 1
    assert stopped[0] >= min(asked_at.values())
    assert stopped[0] < points or min(asked_at.values()) > points - 100


def test_asked_at_the_end_nobody_waits_for_those_who_are_through(connected) -> None:
    is_asked = [False]
    found = connected([lambda: False, lambda: is_asked[0], lambda: False])
    for process in found:
        assert not process.should_stop()
    found[0].close()
    is_asked[0] = True
    found[2].close()
    time.sleep(0.1)  # its thread asks the others how far they got
    answer = threading.Thread(target=found[1].should_stop, daemon=True)
    answer.start()
    answer.join(timeout=5)
    assert not answer.is_alive()  # whatever it said: the others made no such call
    found[1].close()
