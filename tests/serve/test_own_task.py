"""The script of docs/howto/own_task_behind_litserve.md, as it stands there: a researcher's own task behind LitServe."""

from __future__ import annotations

import concurrent.futures
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.servers import ROOT, Server, cpu_s, free_port, running

PAGE = ROOT / "docs" / "howto" / "own_task_behind_litserve.md"


@pytest.fixture(scope="module")
def script() -> str:
    found = re.search(r"cat > line\.py <<'EOF'\n(.*?)\nEOF\n", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def server(script: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory, port = tmp_path_factory.mktemp("own"), free_port()
    file = directory / "line.py"
    file.write_text(script.replace("8765", str(port)))
    with running([str(file)], port, directory / "log") as server:
        yield server


def test_the_script_is_short(script: str) -> None:
    assert len([line for line in script.splitlines() if line.strip()]) < 30


def test_each_request_gets_its_own_line_however_many_come_at_once(server: Server) -> None:
    def ask(slope: int) -> dict[str, float]:
        status, answer = server.post("/v1/line", {"points": [[0, 1], [1, 1 + slope], [2, 1 + 2 * slope]]})
        assert status == 200
        return answer

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for slope, answer in enumerate(pool.map(ask, range(24))):
            assert answer == {"slope": pytest.approx(slope, abs=1e-4), "intercept": pytest.approx(1, abs=1e-4)}


def test_what_is_wrong_is_told_to_its_sender_alone(server: Server) -> None:
    status, answer = server.post("/v1/line", {"points": [[1, 2]]})
    assert status == 400 and "2 to 64 pairs" in answer["error"]["message"]
    status, answer = server.post("/v1/line", {"secret": 1})
    assert status == 500 and "KeyError" in answer["error"]["message"]
    assert server.post("/v1/line", b"{")[0] == 400
    assert server.request("GET", "/v1/line")[0] == 405
    assert server.request("GET", "/predict")[0] == 404
    assert server.post("/v1/line", {"points": [[0, 0], [1, 1]]})[0] == 200
    assert "secret" not in server.said()


def test_the_worker_waits_without_polling(server: Server) -> None:
    pid = server.worker_pid()
    before, begun = cpu_s(pid), time.monotonic()
    time.sleep(2.5)
    assert (cpu_s(pid) - before) / (time.monotonic() - begun) < 0.01


def test_sigterm_ends_it_with_code_0(server: Server) -> None:
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    assert time.monotonic() - begun < 5
    assert "SIGTERM: stopping" in server.said() and "exit" not in server.said()


def test_a_setup_that_fails_ends_the_server_with_its_traceback(tmp_path: Path) -> None:
    file, port = tmp_path / "failing.py", free_port()
    file.write_text(
        "import jaxml.serve\nfrom litserve import LitAPI\n\nclass Failing(LitAPI):\n"
        "    def setup(self, device):\n        raise OSError('no such weights')\n\n"
        f"if __name__ == '__main__':\n    jaxml.serve.app(Failing()).run(port={port})\n"
    )
    with running([str(file)], port, tmp_path / "log", is_ready=False) as server:
        assert server.wait_end(20) == 1
        assert "no such weights" in server.said() and "the worker process" in server.said()
