"""A server listens where it may, on a port that is free, and knows its own answers from another's."""

from __future__ import annotations

import socket
import threading

import pytest

from jaxml.serve.address import ServeError, ask_readiness, check_address, is_free, url
from tests.serve.servers import free_port


@pytest.mark.parametrize(
    ("host", "port", "allow_remote", "fault"),
    [
        ("0.0.0.0", 8000, False, "host"),
        ("::", 8000, False, "host"),
        ("10.0.0.1", 8000, True, "host"),
        ("example.org", 8000, False, "host"),
        ("127.0.0.1", 80, False, "port"),
        ("127.0.0.1", 0, False, "port"),
        ("127.0.0.1", 65536, False, "port"),
    ],
)
def test_addresses_that_cannot_be_served_on_are_refused(host: str, port: int, allow_remote: bool, fault: str) -> None:
    with pytest.raises(ServeError) as refused:
        check_address(host, port, allow_remote=allow_remote)
    assert refused.value.faults[0].failed == fault
    if host == "0.0.0.0":
        assert "--allow-remote" in refused.value.faults[0].todo
        check_address(host, free_port(), allow_remote=True)


def test_a_port_on_which_someone_listens_is_not_free_and_one_that_was_just_closed_is() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = other.getsockname()
        assert not is_free(address)
        with pytest.raises(ServeError, match=f"port {address[1]}"):
            check_address(*address, allow_remote=False)
    assert is_free(address)


def test_who_does_not_speak_http_is_still_someone() -> None:
    assert ask_readiness(("127.0.0.1", free_port())) is None
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(5)

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask_readiness(other.getsockname()) == 0
        thread.join()


def test_the_url_is_one_that_works_on_this_machine() -> None:
    assert [url((host, 8000)) for host in ("127.0.0.1", "0.0.0.0", "::")] == [
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000",
        "http://[::1]:8000",
    ]
