"""Starts the processes of a run on this machine, passes on what they say, and ends all when one dies.

Reads `launch.cluster` for the variables that tell each process who it is, and `errors`; `cli.launch` calls `run`, and
`cli` calls `end_with_launcher` in each process. No jax: the launcher computes nothing.

Each process has a process group of its own, so that Ctrl-C in a terminal reaches the launcher alone, which passes it on once.
All hold the reading end of one pipe whose writing end is the launcher's: it closes with the launcher, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from types import FrameType
from typing import Any

from jaxml import errors
from jaxml.errors import Fault, JaxmlError, RunError
from jaxml.launch.cluster import COORDINATOR, CPU_DEVICES, NUM_PROCESSES, PROCESS_ID

LAUNCHER_PIPE = "JAXML_LAUNCHER_PIPE"
COMMAND = "from jaxml.cli.main import entry; entry()"
# What a process leaves with when it was asked to stop and saved (sysexits.h), and when another one failed.
INTERRUPTED, OTHER_FAILED = 75, 76
# After a death the others have this long to end by themselves, and as long again after SIGTERM; then they are killed.
LET_END_S, TERMINATE_S = 3.0, 4.0
# After one has finished the others have this long.
FINISH_S = 60.0
LOOK_EVERY_S = 0.2


@dataclass
class Process:
    """One started process. `said`: its last line on stdout, where a verb's `--json` is. `is_late`: the others had ended
    long before."""

    index: int
    popen: subprocess.Popen[str]
    said: str = ""
    is_late: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        return self.popen.poll()


def run(
    arguments: Sequence[str], num_processes: int, cpu_devices: int, environment: Mapping[str, str]
) -> tuple[dict[str, Any], int]:
    """Run `jaxml ARGUMENTS` in several processes with `cpu_devices` devices each; (result of process 0, exit code).

    `environment`: that of this process. SIGTERM and SIGINT are passed on. Raises the error of a process that failed,
    with its number, or RunError for one that died.
    """
    ended: queue.Queue[Process] = queue.Queue()
    with _pipe() as watched:
        own = {
            COORDINATOR: f"127.0.0.1:{free_port()}",
            NUM_PROCESSES: str(num_processes),
            CPU_DEVICES: str(cpu_devices),
            LAUNCHER_PIPE: str(watched),
        }
        processes: list[Process] = []
        try:
            with _passed_on(processes):
                for index in range(num_processes):
                    mine = {**environment, **own, PROCESS_ID: str(index)}
                    processes.append(_start(index, arguments, mine, watched, ended))
                first = _until_one_fails(processes, ended)
                if first is not None:
                    _end_others(processes, ended)
        finally:
            for process in processes:
                if process.code is None:
                    process.popen.kill()
                for thread in process.threads:
                    thread.join()
    if first is not None:
        raise _failure(first, num_processes)
    return json.loads(processes[0].said or "{}"), processes[0].code or 0


def free_port() -> int:
    """A port of the loopback interface that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """In a process that `run` started: a thread that ends the process at once when the launcher is gone."""
    if LAUNCHER_PIPE not in environment:
        return
    descriptor = int(environment[LAUNCHER_PIPE])

    def watch() -> None:
        os.read(descriptor, 1)  # nothing is ever written: this returns when the other end is closed
        os._exit(1)

    threading.Thread(target=watch, name="jaxml-launcher", daemon=True).start()


@contextlib.contextmanager
def _pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _start(
    index: int, arguments: Sequence[str], environment: Mapping[str, str], watched: int, ended: queue.Queue[Process]
) -> Process:
    popen = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, "--json"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=(watched,),
        process_group=0,
    )
    process = Process(index, popen)
    assert isinstance(popen.stdout, TextIOWrapper) and isinstance(popen.stderr, TextIOWrapper)
    jobs = ((_pass_on, (index, popen.stderr)), (_remember, (process, popen.stdout)), (_wait, (process, ended)))
    for job, given in jobs:
        thread = threading.Thread(target=job, args=given, daemon=True)
        thread.start()
        process.threads.append(thread)
    return process


def _pass_on(index: int, lines: TextIOWrapper) -> None:
    with lines:
        for line in lines:
            with contextlib.suppress(OSError, ValueError):  # whoever read our stderr may be gone: the run goes on
                sys.stderr.write(f"[{index}] {line}")
                sys.stderr.flush()


def _remember(process: Process, lines: TextIOWrapper) -> None:
    with lines:
        for line in lines:
            process.said = line.strip() or process.said


def _wait(process: Process, ended: queue.Queue[Process]) -> None:
    """A thread for each process, so that ends are queued in the order in which they come."""
    process.popen.wait()
    ended.put(process)


@contextlib.contextmanager
def _passed_on(processes: list[Process]) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT go to all processes (each counts them itself: a second one stops at once)."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.code is None:
                process.popen.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until_one_fails(processes: list[Process], ended: queue.Queue[Process]) -> Process | None:
    """The first process that failed by itself; None when all have ended well (finished, or interrupted after saving)."""
    second_hand: Process | None = None
    deadline = float("inf")
    for _ in processes:
        process = _next(ended, deadline)
        if process is None:  # It is late. Of two that wait for each other, the cause may be the one that has not ended.
            late = next(process for process in processes if process.code is None)
            late.is_late = True
            return second_hand or late
        if process.code not in (0, INTERRUPTED, OTHER_FAILED):
            return process
        if process.code == OTHER_FAILED:
            second_hand = second_hand or process
        deadline = time.monotonic() + (LET_END_S if second_hand else FINISH_S)
    return second_hand


def _next(ended: queue.Queue[Process], deadline: float) -> Process | None:
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=LOOK_EVERY_S)
    return None


def _end_others(processes: list[Process], ended: queue.Queue[Process]) -> None:
    for seconds, number in ((LET_END_S, signal.SIGTERM), (TERMINATE_S, signal.SIGKILL)):
        deadline = time.monotonic() + seconds
        while any(process.code is None for process in processes) and _next(ended, deadline) is not None:
            pass
        for process in processes:
            if process.code is None:
                process.popen.send_signal(number)


def _failure(process: Process, num_processes: int) -> JaxmlError:
    """The error of a process as it told it, with the process's number; RunError where it told none."""
    who = f"process {process.index} of {num_processes} (pid {process.popen.pid})"
    todo = f"see the lines above that begin with [{process.index}]; `jaxml launch local ... -- resume RUN_DIR` goes on from there"
    try:
        told = json.loads(process.said or "{}")
    except ValueError:
        told = {}
    code = process.code
    how = (
        "no end"
        if process.is_late or code is None
        else f"exit code {code}"
        if code >= 0
        else f"signal {-code} ({signal.Signals(-code).name})"
    )
    own = Fault(who, "to run until all have finished", how, todo)
    if not told.get("faults"):
        return RunError.from_faults([own])
    kind = getattr(errors, told.get("error", ""), JaxmlError)
    return kind.from_faults([own, *(Fault(**fault) for fault in told["faults"])])
