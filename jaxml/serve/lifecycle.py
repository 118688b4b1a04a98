"""The life of a server: its main process starts LitServe, waits, drains, and leaves no process behind.

Reads `errors`, `serve.address`, `serve.forks`, `serve.gate`, `serve.guard`, `serve.private`, `serve.refusals` and
`serve.worker`; `launch` calls `run`.

LitServe starts the processes (a manager, the worker by spawn, API servers by fork) and owns the port. What it does not do
is here: it dies on SIGTERM at once and leaves its children running, waits for ever for a worker that died early, notices
other deaths seconds later, and lets Ctrl-C reach every process at the same time. `Watch` takes the place of the event
for which `LitServer.run` waits, so all decisions are made in the main thread of the main process, in `Watch.wait`. A
worker with engines that dies is started again, a few times, while the API process stays and refuses for now.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from fastapi.exceptions import RequestValidationError
from litserve import LitAPI, LitServer
from starlette.exceptions import HTTPException

from jaxml.errors import JaxmlError
from jaxml.serve.address import ServeError, ask_readiness, port_in_use, url
from jaxml.serve.forks import SIGNALS, forks_are_ours, without_resource_tracker
from jaxml.serve.gate import DRAINING, ENDING, READY, RESTARTING, Gate
from jaxml.serve.guard import Door, Guard
from jaxml.serve.private import Private
from jaxml.serve.refusals import refuse_http_error
from jaxml.serve.worker import InWorker

POLL_S = 0.02
# How long an API process has for its last answers once no worker computes any more.
ENDING_S = 3
# A worker that has served is started again so many times within so many seconds, after a pause that doubles.
MAX_RESTARTS, RESTARTS_S, FIRST_PAUSE_S = 3, 300.0, 0.25
# What LitServe calls its processes, and what they are to the user.
WORKER, API_SERVER = "inference-worker", "LitServer-0"
ROLES = {WORKER: "worker", API_SERVER: "API server"}


class Host(LitServer):
    """LitServe with one worker on devices that JAX chooses, and `watch` where it would wait."""

    def __init__(self, lit_api: LitAPI, watch: Watch, private: Private, door: Door):
        super().__init__(
            lit_api,
            accelerator="cpu",
            workers_per_device=1,
            timeout=False,
            callbacks=[InWorker(private)],
            middlewares=[(Guard, {"gate": watch.gate, "door": door})],
            disable_openapi_url=True,
        )
        self._watch = watch
        if door.details is not None:
            # LitServe's queues lose what a dead worker was about to take: only engines, which use none, can come back.
            watch.relaunch = lambda: self.launch_inference_worker(lit_api)
        self._monitor_workers = False
        self.uvicorn_graceful_timeout = ENDING_S
        self.app.add_exception_handler(HTTPException, refuse_http_error)
        self.app.add_exception_handler(RequestValidationError, refuse_http_error)

    def _init_manager(self, num_api_servers: int) -> Any:
        manager = super()._init_manager(num_api_servers)
        self._shutdown_event = self._watch
        return manager

    def launch_inference_worker(self, lit_api: LitAPI) -> list[BaseProcess]:  # type: ignore[bad-override]
        # A signal that is ignored when a program starts stays so: Ctrl-C does not reach the worker while it imports.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return list(super().launch_inference_worker(lit_api))
        finally:
            signal.signal(signal.SIGINT, previous)

    def verify_worker_status(self) -> None:
        """The port opens at once; the gate says whether the server is ready, and `watch` sees a worker that died."""


class Watch:
    """Where the main process spends the server's life. `is_set`, `set` and `wait` are what LitServe uses of an event."""

    def __init__(
        self, gate: Gate, private: Private, address: tuple[str, int], drain_s: float, say: Callable[[str], None]
    ):
        self.gate, self.private, self.address, self.drain_s, self.say = gate, private, address, drain_s, say
        self.received: list[int] = []
        self.relaunch: Callable[[], list[BaseProcess]] | None = None
        self._children: set[BaseProcess] = set()
        self._ends: list[float] = []
        self._wake: socket.socket | None = None

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT only set a flag in here; the second one ends every child at once."""
        self._wake, ring = socket.socketpair()
        with self._wake, ring:
            self._wake.setblocking(False)
            ring.setblocking(False)
            previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
            previous_fd = signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(previous_fd)
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def is_set(self) -> bool:
        return bool(self.received)

    def set(self) -> None:
        """LitServe's shutdown page would call it; it is not enabled."""
        self.received.append(signal.SIGTERM)

    def wait(self) -> None:
        """From the moment at which all processes were started until it is time to end them.

        Raises ServeError, or what the worker reported, when a process ended by itself and is not started again.
        """
        self._children = set(multiprocessing.active_children())
        try:
            for name in ROLES.keys() - {child.name for child in self._children}:
                raise self._ended(name, "ended while it started")
            self._until_ready()
            while not self.received:
                if (ended := self._pause(None)) is not None:
                    self._revive(ended)
            self._drain()
        finally:
            self.gate.state = ENDING
            for child in self._children:
                if child.name == WORKER:  # It ignores SIGTERM, and has nothing to save.
                    child.kill()
                    child.join()

    def end_all(self) -> None:
        """Whatever child still runs is killed. Afterwards there is none."""
        for child in {*self._children, *multiprocessing.active_children()}:
            child.kill()
            child.join()

    def _until_ready(self) -> None:
        while not self.received:
            if self.gate.state != READY and self.private.card() is not None:
                self.gate.state = READY
            if self.gate.state == READY or not self.gate.has_answered:
                status = ask_readiness(self.address, self.gate.secret)
                # Two that start together may both bind the port. Only one listens there: who answers must be ours.
                if status is not None and not self.gate.has_answered:
                    raise port_in_use(self.address)
                if status == 200:
                    self.say(f"ready: {url(self.address)}")
                    return
            if (ended := self._pause(POLL_S)) is not None:
                raise self._ended(ended.name, _how(ended.exitcode))

    def _revive(self, ended: BaseProcess | None) -> None:
        """Start the worker again until it can answer. Raises for any other process, and when it has ended too often."""
        while ended is not None:
            failure = self._ended(ended.name, _how(ended.exitcode))
            if ended.name != WORKER or self.relaunch is None:
                raise failure
            now = time.monotonic()
            self._ends = [at for at in self._ends if now - at < RESTARTS_S] + [now]
            if len(self._ends) > MAX_RESTARTS:
                self.say(f"the worker has ended {len(self._ends)} times within {RESTARTS_S:g} s")
                raise failure
            self.gate.state = RESTARTING
            pause_s = FIRST_PAUSE_S * 2 ** (len(self._ends) - 1)
            fault = failure.faults[0]
            self.say(
                f"{fault.failed}: {fault.got}; a new worker in {pause_s:g} s ({len(self._ends)} of {MAX_RESTARTS})"
            )
            ended.join()
            self._children.discard(ended)
            ended = self._relaunched(now + pause_s)

    def _relaunched(self, start_at_s: float) -> BaseProcess | None:
        """A new worker at that time of the monotonic clock, and until it is ready or a signal comes. A process that ended
        meanwhile."""
        while not self.received and (left_s := start_at_s - time.monotonic()) > 0:
            if (ended := self._pause(left_s)) is not None:
                return ended
        if self.received or self.relaunch is None:
            return None
        self.private.forget()
        self._children.update(self.relaunch())
        while not self.received and self.private.card() is None:
            if (ended := self._pause(POLL_S)) is not None:
                return ended
        if not self.received:
            self.gate.state = READY
            self.say("ready again")
        return None

    def _drain(self) -> None:
        was_ready = self.gate.state == READY
        self.gate.state = DRAINING
        name = signal.Signals(self.received[0]).name
        if was_ready and self.gate.inside:
            self.say(
                f"{name}: {self.gate.inside} requests have {self.drain_s:g} s to finish; a second signal ends them"
            )
        else:
            self.say(f"{name}: stopping")
        deadline = time.monotonic() + self.drain_s
        while self.gate.inside and time.monotonic() < deadline and all(child.is_alive() for child in self._children):
            self._pause(POLL_S)

    def _pause(self, timeout_s: float | None) -> BaseProcess | None:
        """Until a signal, the end of a child, or the time. A child that ended before any signal."""
        assert self._wake is not None, "LitServer.run is called while signals are handled"
        connection.wait([self._wake, *(child.sentinel for child in self._children)], timeout_s)
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(64)
        ended = [child for child in self._children if not child.is_alive()]
        return ended[0] if ended and not self.received else None

    def _ended(self, name: str, how: str) -> JaxmlError:
        """Why a process is gone: what it reported, or how it ended."""
        failure = self.private.failure()
        if failure is not None:
            return failure
        todo = "see what it printed above; if it was killed for memory, serve a smaller model or batch"
        role = ROLES.get(name, name)
        return ServeError(f"the {role} process", expected="to run until the server is stopped", got=how, todo=todo)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if len(self.received) > 1:
            for child in self._children:
                child.kill()


