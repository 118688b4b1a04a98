"""The strict test world: eight fake CPU devices, warnings are errors, shapes checked by beartype, compiles counted.

The end of a run prints each folder's seconds and compiles under the share of the budget that it belongs to, and fails
when the suite compiled more programs than `COMPILE_LIMIT`: compiling is what makes JAX suites slow. Under pytest-xdist
the workers report what they compiled and the controller adds it up.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

# Before jax is imported, here and in the subprocesses of tests: an accelerator that happens to be there would change
# what is tested, and XLA's notes about resharding on fake devices are for its developers.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Compiling is most of the suite's time. Without optimisations, with the older emitters (the slower ones where XLA does
# optimise) and one module for LLVM, a train step compiles eight times as fast; what the tests claim holds in any compile.
# `nox -s scale` and `chaos` set both to what users have. A jaxlib that lacks one of the flags aborts, naming it.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")

import hypothesis
import jax
import pytest
from hypothesis.database import DirectoryBasedExampleDatabase

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT.parent / "shared" / "assets"

jax.config.update("jax_num_cpu_devices", 8)
# Again, because a plugin of pytest may have imported jax already.
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "tests-xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

hypothesis.settings.register_profile(
    "suite",
    # The first example of a test may compile, and the machine may be shared: time says nothing about the code.
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    database=DirectoryBasedExampleDatabase(ROOT / ".cache" / "hypothesis"),
    print_blob=True,
)
hypothesis.settings.load_profile("suite")

# Wall seconds on two cores for each part of jaxml; they sum to the ten minutes of `nox -s tests`.
SHARES_S = {"training": 170, "scale": 110, "models": 80, "engine": 90, "service": 70, "tasks": 80}
# The share that a folder under tests/ draws on, unless it is "training". A part that adds a folder adds a line.
SHARE_OF = {"infer": "engine", "compress": "engine", "serve": "service"}
SHARE_OF |= {"prove": "scale", "launch": "scale", "devices": "scale"}
# Programs handed to XLA, found in the persistent cache or not, by all workers of one run.
COMPILE_LIMIT = 2000
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_started = time.monotonic()
_seconds: Counter[str] = Counter()
_compiles: Counter[str] = Counter()
_folder = "(collection)"


def _count_compile(event: str, duration: float, **_: object) -> None:
    if event == COMPILE_EVENT:
        _compiles[_folder] += 1


jax.monitoring.register_event_duration_secs_listener(_count_compile)


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real data and trained models; tests that need it skip, saying so, where it is absent."""
    if not ASSETS.is_dir():
        pytest.skip(f"no assets folder at {ASSETS}")
    return ASSETS


def folder_of(nodeid: str) -> str:
    """`tests/models/test_rope.py::test_x` is in `models`; a file right under tests/ is in `.`."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "."


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    global _folder
    _folder = folder_of(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[folder_of(report.nodeid)] += report.duration


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """On the xdist controller: add what a worker compiled (a worker that crashed has no output)."""
    _compiles.update(getattr(node, "workeroutput", {}).get("compiles", {}))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["compiles"] = dict(_compiles)
    elif exitstatus == 0 and _compiles.total() > COMPILE_LIMIT:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    num_workers = getattr(config.option, "numprocesses", None) or 1
    say = terminalreporter.write_line
    terminalreporter.section(f"seconds of the wall (summed over {num_workers} workers, divided by them) and compiles")
    shares = {share: [f for f in _seconds if SHARE_OF.get(f, "training") == share] for share in SHARES_S}
    for share, folders in shares.items():
        if not folders:
            continue
        spent = sum(_seconds[folder] for folder in folders) / num_workers
        say(f"{spent:7.1f} s of {SHARES_S[share]} s for {share}", red=spent > SHARES_S[share])
        for folder in sorted(folders, key=lambda folder: -_seconds[folder]):
            say(f"{_seconds[folder] / num_workers:10.1f} s {_compiles[folder]:5} compiles  tests/{folder}")
    say(f"{time.monotonic() - _started:7.1f} s in all with imports and collection, of {sum(SHARES_S.values())} s")
    say(f"{_compiles.total():7} compiles, limit {COMPILE_LIMIT}")
    if _compiles.total() > COMPILE_LIMIT:
        say("FAILED: too many compiles; share a compiled program or shrink a parametrisation", red=True)
