"""`jaxml replay RECEIPT CKPT`: generate an answer again and compare. Reads `infer.receipt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.errors import RequestError

DESCRIPTION = """Compute the answer of a receipt again, bit for bit, with the checkpoint that gave it.

RECEIPT is a JSON file with the `receipt` of an answer, or with the whole answer. A server in the invariant mode gives one to
a request with `"receipt": true`. Exit code 1 when the tokens differ."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, compute again, and say whether the tokens are the same."""
    options = parser("replay", DESCRIPTION)
    options.add_argument("receipt", metavar="RECEIPT")
    options.add_argument("checkpoint", metavar="CKPT")
    given = options.parse_args(arguments)
    receipt = _read(Path(given.receipt))
    from jaxml.devices.start import use_compilation_cache
    from jaxml.infer.language_model import LanguageModel
    from jaxml.infer.receipt import replay

    use_compilation_cache(cache_directory())
    tokens, events = replay(LanguageModel.open(given.checkpoint), receipt)
    before = receipt["tokens"]
    parted = next((place for place, pair in enumerate(zip(before, tokens, strict=False)) if pair[0] != pair[1]), None)
    if parted is None and len(before) != len(tokens):
        parted = min(len(before), len(tokens))
    text = "".join(event.text for event in events)
    told = f"the same {len(tokens)} tokens" if parted is None else f"other tokens from place {parted} on"
    return {"text": f"{told}\n{text}", "same": parted is None, "tokens": tokens, "parted_at": parted}, int(
        parted is not None
    )


def _read(path: Path) -> dict[str, Any]:
    """The receipt in a file: the object itself, or the field of an answer or of its only choice."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            str(path), expected="a JSON file", got=f"{type(error).__name__}", todo="pass the file with the receipt"
        ) from error
    choices = value.get("choices") if isinstance(value, dict) else None
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
        value = choices[0] if "receipt" in choices[0] else value
    receipt = value.get("receipt", value) if isinstance(value, dict) else None
    if not isinstance(receipt, dict):
        raise RequestError(str(path), expected="a receipt", got="another value", todo="ask with receipt: true")
    return receipt