def run(
    lit_api_in: Callable[[Private], LitAPI],
    door_of: Callable[[LitAPI], Door],
    *,
    address: tuple[str, int],
    drain_s: float,
    say: Callable[[str], None],
) -> int:
    """Serve until a signal; returns the exit code: 0, or 128 and the number of a second signal.

    lit_api_in: makes what is served, given the directory that its processes share; door_of: what is let in to it. Raises
    ServeError, or what the worker raised while it started. No process is left, whatever happens.
    """
    if threading.current_thread() is not threading.main_thread():
        todo = "call it from the main thread of a process of its own"
        raise ServeError("serving", expected="the main thread", got="another one", todo=todo)
    gate, private = Gate(), Private.create()
    watch = Watch(gate, private, address, drain_s, say)
    try:
        lit_api = lit_api_in(private)
        host = Host(lit_api, watch, private, door_of(lit_api))
        with watch.handling_signals(), forks_are_ours(), without_resource_tracker():
            _run_litserve(host, watch, address)
    finally:
        private.remove()
    return 128 + watch.received[1] if len(watch.received) > 1 else 0


def _run_litserve(host: Host, watch: Watch, address: tuple[str, int]) -> None:
    options: dict[str, Any] = {"access_log": False, "server_header": False}
    try:
        host.run(
            address[0],
            address[1],
            num_api_servers=1,
            log_level="warning",
            generate_client_file=False,
            api_server_worker_type="process",
            **options,
        )
    except SystemExit as left:  # uvicorn could not bind, and has said so in its log
        raise port_in_use(address) from left
    except (OSError, EOFError):  # LitServe's manager was killed by a second signal
        if len(watch.received) < 2:
            raise
    finally:
        watch.end_all()


def require_no_backend() -> None:
    """Raises ServeError when JAX has computed in this process: the API servers are forks of it, and would deadlock."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "backends_are_initialized", lambda: False)():
        raise ServeError(
            "JAX in the process that starts the server",
            expected="imported at most: this process forks, and JAX runs threads",
            got="a backend that was initialised",
            todo="move what computes (arrays at module level too) into setup(), which runs in the worker",
        )


def _how(exit_code: int | None) -> str:
    """In words."""
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
