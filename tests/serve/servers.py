"""Servers as processes, for tests: started on a free port, watched from outside, and always ended, also by a failed test."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "tests-serve"  # compiled programs, for the next run of the suite
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def wait_until(holds: Callable[[], Any], timeout_s: float = 10.0, what: str = "") -> Any:
    """What `holds` returns once that is true. Raises AssertionError after the time."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or holds}"
        time.sleep(0.01)
    return value


class Server:
    """A server in a session of its own, so that every process it started can be found."""

    def __init__(self, command: list[str], port: int, log: Path):
        self.port, self.log = port, log
        self.key = ""  # sent with every request
        self._connections: list[socket.socket] = []
        # Its own, so that what it leaves is seen; short, because a socket goes there.
        self.temporary = Path(tempfile.mkdtemp(prefix="jx-"))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        environment["TMPDIR"] = str(self.temporary)
        environment["JAXML_CACHE"] = str(CACHE)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                cwd=ROOT,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        return self.log.read_text()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.said()
            return f"ready: {self.url}" in self.said()

        wait_until(is_ready, timeout_s, "ready line")

    def wait_end(self, timeout_s: float = 15.0) -> int:
        """The exit code. Whatever the server started is gone by then, unless the main process was killed."""
        code = self.process.wait(timeout_s)
        if code == -signal.SIGKILL:
            wait_until(lambda: not self.pids(), 5.0, "processes left")
        assert self.pids() == {}
        return code

    def pids(self) -> dict[int, str]:
        """Every process of the server's session that is alive, with its command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    found[pid] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def worker_pid(self) -> int:
        """The process with the engine: the one that was spawned."""
        (pid,) = [pid for pid, command in self.pids().items() if "multiprocessing.spawn" in command]
        return pid

    def api_pid(self) -> int:
        """The process that listens: of the two forks (LitServe's manager is the first) the later one."""
        forks = [
            pid for pid, command in self.pids().items() if "multiprocessing" not in command and pid != self.process.pid
        ]
        return max(forks)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout_s: float = 30.0,
        headers: dict[str, str] | None = None,
        port: int | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON or bytes, headers with names in lower case)."""
        client = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=timeout_s)
        sent = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            client.request(method, path, content, {**sent, **(headers or {})})
            answer = client.getresponse()
            read = answer.read()
            got = {name.lower(): value for name, value in answer.getheaders()}
            is_json = got.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(read) if is_json and read else read, got
        finally:
            client.close()

    def post(self, path: str, body: Any, timeout_s: float = 30.0) -> tuple[int, Any]:
        return self.request("POST", path, body, timeout_s)[:2]

    def leftovers(self) -> list[str]:
        """What it has left where temporary files go."""
        return [entry.name for entry in self.temporary.iterdir()]

    def stats(self) -> dict[str, Any]:
        """What /health/ready says."""
        return self.request("GET", "/health/ready")[1]

    def settled(self, **counts: int) -> dict[str, Any]:
        """The stats, once they are as expected."""
        return wait_until(
            lambda: stats if all((stats := self.stats()).get(k) == v for k, v in counts.items()) else None,
            what=f"{counts}, now {self.stats()}",
        )

    def open_request(self, path: str, body: Any) -> socket.socket:
        """A connection on which a request was sent and nothing read: closing it is how a client leaves (at the latest the
        end of the server closes it)."""
        content = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        )
        head += f"Authorization: Bearer {self.key}\r\n\r\n"
        connection.sendall(head.encode() + content)
        self._connections.append(connection)
        return connection

    def kill(self) -> None:
        """Whatever is left of it."""
        for pid in {*self.pids(), self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path, is_ready: bool = True) -> Iterator[Server]:
    """A server that is killed on the way out, whatever happened."""
    server = Server(command, port, log)
    try:
        if is_ready:
            server.wait_ready()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def small_server(
    directory: Path,
    drain_s: float = 10.0,
    is_ready: bool = True,
    access: dict[str, Any] | None = None,
    names: Sequence[str] = ("small",),
    **options: Any,
) -> Iterator[Server]:
    """A server with a small engine for each of the names, whose options these are. access: fields of `launch.Access`."""
    port = free_port()
    command = [str(ROOT / "tests" / "serve" / "serve_small.py"), str(port), json.dumps(options), str(drain_s)]
    command += [json.dumps(access or {}), *names]
    with running(command, port, directory / "small.log", is_ready) as server:
        yield server


def jaxml_serve(*arguments: str) -> list[str]:
    """The command line of `jaxml serve`."""
    return ["-c", "import sys; from jaxml.cli.main import main; sys.exit(main(sys.argv[1:]))", "serve", *arguments]
