"""`jaxml import DIR --out CKPT`: a published model as a sealed checkpoint. Reads `recipes.importing`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxml.cli.experiment_file import parser

if TYPE_CHECKING:
    from jaxml.recipes.importing import ImportReport

DESCRIPTION = """Import the model in DIR (config.json, .safetensors and tokenizer.json as Hugging Face's tools write them) to a
sealed checkpoint. Families: llama. What changes the mathematics and is not understood is refused by name."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, import, and return the report."""
    options = parser("import", DESCRIPTION)
    options.add_argument("directory", metavar="DIR", help="the directory of the published model")
    options.add_argument("--out", required=True, metavar="CKPT", help="directory of the checkpoint, new or empty")
    given = options.parse_args(arguments)
    from jaxml.recipes.importing import import_model

    report = import_model(given.directory, given.out)
    return {"text": _text(report), **asdict(report)}, 0


def _text(report: ImportReport) -> str:
    counts = ", ".join(f"{count:,} {dtype}" for dtype, count in report.parameters.items())
    lines = [
        f"{report.checkpoint} ({report.family})",
        f"  parameters: {counts}; stored as {report.stored_as}",
        f"  leaves: {report.num_leaves} filled from {report.num_tensors} tensors",
        f"  tensors unused: {', '.join(report.unused) or 'none'}",
        f"  keys of config.json that change no logit: {', '.join(report.ignored) or 'none'}",
        f"  tokenizer: {report.tokenizer or 'none'}",
        *[f"  note: {note}" for note in report.notes],
        f"  probe {report.probe[:16]}, seal {report.seal[:16]}",
    ]
    return "\n".join(lines)
