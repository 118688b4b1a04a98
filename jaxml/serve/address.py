"""The address of a server: what may be served on, whether the port is free, and who answers there.

Reads `errors`; `lifecycle` and `launch` read it.
"""

from __future__ import annotations

import http.client
import socket

from jaxml.errors import JaxmlError


class ServeError(JaxmlError):
    """The server cannot start, or could not go on."""


def check_address(host: str, port: int, *, allow_remote: bool, has_keys: bool = False) -> None:
    """Raises ServeError for an address that cannot be served on, before anything is loaded."""
    if host not in ("127.0.0.1", "0.0.0.0", "::"):
        raise ServeError("host", expected="127.0.0.1, or 0.0.0.0 or :: for all interfaces", got=host, todo="change it")
    if host != "127.0.0.1" and not (has_keys or allow_remote):
        raise ServeError(
            "host",
            expected="127.0.0.1: there are no keys, whoever reaches the port can use the model",
            got=host,
            todo="pass --keys FILE (see `jaxml keys`), or --allow-remote if everybody may use it",
        )
    _check_port(host, port)


def check_operations(host: str, port: int, *, allow_remote: bool) -> None:
    """The same for the address of the operations bind, which has no keys."""
    if host != "127.0.0.1" and not allow_remote:
        raise ServeError(
            "operations.host",
            expected="127.0.0.1: there are no keys on it",
            got=host,
            todo="pass --allow-remote if everybody may see what the service does",
        )
    _check_port(host, port)


def _check_port(host: str, port: int) -> None:
    if not 1024 <= port <= 65535:
        raise ServeError("port", expected="a number from 1024 to 65535", got=str(port), todo="choose another one")
    if not is_free((host, port)):
        raise port_in_use((host, port))


def listen(address: tuple[str, int]) -> socket.socket:
    """A socket that listens there. Raises ServeError when somebody else does."""
    listening = socket.socket(_family(address[0]), socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise port_in_use(address) from error
    return listening


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def port_in_use(address: tuple[str, int]) -> ServeError:
    """The error that names a port on which someone else listens."""
    todo = "stop the other server, or pass another --port"
    return ServeError(f"port {address[1]}", expected=f"free on {address[0]}", got="it is in use", todo=todo)


def url(address: tuple[str, int]) -> str:
    """Where a client on this machine finds the server."""
    return f"http://{_local(address[0])}:{address[1]}"


def _local(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def is_free(address: tuple[str, int]) -> bool:
    """Whether one could listen there now."""
    try:
        listen(address).close()
    except ServeError:
        return False
    return True


def ask_readiness(address: tuple[str, int], key: str = "") -> int | None:
    """The status that /health/ready answers with (0: something that is not HTTP), or None when nobody answers.

    key: by which the server knows who asks.
    """
    client = http.client.HTTPConnection(_local(address[0]).strip("[]"), address[1], timeout=2)
    try:
        client.request("GET", "/health/ready", headers={"Authorization": f"Bearer {key}"})
        return client.getresponse().status
    except OSError:
        return None
    except http.client.HTTPException:
        return 0
    finally:
        client.close()
