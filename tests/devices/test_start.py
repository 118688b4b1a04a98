"""Process start-up: the allocator, the compilation cache, the description of the devices, joining other processes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxml.devices import start
from jaxml.devices.membership import Membership
from jaxml.devices.processes import AskedToLeave
from jaxml.errors import DeviceError
from jaxml.launch.local import free_port


class FakeLibc:
    def __init__(self, answer: int):
        self.calls, self.answer = [], answer

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return self.answer


@pytest.mark.parametrize(("answer", "is_applied"), [(1, True), (0, False)])
def test_the_allocator_gets_three_settings_on_glibc(monkeypatch, answer, is_applied):
    libc = FakeLibc(answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(start.platform, "system", lambda: "Linux")
    monkeypatch.setattr(start.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert start.tune_allocator() is is_applied
    assert libc.calls == [(-3, 2**30), (-1, 2**31 - 1), (-2, 2**28)]


@pytest.mark.parametrize(("system", "libc"), [("Darwin", ""), ("Linux", "musl"), ("Windows", "")])
def test_other_systems_are_left_alone(monkeypatch, system, libc):
    monkeypatch.setattr(start.platform, "system", lambda: system)
    monkeypatch.setattr(start.platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("touched libc"))
    assert start.tune_allocator() is False


def test_the_compilation_cache_keeps_everything(tmp_path):
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        start.use_compilation_cache(str(tmp_path))
        assert [getattr(jax.config, name) for name in names] == [str(tmp_path), 0.0, -1]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_devices_are_described_in_words():
    devices = start.describe_devices()
    assert (devices.backend, devices.count, devices.num_processes) == ("cpu", 8, 1)
    assert str(devices).startswith("8 x cpu (cpu)")
    assert str(start.Devices("tpu", "TPU v4", 16, 4, 32 * 2**30)) == "16 x TPU v4 (tpu) in 4 processes, 32 GiB each"


def member(coordinator: str, process_id: int = 1, **fields) -> Membership:
    return Membership(coordinator, 2, process_id, "the test", join_timeout_s=0.5, **fields)


def test_without_a_membership_the_process_is_alone():
    with start.joined(None, lambda: True) as processes:
        assert (processes.index, processes.count, processes.should_stop()) == (0, 1, True)


@pytest.mark.parametrize(
    ("host", "process_id"), [("127.0.0.1", 1), ("no-such-host.invalid", 1), ("no-such-host.invalid", 0)]
)
def test_a_coordinator_that_never_answers_is_an_error_that_names_it(host, process_id):
    coordinator = f"{host}:{free_port()}"
    begun = time.monotonic()
    with pytest.raises(DeviceError) as caught, start.joined(member(coordinator, process_id)):
        pass
    assert time.monotonic() - begun < 10
    (fault,) = caught.value.faults
    assert fault.failed == f"joining as process {process_id} of 2, as the test says"
    assert coordinator in fault.expected and "0.5 s" in fault.expected
    assert ("ConnectionRefusedError" if host == "127.0.0.1" else "gaierror") in fault.got
    assert "--join-timeout" in fault.todo


def test_a_signal_ends_the_wait_for_the_coordinator():
    with pytest.raises(AskedToLeave), start.joined(member(f"127.0.0.1:{free_port()}"), lambda: True):
        pass


def test_a_process_0_to_which_nobody_comes_leaves_with_an_error():
    code = f"""
import sys
from jaxml.devices import start
from jaxml.devices.membership import Membership
from jaxml.errors import DeviceError
try:
    with start.joined(Membership("127.0.0.1:{free_port()}", 2, 0, "the test", join_timeout_s=1)):
        pass
except DeviceError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "not all processes came" in done.stdout
