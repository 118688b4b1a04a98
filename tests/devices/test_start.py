"""Process start-up: the allocator, the compilation cache, the description of the devices."""

from __future__ import annotations

import ctypes

import jax
import pytest

from jaxml.devices import start


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
