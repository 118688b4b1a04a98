"""`jaxml seen RUN_DIR`: which steps and checkpoints of a run saw a document. Reads `recipes.seen`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxml.cli.experiment_file import parser
from jaxml.errors import DataError

DESCRIPTION = """Which training steps of RUN_DIR saw a document, and which of its checkpoints therefore know it.

The document is named by its number in the prepared data, or by its text (or a piece of it)."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, look up, and return one entry a document."""
    options = parser("seen", DESCRIPTION)
    options.add_argument("run_dir", help="the run directory")
    which = options.add_mutually_exclusive_group(required=True)
    which.add_argument("--document", type=int, help="number of the document in the prepared data")
    which.add_argument("--text", help="the document's text, or a piece of it")
    given = options.parse_args(arguments)
    from jaxml.recipes.seen import open_run_data, seen_by

    directory, prepared, batch_size = open_run_data(given.run_dir)
    numbers = [given.document] if given.text is None else prepared.find_document(given.text)
    if not numbers:
        raise DataError(
            "the document",
            expected="one that holds this text",
            got="none",
            todo="check the text, or use --document NUMBER",
        )
    found = [seen_by(directory, prepared, batch_size, number) for number in numbers]
    lines = []
    for seen in found:
        steps = ", ".join(map(str, seen.steps[:20])) + (
            f" and {len(seen.steps) - 20} more" if len(seen.steps) > 20 else ""
        )
        lines.append(f"document {seen.document} ({seen.place}, {seen.num_tokens} tokens, split {seen.split})")
        lines.append(f"  seen in steps: {steps or 'none'} (of {seen.last_step})")
        lines.append(f"  checkpoints that saw it: {', '.join(map(str, seen.checkpoints)) or 'none'}")
    return {"text": "\n".join(lines), "documents": [asdict(seen) for seen in found]}, 0
