"""The page at `/`: a playground and a live dashboard, as one HTML document without outside resources.

Reads the files in `serve/page_files` and no other jaxml file; `serve.gate` sends it. The script asks `/v1/models`, `/stats`, the
paths of completions, with the key that its user typed, which it keeps in memory alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

CONTENT_TYPE = "text/html; charset=utf-8"


@functools.cache
def page() -> bytes:
    """The document, with its style and script inside."""
    return _file("page.html").replace("/*style*/", _file("page.css")).replace("/*script*/", _file("page.js")).encode()


@functools.cache
def headers() -> dict[str, str]:
    """What to send with it: nothing but this script and this style runs, and they talk to this server alone."""
    policy = (
        f"default-src 'none'; script-src {_digest('page.js')}; style-src {_digest('page.css')}; img-src data:; "
        f"connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _file(name: str) -> str:
    return resources.files("jaxml.serve").joinpath("page_files", name).read_text("utf-8")


def _digest(name: str) -> str:
    """A source of the policy: the digest of what stands inside the element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(_file(name).encode()).digest()).decode()}'"
