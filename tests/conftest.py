"""The strict test world: eight fake CPU devices, warnings are errors, shapes checked by beartype, compiles counted.

The end of a run prints each folder's seconds beside its share of the budget, and fails when the suite compiled more
functions than `COMPILE_LIMIT`: compiling is what makes JAX suites slow.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT.parent / "shared" / "assets"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "tests-xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Seconds on two cores. Every folder under tests/ belongs to one share.
SHARES = {"training": 170.0, "scale": 110.0, "models": 80.0, "engine": 90.0, "service": 70.0, "tasks": 80.0}
COMPILE_LIMIT = 1500

_seconds: dict[str, float] = defaultdict(float)
_compiles = 0
_started = time.monotonic()


def _count_compiles(event: str, duration: float, **_: object) -> None:
    global _compiles
    if event == "/jax/core/compile/backend_compile_duration":
        _compiles += 1


jax.monitoring.register_event_duration_secs_listener(_count_compiles)


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real data and trained models; tests that need it skip, saying so, where it is absent."""
    if not ASSETS.is_dir():
        pytest.skip(f"no assets folder at {ASSETS}")
    return ASSETS


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = report.nodeid.split("/")[1] if report.nodeid.count("/") > 1 else "."
    _seconds[folder] += report.duration


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == 0 and _compiles > COMPILE_LIMIT:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    writer = terminalreporter
    writer.section("seconds by folder")
    for folder, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        writer.write_line(f"{seconds:8.1f} s  tests/{folder}")
    total = sum(_seconds.values())
    writer.write_line(f"{total:8.1f} s  in all, of {SHARES['training']:.0f} s for training (shares: {SHARES})")
    writer.write_line(f"{_compiles} compiles, limit {COMPILE_LIMIT}")
    if _compiles > COMPILE_LIMIT:
        writer.write_line("FAILED: too many compiles; share a compiled program or shrink a parametrisation", red=True)
