"""The LitServe endpoint: HTTP in front, the engine behind a unix socket.

`jaxml.serve.app` and `jaxml.serve.serve` are those of `serve.launch`, imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxml.serve.launch import app as app
    from jaxml.serve.launch import serve as serve


def __getattr__(name: str) -> Any:
    if name in ("app", "serve"):
        from jaxml.serve import launch

        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
