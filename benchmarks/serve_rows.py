"""Measures the rows of `benchmarks/run.py serve`: loads over HTTP, and how soon a server is ready.

Reads `http_load`, `interleave`, `plan`, `processes`; what the rows must reach and how the page tells it stands in `verbs`.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.http_load import HOST, AnswerError, Load, load
from benchmarks.interleave import Row, take_turns
from benchmarks.plan import ASSETS, HERE, JAXML, Plan, told
from benchmarks.processes import POLL_S, ROOT, TIMEOUT_S, MeasurementError, environment, run_json

PATH, NAME = "/v1/completions", "stories260k"
BODY = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 64, "temperature": 0.0}
STREAMS = (1, 4, 8)
LOAD_S, WARM_UP_S, QUICK_S = 5.0, 1.0, 0.5
START_REPEATS = 3
STOP_S = 15.0
QUANTILES = {"p50": 0.5, "p95": 0.95}


@dataclass(frozen=True)
class Kind:
    """A server and the answers that are asked of it. `ready`: the path that gives 200 once it can answer."""

    server: str
    is_streamed: bool
    command: tuple[str, ...]
    ready: str


def loads(plan: Plan) -> list[Row]:
    """1, 4 and 8 clients, answers streamed and whole, on a server that every turn starts anew."""
    if (checkpoint := _stories(plan)) is None:
        return []
    cache = plan.directory("cache")
    # LitServe's loop of each kind is a server of its own, ours one server for both; it too is started for each kind.
    kinds = {
        f"{server}{'' if is_streamed else ', whole'}": Kind(server, is_streamed, command(checkpoint, cache), ready)
        for is_streamed in (True, False)
        for server, command, ready in (
            ("jaxml serve", _jaxml, "/health/ready"),
            ("LitServe loop", _streamed_loop if is_streamed else _whole_loop, "/health"),
        )
    }
    telling = {name: told(name, lambda kind=kind: _sample(plan, kind, cache)) for name, kind in kinds.items()}
    return load_rows(take_turns(telling, plan.repeats, warm_ups=0))


def start(plan: Plan) -> list[Row]:
    """From starting the process to its readiness, with an empty and with a filled compilation cache."""
    if (checkpoint := _stories(plan)) is None:
        return []
    warm = plan.directory("cache")

    def ready_s(command: Callable[[Path, Path], tuple[str, ...]], path: str, cache: Path) -> float:
        with _running(plan, command(checkpoint, cache), path, cache) as (_, seconds):
            return seconds

    rivals = {
        "jaxml serve ready, cold": lambda: ready_s(_jaxml, "/health/ready", plan.directory("cache")),
        "jaxml serve ready, warm": lambda: ready_s(_jaxml, "/health/ready", warm),
        "LitServe loop ready, warm": lambda: ready_s(_streamed_loop, "/health", warm),
    }
    if not plan.is_quick:
        for name in list(rivals)[1:]:
            rivals[name]()  # fills the cache
    telling = {name: told(name, run) for name, run in rivals.items()}
    samples = take_turns(telling, 1 if plan.is_quick else START_REPEATS, warm_ups=0)
    return [Row(name, "s", tuple(seconds)) for name, seconds in samples.items()]


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {"load": loads, "start": start}


def load_rows(samples: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Rows by number of clients: of each server its rates and times (those that its samples have), then our share of the
    plain loop's tokens. A p95 stands for its worst repeat, as does the client's share of a core."""
    rows = []
    for streams in STREAMS:
        case = f"{streams} stream{'s' if streams > 1 else ''}"
        for server, found in samples.items():
            for what, unit in (("requests", "requests/s"), ("tokens", "tokens/s"), *_times()):
                key = f"{what}, {streams}"
                if key in found[0]:
                    values = tuple(sample[key] for sample in found)
                    rows.append(Row(f"{_named(server, what)}, {case}", unit, values, is_bound="p95" in what))
        for kind in ("", ", whole"):
            ours, theirs = (samples[f"{server}{kind}"] for server in ("jaxml serve", "LitServe loop"))
            key = f"tokens, {streams}"
            ratios = tuple(mine[key] / plain[key] for mine, plain in zip(ours, theirs, strict=True))
            rows.append(Row(f"jaxml serve / LitServe loop tokens{kind}, {case}", "ratio", ratios))
    turns = zip(*samples.values(), strict=True)
    clients = tuple(max(sample[f"client, {streams}"] for sample in turn for streams in STREAMS) for turn in turns)
    return [*rows, Row("the client's share of a core", "ratio", clients, is_bound=True)]


