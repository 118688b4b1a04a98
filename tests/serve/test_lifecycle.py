"""However a server ends, it says why, leaves no process, and no request waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import jax
import pytest

from jaxml.serve import launch, lifecycle
from jaxml.serve.address import ServeError
from jaxml.serve.lifecycle import MAX_RESTARTS
from tests.serve.servers import ROOT, free_port, jaxml_serve, running, small_server, wait_until
from tests.serve.small_engine import STUCK

COMPLETIONS = "/v1/completions"
FOREVER = {"prompt": "x", "max_tokens": 50_000, "stream": True}


def read_to_end(connection: socket.socket) -> bytes:
    connection.settimeout(10)
    content = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            content += piece
    return content


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """What comes until the mark is there: a server that goes on does not close the connection at once."""
    connection.settimeout(10)
    content = b""
    while mark not in content:
        piece = connection.recv(65536)
        assert piece, content
        content += piece
    return content


def test_under_load_running_requests_finish_and_new_ones_are_refused(tmp_path: Path) -> None:
    with small_server(tmp_path, max_batch=2, step_s=2e-3) as server:
        connections = [server.open_request(COMPLETIONS, FOREVER | {"max_tokens": 600}) for _ in range(3)]
        server.settled(running=2, queued=1)
        os.killpg(server.process.pid, signal.SIGTERM)  # An init system may send it to every process.
        wait_until(lambda: server.request("GET", "/health/ready")[0] == 503, what="readiness flips")
        assert server.request("GET", "/health/ready")[1]["status"] == "draining"
        assert server.request("GET", "/health/live")[0] == 200
        status, answer, headers = server.request("POST", COMPLETIONS, FOREVER)
        assert status == 503 and "draining" in answer["error"]["message"] and "retry-after" in headers
        for connection in connections:
            content = read_to_end(connection)
            assert content.count(b'"finish_reason": "length"') == 1 and b"[DONE]" in content
        assert server.wait_end() == 0
        assert "3 requests have 10 s to finish" in server.said()


def test_what_does_not_finish_in_time_ends_with_an_error_event(tmp_path: Path) -> None:
    with small_server(tmp_path, drain_s=0.3) as server:
        connection = server.open_request(COMPLETIONS, FOREVER)
        server.settled(running=1)
        server.process.send_signal(signal.SIGTERM)
        content = read_to_end(connection)
        assert b'"finish_reason": "error"' in content and content.rstrip().endswith(b"0") and b"[DONE]" in content
        assert server.wait_end() == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with small_server(tmp_path, drain_s=60) as server:
        server.open_request(COMPLETIONS, FOREVER)
        server.settled(running=1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "SIGTERM: 1 requests" in server.said())
        begun = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.wait_end() == 128 + signal.SIGINT
        assert time.monotonic() - begun < 3


def test_while_it_starts_it_lives_and_is_not_ready_and_a_signal_to_all_ends_it(tmp_path: Path) -> None:
    with small_server(tmp_path, is_ready=False, open_s=60.0) as server:

        def is_live() -> bool:
            with contextlib.suppress(OSError):
                return server.request("GET", "/health/live")[0] == 200
            return False

        wait_until(is_live)
        assert server.request("GET", "/health/ready")[:2] == (503, {"status": "starting"})
        status, answer, headers = server.request("POST", COMPLETIONS, {"prompt": "x"})
        assert status == 503 and "starting" in answer["error"]["message"] and "retry-after" in headers
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.wait_end() == 0
        assert "Traceback" not in server.said()


@pytest.mark.parametrize("how", ["worker killed", "not in time"])
def test_an_answer_in_one_pass_that_will_not_come_is_a_503(tmp_path: Path, how: str) -> None:
    port = free_port()
    command = [str(ROOT / "tests" / "serve" / "serve_slow.py"), str(port), "0.3"]
    with running(command, port, tmp_path / "log") as server:
        assert server.post("/predict", {"seconds": 0}) == (200, {"seconds": 0})
        waiting = server.open_request("/predict", {"seconds": 60})
        time.sleep(0.2)
        if how == "worker killed":
            os.kill(server.worker_pid(), signal.SIGKILL)
        else:
            server.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        assert b"503 Service Unavailable" in read_to_end(waiting)
        assert server.wait_end() == (1 if how == "worker killed" else 0)
        assert time.monotonic() - begun < 5


def test_a_worker_that_is_killed_under_load_is_replaced_a_few_times_and_clients_are_told(tmp_path: Path) -> None:
    with small_server(tmp_path) as server:
        api_pid = server.api_pid()
        for kill in range(1, MAX_RESTARTS + 2):
            stream = server.open_request(COMPLETIONS, FOREVER)
            whole = server.open_request(COMPLETIONS, FOREVER | {"stream": False})
            server.settled(status="ready", running=2)
            os.kill(server.worker_pid(), signal.SIGKILL)
            assert b'"finish_reason": "error"' in read_until(stream, b"[DONE]")
            read_until(whole, b"503 Service Unavailable")
            if kill > MAX_RESTARTS:
                break
            status, answer, headers = server.request("POST", COMPLETIONS, FOREVER)
            assert status == 503 and "retry-after" in headers, answer
            wait_until(lambda: server.stats()["status"] == "restarting")
            assert server.request("GET", "/health/live")[0] == 200
            wait_until(lambda: server.request("GET", "/health/ready")[0] == 200, what="ready again")
            assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})[0] == 200
            assert server.api_pid() == api_pid
        assert server.wait_end() == 1
        said = server.said()
        assert said.count("ready again") == MAX_RESTARTS and "(3 of 3)" in said
        assert "the worker process" in said and "killed by SIGKILL" in said and "Traceback" not in said
        assert server.leftovers() == []


def test_a_worker_whose_engine_is_stuck_ends_itself_and_a_signal_during_its_restart_ends_the_server(
    tmp_path: Path,
) -> None:
    with small_server(tmp_path) as server:
        neighbour = server.open_request(COMPLETIONS, FOREVER)
        server.settled(running=1)
        status, answer = server.post(COMPLETIONS, {"prompt": chr(STUCK), "max_tokens": 2})
        assert (status, answer["error"]["code"]) == (500, "stuck")
        assert b'"finish_reason": "error"' in read_until(neighbour, b"[DONE]")
        wait_until(lambda: "ready again" in server.said())
        assert "a step of the engine: one that does not come back" in server.said()
        os.kill(server.worker_pid(), signal.SIGKILL)
        wait_until(lambda: "(2 of 3)" in server.said())
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.wait_end() == 0
        assert server.said().count("ready again") == 1 and "Traceback" not in server.said()


def test_one_of_several_models_that_cannot_be_opened_names_itself(tmp_path: Path) -> None:
    with small_server(tmp_path, is_ready=False, names=("a", "b"), fault="damage") as server:
        assert server.wait_end() == 1
        assert "model a: the checkpoint" in server.said() and "damage" in server.said()
        assert "new worker" not in server.said(), "one that never served is not started again"


def test_when_the_api_server_is_killed_the_server_ends_saying_so(tmp_path: Path) -> None:
    with small_server(tmp_path) as server:
        os.kill(server.api_pid(), signal.SIGKILL)
        assert server.wait_end() == 1
        assert "the API server process" in server.said()


def test_when_the_main_process_is_killed_the_others_leave_by_themselves(tmp_path: Path) -> None:
    with small_server(tmp_path) as server:
        server.open_request(COMPLETIONS, FOREVER)
        server.settled(running=1)
        assert len(server.pids()) >= 4
        os.kill(server.process.pid, signal.SIGKILL)
        assert server.wait_end() == -signal.SIGKILL
        # multiprocessing's own directory (pymp-) stays, with the socket of LitServe's manager.
        ours = lambda: [name for name in server.leftovers() if name.startswith("jaxml")]  # noqa: E731
        wait_until(lambda: ours() == [], what="the worker removes the directory")


def test_two_servers_on_one_port_the_second_is_refused_before_it_loads(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(jaxml_serve(str(tmp_path), "--port", str(port)), port, tmp_path / "log", is_ready=False) as server:
            assert server.wait_end() == 1
            assert f"port {port}" in server.said() and "in use" in server.said()
            assert "checkpoint" not in server.said(), "the port is looked at first"


def test_of_two_servers_that_start_at_the_same_time_on_one_port_one_serves(tmp_path: Path) -> None:
    """Both may find the port free; the one that then cannot listen must not take the other's answers for its own."""
    port = free_port()
    command = [str(ROOT / "tests" / "serve" / "serve_small.py"), str(port), "{}", "1", "{}", "small"]
    with (
        running(command, port, tmp_path / "a", is_ready=False) as first,
        running(command, port, tmp_path / "b", is_ready=False) as second,
    ):
        loser = wait_until(lambda: next((one for one in (first, second) if one.process.poll() is not None), None))
        assert loser.wait_end() == 1
        assert f"port {port}" in loser.said() and "in use" in loser.said() and "ready" not in loser.said()
        winner = second if loser is first else first
        winner.wait_ready()
        assert winner.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})[0] == 200


