"""The address of a server: what may be served on, whether the port is free, and who answers there.

Reads `errors`; `lifecycle` and `launch` read it.
"""

from __future__ import annotations

import http.client
import socket

from jaxml.errors import JaxmlError


class ServeError(JaxmlError):
    """The server cannot start, or could not go on."""


def check_address(host: str, port: int, *, allow_remote: bool) -> None:
    """Raises ServeError for an address that cannot be served on, before anything is loaded."""
    if host not in ("127.0.0.1", "0.0.0.0", "::"):
        raise ServeError("host", expected="127.0.0.1, or 0.0.0.0 or :: for all interfaces", got=host, todo="change it")
    if host != "127.0.0.1" and not allow_remote:
        raise ServeError(
            "host",
            expected="127.0.0.1: there is no authentication, whoever reaches the port can use the model",
            got=host,
            todo="pass --allow-remote if that is what you want",
        )
    if not 1024 <= port <= 65535:
        raise ServeError("port", expected="a number from 1024 to 65535", got=str(port), todo="choose another one")
    if not is_free((host, port)):
        raise port_in_use((host, port))


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
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
            trial.listen()
        except OSError:
            return False
    return True


def ask_readiness(address: tuple[str, int]) -> int | None:
    """The status that /health/ready answers with (0: something that is not HTTP), or None when nobody answers."""
    client = http.client.HTTPConnection(_local(address[0]).strip("[]"), address[1], timeout=2)
    try:
        client.request("GET", "/health/ready")
        return client.getresponse().status
    except OSError:
        return None
    except http.client.HTTPException:
        return 0
    finally:
        client.close()
