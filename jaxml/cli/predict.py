"""`jaxml predict CKPT TEXT... | FILE.jsonl`: the labels of texts. Reads `infer.predict`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.errors import DataError

DESCRIPTION = """Label texts with the classifier at CKPT (a run directory, its checkpoints folder, or one step's folder).

TEXT is a text, or the name of a file that ends in .jsonl: a JSON string or an object with a field `text` on each line.
"""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, predict, and return one result a text, in their order."""
    options = parser("predict", DESCRIPTION)
    options.add_argument("checkpoint", metavar="CKPT")
    options.add_argument("texts", metavar="TEXT", nargs="+")
    options.add_argument("--rows", type=int, default=8, help="texts that are computed together (default 8)")
    given = options.parse_args(arguments)
    texts = [text for argument in given.texts for text in _texts(argument)]
    from jaxml.devices.start import use_compilation_cache
    from jaxml.infer.predict import TextClassifier

    use_compilation_cache(cache_directory())
    predictions = TextClassifier.open(given.checkpoint, max(1, given.rows)).predict(texts)
    lines = [
        f"{prediction.label} {prediction.probabilities[prediction.label]:.4f}  {_shortened(text)}"
        for prediction, text in zip(predictions, texts, strict=True)
    ]
    return {"text": "\n".join(lines), "results": [dataclasses.asdict(prediction) for prediction in predictions]}, 0


def _texts(argument: str) -> list[str]:
    """The argument itself, or the texts of the file that it names. Raises DataError naming the line."""
    if not argument.endswith(".jsonl"):
        return [argument]
    texts = []
    for number, line in enumerate(Path(argument).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            texts.append(_text_of(line, f"{argument}, line {number}"))
    return texts


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise DataError(where, expected='"a text" or {"text": "a text"}', got=line[:60], todo="mend the line")
    return text


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"
