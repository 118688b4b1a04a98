"""Runs an experiment in a child process, kills it with -9 as it goes, and resumes it until it is finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

COMMAND = "from jaxml.cli.main import entry; entry()"


def start(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """`jaxml ARGUMENTS` in a process of its own, its words appended to `log`."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            stdout=stream,
            stderr=stream,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        )


def logged_steps(run_dir: Path) -> int:
    """Whole lines of metrics.jsonl so far."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(process: subprocess.Popen[bytes], is_time: Callable[[], bool], limit_s: float) -> bool:
    """Poll until it is time (True) or the process ended (False). Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        if is_time():
            return True
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"no step within {limit_s} s")
        time.sleep(0.002)
    return False


def run_with_kills(
    file: str,
    run_dir: Path,
    overrides: list[str],
    is_time: list[Callable[[], bool]],
    environment: dict[str, str],
    limit_s: float = 300.0,
) -> int:
    """Start the run, kill it when each of `is_time` says so, resume it after every kill; returns the kills that hit."""
    log = run_dir.with_suffix(".log")
    hits = 0
    arguments = ["train", file, "--run-dir", str(run_dir), "--start", "resume", *overrides]
    for now in is_time:
        process = start(arguments, log, environment)
        if not wait_for(process, now, limit_s):
            assert process.returncode == 0, log.read_text()
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        hits += 1
        arguments = ["resume", str(run_dir)] if (run_dir / "run.json").exists() else arguments
    process = start(arguments, log, environment)
    assert process.wait(timeout=limit_s) == 0, log.read_text()
    return hits