def told_by(measured: Load, streams: int, is_streamed: bool) -> dict[str, float]:
    """The numbers of one load, by what they are and how many clients it had; times per token of streams alone."""
    numbers = {"requests": measured.requests_per_s, "tokens": measured.tokens_per_s, "client": measured.client_share}
    if is_streamed:
        for name, share in QUANTILES.items():
            numbers |= {f"TTFT {name}": measured.ttft_ms(share), f"TPOT {name}": measured.tpot_ms(share)}
    return {f"{what}, {streams}": value for what, value in numbers.items()}


def _times() -> list[tuple[str, str]]:
    return [(f"{what} {name}", "ms") for what in ("TTFT", "TPOT") for name in QUANTILES]


def _named(server: str, what: str) -> str:
    """`LitServe loop, whole` and `tokens` to `LitServe loop tokens, whole`."""
    name, comma, kind = server.partition(",")
    return f"{name} {what}{comma}{kind}"


def _stories(plan: Plan) -> Path | None:
    """The checkpoint of the trained model, imported once; None, and noted, where the assets are not."""
    place = ASSETS / "stories260k-hf"
    if not place.is_dir():
        plan.skipped["all rows of `serve`"] = "no trained model (assets/stories260k-hf)"
        return None
    checkpoint = plan.workspace / "stories-checkpoint"
    if not checkpoint.exists():
        run_json([*JAXML, "import", str(place), "--out", str(checkpoint), "--json"], environment())
    plan.versions["litserve"] = version("litserve")
    return checkpoint


def _jaxml(checkpoint: Path, cache: Path) -> tuple[str, ...]:
    """The cache is the environment's (JAXML_CACHE)."""
    return (*JAXML, "serve", str(checkpoint), "--name", NAME)


def _streamed_loop(checkpoint: Path, cache: Path) -> tuple[str, ...]:
    return (*_whole_loop(checkpoint, cache), "--stream")


def _whole_loop(checkpoint: Path, cache: Path) -> tuple[str, ...]:
    return (sys.executable, str(HERE / "litserve_plain.py"), str(checkpoint), "--cache", str(cache))


def _sample(plan: Plan, kind: Kind, cache: Path) -> dict[str, float]:
    """Start the server, warm it up, load it with each number of clients, stop it."""
    body: dict[str, Any] = BODY | {"stream": kind.is_streamed}
    numbers: dict[str, float] = {}
    with _running(plan, kind.command, kind.ready, cache) as (port, _):
        try:
            for streams in STREAMS:
                load(port, PATH, body, streams=streams, seconds=QUICK_S if plan.is_quick else WARM_UP_S)
                measured = load(port, PATH, body, streams=streams, seconds=QUICK_S if plan.is_quick else LOAD_S)
                numbers |= told_by(measured, streams, kind.is_streamed)
        except (AnswerError, OSError, TimeoutError) as error:
            raise MeasurementError(
                kind.command, "answers with 64 tokens", str(error) or type(error).__name__
            ) from error
    return numbers


@contextlib.contextmanager
def _running(plan: Plan, command: Sequence[str], ready: str, cache: Path) -> Generator[tuple[int, float]]:
    """(port, seconds from its start to its readiness) of a server, which is stopped in the end with all its processes.

    Raises MeasurementError with the end of its log when it is not ready or ends.
    """
    port, log = _free_port(), plan.workspace / "server.log"
    command = [*command, "--port", str(port)]
    with log.open("wb") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment(cache), cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        while not _is_ready(port, ready):
            if process.poll() is not None or time.perf_counter() - begun > TIMEOUT_S:
                end = log.read_text(errors="replace")[-1500:].rstrip()
                raise MeasurementError(command, f"200 from {ready}", f"exit code {process.poll()}\n{end}")
            time.sleep(POLL_S)
        yield port, time.perf_counter() - begun
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server; then SIGKILL to what is left of its session (LitServe leaves its children running)."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_ready(port: int, path: str) -> bool:
    client = http.client.HTTPConnection(HOST, port, timeout=5.0)
    try:
        client.request("GET", path)
        return client.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        client.close()


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind((HOST, 0))
        return trial.getsockname()[1]