def test_a_worker_that_is_killed_while_it_starts_is_noticed(tmp_path: Path) -> None:
    with small_server(tmp_path, is_ready=False) as server:
        worker = wait_until(lambda: [pid for pid, command in server.pids().items() if "spawn_main" in command])[0]
        os.kill(worker, signal.SIGKILL)
        assert server.wait_end() == 1
        assert "the worker process" in server.said()


def test_a_directory_that_is_no_checkpoint_is_an_error_in_four_parts_said_once(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("else")
    port = free_port()
    with running(jaxml_serve(str(tmp_path), "--port", str(port)), port, tmp_path / "log", is_ready=False) as server:
        assert server.wait_end() == 1
        assert server.said().count("expected:") == server.said().count("to do:") == 1


def test_a_process_in_which_jax_has_computed_does_not_fork() -> None:
    jax.devices()
    with pytest.raises(ServeError, match="a backend that was initialised"):
        launch.engine_app({}).run(port=free_port())


def test_it_is_served_from_the_main_thread_only() -> None:
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            lifecycle.run(
                lambda private: None,  # type: ignore[arg-type, return-value]
                lambda lit_api: None,  # type: ignore[arg-type, return-value]
                address=("127.0.0.1", free_port()),
                drain_s=1,
                say=print,
            )
        except ServeError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
