"""The processes of one run as one: what the first decides all do, they stop at the same point, and they fail together.

Reads `errors`; `devices.start` makes one, `recipes` ask it. They talk through the key-value store of `jax.distributed`,
which needs no device: so they can talk while the devices compute or wait for each other. Keys, all below `jaxml/`:
`first/N` the N-th thing that the first process decided; `same/WHAT/I` what process I brings to a comparison;
`notice/stop` and `notice/failed/I`, which a thread of every process looks for; `polls/I` for the agreement on when to stop.

Stopping together. The program of a run is the same in all processes, and so is the sequence of its calls of `should_stop`.
Once a notice is there, the thread of each process holds the counter of those calls still, tells how far it got, and
learns how far the others got; all then stop at the call after the furthest one, which nobody has made yet. The threads wait
for each other only, and the main threads for no more than a held counter: nobody waits for a device, and so not
for a process that waits for the devices.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxml import errors
from jaxml.errors import ConfigError, Fault, Faults, JaxmlError

# What a process leaves with because another one failed: it has nothing to say about the cause (EX_PROTOCOL).
OTHER_FAILED_EXIT_CODE = 76
WATCH_EVERY_S = 0.2
LOOK_EVERY_S = 0.02
# How long a process that fails waits until the others have heard of it; how long one that heard of it may take to fail by
# itself, for most errors are met by all; how long the first, whose end ends the others, waits until they have left.
HEARD_WITHIN_S, OWN_FAILURE_WITHIN_S, LEFT_WITHIN_S = 3.0, 2.0, 4.0


class AskedToLeave(Exception):
    """A signal came before there was anything to save. `exit_code`: start the job again (EX_TEMPFAIL of sysexits.h)."""

    exit_code = 75


class Processes:
    """The only process of a run, which agrees with itself. `is_asked`: whether this process was asked to stop."""

    index, count = 0, 1

    def __init__(self, is_asked: Callable[[], bool] = lambda: False):
        self._is_asked = is_asked

    @property
    def is_first(self) -> bool:
        """Whether this is the one process that writes and talks."""
        return self.index == 0

    def should_stop(self) -> bool:
        """Whether all are to stop here. Every process calls it at the same points of the run, and gets the same answer."""
        return self._is_asked()

    def is_asked_to_leave(self) -> bool:
        """Whether some process was asked to stop: for the time before the first `should_stop`, at any point."""
        return self._is_asked()

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` (plain JSON) gives in the first process; it is not called elsewhere. A JaxmlError that it raises
        there is raised in all processes."""
        return make()

    def all_same(self, what: str, facts: Mapping[str, str] | None) -> bool:
        """Whether all go on: False when one brought None, because it leaves.

        Raises ConfigError in every process, with the number of each process whose facts are not those of the first and
        the names of the facts that differ.
        """
        return facts is not None

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """An exception that leaves the block ends the other processes too, with its name."""
        yield

    def close(self) -> None:
        """After the last `should_stop`: stop looking for notices. Who asks how far this process got finds an answer."""


