"""`jaxml score CKPT --text TEXT`: the log-probability of every token of a text. Reads `infer.scoring`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser

DESCRIPTION = """The log-probability (nats) that a language model gives to each token of a text, given those before it.

The first token has one only where the tokenizer has a token that begins a text. A text that is longer than the context is
refused; `jaxml eval CKPT --text FILE` takes any length."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, open, score; returns tokens, their texts and log-probabilities, the sum and the mean."""
    options = parser("score", DESCRIPTION)
    options.add_argument("path", metavar="CKPT", help="run directory, checkpoints folder or step folder")
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="the text to score")
    what.add_argument("--file", help="a UTF-8 file that holds it")
    given = options.parse_args(arguments)
    text = given.text if given.file is None else read_text(given.file)
    from jaxml.devices.start import use_compilation_cache
    from jaxml.infer.opening import open_checkpoint
    from jaxml.infer.scoring import score_text

    use_compilation_cache(cache_directory())
    scored = score_text(open_checkpoint(given.path), text)
    result = {
        "tokens": list(scored.tokens),
        "pieces": list(scored.pieces),
        "logprobs": list(scored.logprobs),
        "sum": scored.sum,
        "mean": scored.mean,
    }
    lines = [
        f"{'':>10}  {piece!r}" if logprob is None else f"{logprob:10.4f}  {piece!r}"
        for piece, logprob in zip(scored.pieces, scored.logprobs, strict=True)
    ]
    return {"text": "\n".join([*lines, f"sum {scored.sum:.4f}, mean {scored.mean:.4f}"]), **result}, 0


def read_text(path: str) -> str:
    """The text in a file. Raises DataError when it is not UTF-8."""
    from jaxml.errors import DataError

    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(path, expected="UTF-8 text", got=str(error), todo="convert the file to UTF-8") from error
