"""`jaxml blame RUN_DIR --step N`: the documents of a step with their losses, worst first. Reads `prove.blame`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxml.cli.diverge import use_fake_devices
from jaxml.cli.experiment_file import parser

DESCRIPTION = """The documents in the batch of one training step of RUN_DIR, decoded, each with its own loss (mean nats a token)
and the norm of its own gradient, the worst first, at the parameters that the step began with.

These are taken again exactly from the checkpoint before the step; from farther back than --replay steps the checkpoint's
own are used, and the first line says which."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, measure, and return one entry a document."""
    options = parser("blame", DESCRIPTION)
    options.add_argument("run_dir", help="the run directory")
    options.add_argument("--step", type=int, required=True, help="the step, as in metrics.jsonl")
    options.add_argument("--top", type=int, default=20, help="documents to print (default: 20; --json has all)")
    options.add_argument("--replay", type=int, default=20, help="steps to take again at most (default: 20)")
    given = options.parse_args(arguments)
    use_fake_devices([given.run_dir])
    from jaxml.prove.blame import blame

    found = blame(given.run_dir, given.step, given.replay)
    lines = [f"step {found.step}: {len(found.pieces)} documents, the worst first, at the parameters of {found.at}"]
    for piece in found.pieces[: given.top]:
        end = piece.start + piece.num_tokens
        label = "" if piece.label is None else f", label {piece.label}"
        lines.append(
            f"  loss {piece.loss:.4f}  gradient {piece.grad_norm:.4f}  row {piece.row}, document {piece.document} "
            f"({piece.place}, tokens {piece.start} to {end}{label})"
        )
        lines.append(f"      {piece.text!r}")
    hidden = len(found.pieces) - given.top
    lines += [f"  and {hidden} more (--top, --json)"] * (hidden > 0)
    return {"text": "\n".join(lines), **asdict(found)}, 0
