"""What a process does once before its first computation, and what it says about its devices.

Reads `devices.membership`, `devices.processes` and `errors`; `recipes` calls these at the start of a run.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
from jax._src import distributed  # the client of its key-value store has no public name

from jaxml.devices.membership import Membership
from jaxml.devices.processes import AskedToLeave, ManyProcesses, Processes, leave_alone
from jaxml.errors import DeviceError

# glibc malloc.h: parameter numbers of mallopt and the values given to them.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
ALLOCATOR_SETTINGS = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28))


def tune_allocator() -> bool:
    """Lets malloc keep freed memory, which makes a training step on a Linux CPU up to 1.5 times faster.

    XLA allocates its temporary buffer anew at every call; above glibc's mmap threshold each one is mapped, faulted in
    and unmapped. Call it before the first computation. Returns whether all settings were applied (only with glibc on
    Linux).
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    applied = [libc.mallopt(parameter, value) for parameter, value in ALLOCATOR_SETTINGS]
    return applied == [1] * len(ALLOCATOR_SETTINGS)


def use_compilation_cache(directory: str) -> None:
    """Keeps every compiled program in `directory`, so that a second start does not compile."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# A process that was not heard of for this long is dead, and jax ends the others.
HEARTBEAT_S = 10
# How much longer than we jax waits for the others: it ends the process when it has waited in vain, without an error.
LONGER_S = 60
LOOK_EVERY_S, REACH_S = 0.1, 2.0
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@contextlib.contextmanager
def joined(membership: Membership | None, is_asked: Callable[[], bool] = lambda: False) -> Iterator[Processes]:
    """The processes of this run, connected; the only one where `membership` is None. Call it before anything asks for
    devices. `is_asked`: whether a signal asked this process to stop.

    An exception that leaves the block ends the other processes too. Raises DeviceError when the coordinator has no
    address or does not answer, or when not all processes come, within `join_timeout_s`; AskedToLeave.
    """
    if membership is None:
        yield Processes(is_asked)
        return
    _connect(membership, is_asked)
    if membership.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", membership.cpu_devices)
    state = distributed.global_state
    processes = ManyProcesses(state.client, state.process_id, state.num_processes, is_asked)
    try:
        with processes.failing_together():
            yield processes
    finally:
        processes.close()


def _connect(membership: Membership, is_asked: Callable[[], bool]) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself, and it hears that signal alone.
    jax.config.update("jax_enable_preemption_service", False)
    coordinator, deadline = membership.coordinator, time.monotonic() + membership.join_timeout_s
    if coordinator is not None:
        _reach(membership, coordinator, deadline, is_asked)
    is_loopback = coordinator is not None and coordinator.rpartition(":")[0] in LOOPBACK
    failure: list[Exception] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                membership.num_processes,
                membership.process_id,
                cluster_detection_method=membership.detection,
                initialization_timeout=round(membership.join_timeout_s) + LONGER_S,
                heartbeat_timeout_seconds=HEARTBEAT_S,
                # What listens on every address can be reached from the network.
                coordinator_bind_address=coordinator if is_loopback else None,
            )
        except (RuntimeError, ValueError, OSError, KeyError) as error:
            failure.append(error)

    # In a thread, because it cannot be interrupted and ends the process where we raise.
    connecting = threading.Thread(target=connect, name="jaxml-connect", daemon=True)
    connecting.start()
    while connecting.is_alive():
        connecting.join(LOOK_EVERY_S)
        if is_asked():
            leave_alone(AskedToLeave.exit_code)
            raise AskedToLeave
        if time.monotonic() > deadline:
            leave_alone(DeviceError.exit_code)
            raise _not_joined(membership, "not all processes came")
    if failure:
        leave_alone(DeviceError.exit_code)
        raise _not_joined(membership, f"{type(failure[0]).__name__}: {failure[0]}") from failure[0]


def _reach(membership: Membership, coordinator: str, deadline: float, is_asked: Callable[[], bool]) -> None:
    """Wait until the coordinator's name resolves and, for all but process 0, somebody listens there: it may start later."""
    host, _, port = coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    while True:
        try:
            if membership.process_id == 0:
                socket.getaddrinfo(*address)
            else:
                socket.create_connection(address, timeout=REACH_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _not_joined(membership, f"{type(error).__name__}: {error}") from error
        if is_asked():
            raise AskedToLeave
        time.sleep(LOOK_EVERY_S)


def _not_joined(membership: Membership, got: str) -> DeviceError:
    who = "a process" if membership.process_id is None else f"process {membership.process_id}"
    where = "the coordinator" if membership.coordinator is None else f"the coordinator at {membership.coordinator}"
    return DeviceError(
        f"joining as {who} of {membership.num_processes or 'several'}, as {membership.told_by} says",
        expected=f"{where} to answer and all processes to come within {membership.join_timeout_s:g} s",
        got=got[:400],
        todo="see whether process 0 runs, whether its host name resolves here and its port can be reached; "
        "give the others more time with --join-timeout",
    )


@dataclass(frozen=True)
class Devices:
    """The devices JAX sees over all processes; `memory_bytes` is one device's own memory (None: not known)."""

    backend: str
    kind: str
    count: int
    num_processes: int
    memory_bytes: int | None

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / 2**30:.0f} GiB each"
        processes = "" if self.num_processes == 1 else f" in {self.num_processes} processes"
        return f"{self.count} x {self.kind} ({self.backend}){processes}{memory}"


def describe_devices() -> Devices:
    """What this process computes on. It starts JAX's backend."""
    first = jax.local_devices()[0]
    statistics = first.memory_stats() or {}
    return Devices(
        backend=jax.default_backend(),
        kind=first.device_kind,
        count=jax.device_count(),
        num_processes=jax.process_count(),
        memory_bytes=statistics.get("bytes_limit"),
    )
