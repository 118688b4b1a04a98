"""Starts what is measured as processes of their own, and watches a run's metrics.jsonl from outside.

Read by `benchmarks/train_rows.py`; needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600.0
# The clock's grain, and small beside the seconds that it measures; a look costs about 0.05 ms.
POLL_S = 0.01
# Longer than any line of metrics.jsonl.
TAIL_BYTES = 8192


class MeasurementError(Exception):
    """A measured process failed, so that the rows it was to give are missing."""

    def __init__(self, command: Sequence[str], expected: str, got: str) -> None:
        super().__init__(
            f"measuring `{' '.join(Path(word).name for word in command[:3])} ...`\n"
            f"  expected: {expected}\n"
            f"  got: {got}\n"
            f"  todo: run the command alone and read what it says"
        )


def environment(cache: Path | None = None) -> dict[str, str]:
    """This process's, with the code of this checkout in front and compiled programs kept in `cache`."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if cache is not None:
        own["JAXML_CACHE"] = str(cache)
    return {"JAX_PLATFORMS": "cpu", **os.environ, **own}


def run_json(command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object on the last line that `command` prints. Raises MeasurementError when it fails."""
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MeasurementError(command, "a process that ends", str(error)) from error
    if done.returncode != 0:
        raise MeasurementError(command, "exit code 0", f"{done.returncode}\n{_end_of(done.stderr)}")
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise MeasurementError(command, "JSON on the last line", _end_of(done.stdout) or "nothing") from error


def time_until(
    command: Sequence[str], is_reached: Callable[[], bool], env: Mapping[str, str], log: Path, stop: bool
) -> tuple[float, float]:
    """Seconds from the start of `command` until `is_reached()`, and until its end; killed once reached with `stop`.

    Its output goes to `log`. Raises MeasurementError when it ends unreached, fails later, or takes over TIMEOUT_S.
    """
    with log.open("wb") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not is_reached():
                has_ended = process.poll() is not None
                if (has_ended and not is_reached()) or time.perf_counter() - begun > TIMEOUT_S:
                    got = f"exit code {process.returncode}" if has_ended else f"nothing for {TIMEOUT_S:.0f} s"
                    raise MeasurementError(command, "what is awaited in metrics.jsonl", f"{got}\n{_log_end(log)}")
                time.sleep(POLL_S)
            reached_s = time.perf_counter() - begun
            if not stop and process.wait(TIMEOUT_S) != 0:
                raise MeasurementError(command, "exit code 0", f"{process.returncode}\n{_log_end(log)}")
            return reached_s, time.perf_counter() - begun
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(command, "a process that ends", str(error)) from error
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def last_line(metrics: Path) -> dict[str, Any]:
    """The newest finished line of a metrics.jsonl; empty when there is none yet."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            finished = file.read().rpartition(b"\n")[0].splitlines()
        return json.loads(finished[-1]) if finished else {}
    except FileNotFoundError:
        return {}


def _end_of(text: str) -> str:
    return text[-1500:].rstrip()


def _log_end(log: Path) -> str:
    return _end_of(log.read_text(encoding="utf-8", errors="replace"))