class ManyProcesses(Processes):
    """One of several processes that `jax.distributed` has connected. `client`: its key-value store."""

    def __init__(self, client: Any, index: int, count: int, is_asked: Callable[[], bool] = lambda: False):
        super().__init__(is_asked)
        self.index, self.count, self._client = index, count, client
        self._told = 0  # how many things the first process decided
        self._lock = threading.Lock()  # held while `_polls` must not move
        self._polls = 0
        self._stop_at: int | None = None
        self._is_leaving = False  # as agreed, or with an error of its own: notices do not end this process any more
        self._has_notice = False
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="jaxml-processes", daemon=True)
        self._watcher.start()

    def should_stop(self) -> bool:
        with self._lock:
            self._polls += 1
            return self._stop_at is not None and self._polls >= self._stop_at

    def is_asked_to_leave(self) -> bool:
        return self._has_notice or self._is_asked()

    def from_first(self, make: Callable[[], Any]) -> Any:
        key = f"jaxml/first/{self._told}"
        self._told += 1
        if self.is_first:
            try:
                answer = {"value": make()}
            except JaxmlError as error:
                answer = {"error": _plain(error)}
            self._client.key_value_set(key, json.dumps(answer))
        else:
            answer = json.loads(self._wait_for(lambda: self._get(key)))
        if "error" in answer:
            self._is_leaving = True
            raise _error(answer["error"])
        return answer["value"]

    def all_same(self, what: str, facts: Mapping[str, str] | None) -> bool:
        text = json.dumps(facts and dict(facts), sort_keys=True)
        # The digests are read at once by the first process, the facts only of those that differ.
        self._client.key_value_set(f"jaxml/facts/{what}/{self.index}", text)
        self._client.key_value_set(
            f"jaxml/same/{what}/{self.index}", hashlib.sha256(text.encode()).hexdigest() if facts is not None else ""
        )
        return self.from_first(lambda: self._compare(what))

    def _compare(self, what: str) -> bool:
        """In the first process: whether none leaves. Raises ConfigError where facts differ."""
        digests = self._wait_for(lambda: self._all(f"jaxml/same/{what}/"))
        if "" in digests:
            return False
        different = [index for index, digest in enumerate(digests) if digest != digests[0]]
        faults = Faults(ConfigError)
        facts = {index: json.loads(self._get(f"jaxml/facts/{what}/{index}") or "{}") for index in [0, *different]}
        for index in different:
            names = [name for name in {**facts[0], **facts[index]} if facts[0].get(name) != facts[index].get(name)]
            for name in names:
                faults.add(
                    f"{name} of process {index} of {self.count}",
                    expected=f"{facts[0].get(name, 'none')}, as in process 0",
                    got=facts[index].get(name, "none"),
                    todo="start all processes with one command, the same files and the same installation",
                )
        faults.raise_if_any()
        return True

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        def left(kind: object, error: BaseException | None, trace: object) -> None:
            if error is not None and not self._is_leaving:
                self._fail(error)

        with contextlib.ExitStack() as stack:
            stack.push(left)
            yield

    def close(self) -> None:
        self._is_leaving = True
        self._is_closed.set()
        self._watcher.join()
        self._tell_polls()

    def _fail(self, error: BaseException) -> None:
        """Tell the others, and do not wait for them at the end of this process: they will not come."""
        self._is_leaving = True
        failure = error if isinstance(error, JaxmlError) else _unexpected(error)
        self._set(f"jaxml/notice/failed/{self.index}", json.dumps(_plain(failure)))
        self._wait_until(HEARD_WITHIN_S, lambda: len(self._list("jaxml/heard/")) >= self.count - 1)
        atexit.register(self._leave, failure.exit_code)  # before the handler of jax, which waits for all processes

    def _watch(self) -> None:
        """The thread: publishes that this process was asked to stop, and acts on the notices of all."""
        # Without a coordinator jax ends the process by itself: there is nobody to ask.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while not self._is_closed.wait(WATCH_EVERY_S):
                self._look_round()

    def _look_round(self) -> None:
        if self._is_asked() and not self._has_notice:
            self._set("jaxml/notice/stop", "")
        for key, value in self._list("jaxml/notice/"):
            if "/failed/" in key:
                self._heard_failure(int(key.rpartition("/")[2]), value)
            else:
                self._has_notice = True
        if self._has_notice and self._stop_at is None:
            self._agree_on_stop()

    def _agree_on_stop(self) -> None:
        with self._lock:
            self._tell_polls()
            while (polls := self._all("jaxml/polls/")) is None:
                if self._is_closed.wait(LOOK_EVERY_S):
                    return
            self._stop_at = max(map(int, polls)) + 1

    def _tell_polls(self) -> None:
        self._set(f"jaxml/polls/{self.index}", str(self._polls))

    def _heard_failure(self, index: int, told: str) -> None:
        if index == self.index:
            return
        self._set(f"jaxml/heard/{self.index}", "")
        self._wait_until(OWN_FAILURE_WITHIN_S, lambda: self._is_leaving)
        if not self._is_leaving:
            error = _error(json.loads(told))
            print(f"jaxml: process {self.index} ends because process {index} failed: {error}", file=sys.stderr)
            self._leave(OTHER_FAILED_EXIT_CODE)

    def _leave(self, exit_code: int) -> None:
        """End this process; the first one, on which the others depend, only after them."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._set(f"jaxml/left/{self.index}", "")
            if self.is_first:
                self._wait_until(LEFT_WITHIN_S, lambda: len(self._list("jaxml/left/")) == self.count)
        _end(exit_code)

    def _wait_until(self, seconds: float, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not is_so():
            time.sleep(LOOK_EVERY_S)

    def _wait_for(self, look: Callable[[], Any]) -> Any:
        """What `look` gives once it is not None. The thread ends the process meanwhile when another one fails."""
        pause_s = LOOK_EVERY_S
        while (found := look()) is None:
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, WATCH_EVERY_S)
        return found

    def _all(self, folder: str) -> list[str] | None:
        """The values of all processes in their order, or None as long as one is missing."""
        values = {int(key.rpartition("/")[2]): value for key, value in self._list(folder)}
        return [values[index] for index in range(self.count)] if len(values) == self.count else None

    def _get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as missing:
            if "NOT_FOUND" in str(missing):
                return None
            raise

    def _list(self, folder: str) -> list[tuple[str, str]]:
        return self._client.key_value_dir_get(folder)

    def _set(self, key: str, value: str) -> None:
        """Set a key, or leave it as it is: the first who tells is right."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(key, value)


def _plain(error: JaxmlError) -> dict[str, Any]:
    return {"error": type(error).__name__, "faults": [vars(fault) for fault in error.faults]}


def _error(value: dict[str, Any]) -> JaxmlError:
    kind = getattr(errors, value["error"], JaxmlError)
    return kind.from_faults([Fault(**fault) for fault in value["faults"]])


def _unexpected(error: BaseException) -> JaxmlError:
    got, todo = f"{type(error).__name__}: {error}"[:400], "see the traceback of that process"
    return JaxmlError("the run", expected="no error that jaxml does not know", got=got, todo=todo)


def leave_alone(exit_code: int) -> None:
    """From now on the end of this process does not wait for the others, as the handler of jax would."""
    atexit.register(_end, exit_code)  # The last one registered is the first to run.


def _end(exit_code: int) -> None:
    """At once: threads that wait for other processes do not come to an end by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
