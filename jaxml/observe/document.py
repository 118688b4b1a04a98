"""One self-contained HTML file: nothing is loaded from elsewhere, and no script can run.

Reads no other jaxml file; `observe.report` and `prove.page` fill it.
"""

from __future__ import annotations

import re
from html import escape


def document(title: str, style: str, body: str) -> str:
    """The file's text. `title` is text, for the window and the first heading; `style` is CSS and `body` is HTML.

    >>> "<h1>a &lt; b</h1>" in document("a < b", "", "<p>body</p>")
    True
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{text_of(title)}</title>
<style>{style}</style>
</head>
<body>
<h1>{text_of(title)}</h1>
{body}
</body>
</html>
"""


def text_of(value: object) -> str:
    """HTML text: escaped, and free of what HTML or UTF-8 cannot hold (control characters, surrogates)."""
    return escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", str(value)))
