"""`jaxml data prepare FILE` and `jaxml data show FILE|RUN_DIR`. Reads `recipes.preparing` and `data.prepared`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxml.cli.experiment_file import load_experiment, parser
from jaxml.config.spec import suggest
from jaxml.errors import ConfigError

if TYPE_CHECKING:
    from jaxml.data.prepared import Prepared, RowInfo

PREPARE = """Tokenise the sources of an experiment, plan its rows, and write both to data.prepared.

What is there already, whole and unchanged, is kept; an interrupted preparation goes on where it stopped.
example: jaxml data prepare experiments/shakespeare.py"""
SHOW = """Decode packed rows, with their segments and masks, as training sees them.

example: jaxml data show experiments/shakespeare.py --rows 2"""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Dispatch to `prepare` or `show`."""
    verbs = {"prepare": prepare, "show": show}
    if not arguments or arguments[0] in ("-h", "--help"):
        return {
            "text": f"usage: jaxml data prepare|show ...\n\nprepare: {PREPARE}\n\nshow: {SHOW}"
        }, 0 if arguments else 2
    if arguments[0] not in verbs:
        todo = suggest(arguments[0], list(verbs))
        raise ConfigError("the verb of `jaxml data`", expected="prepare or show", got=arguments[0], todo=todo)
    return verbs[arguments[0]](arguments[1:])


def prepare(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Write the prepared directory; returns its counts."""
    options = parser("data prepare", PREPARE)
    options.add_argument("file", help="experiment file with config(), or a run directory")
    options.add_argument("--force", action="store_true", help="prepare anew over a directory that holds other data")
    given, overrides = options.parse_known_args(arguments)
    experiment = load_experiment(given.file, overrides)
    from jaxml.recipes.preparing import Teller, prepare_again

    prepared = prepare_again(experiment, Teller(sys.stderr), given.force)
    for note in prepared.notes:
        print(f"jaxml: {note}", file=sys.stderr)
    return _counts(prepared), 0


def _counts(prepared: Prepared) -> dict[str, Any]:
    return {
        "prepared": str(prepared.directory),
        "fingerprint": prepared.fingerprint,
        "vocab_size": prepared.vocab_size,
        "documents": len(prepared.documents),
        "train_rows": sum(prepared.num_rows("train")),
        "held_out_rows": sum(prepared.num_rows("held_out")),
        "train_fill": round(prepared.fill("train"), 4),
    }


def show(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Decode rows of a split, or of a training step."""
    options = parser("data show", SHOW)
    options.add_argument("file", help="experiment file with config(), or a run directory")
    options.add_argument("--rows", type=int, default=3, help="how many rows (default 3)")
    options.add_argument("--split", choices=["train", "held_out"], default="train")
    options.add_argument("--step", type=int, default=1, help="training step whose first rows to show (split train)")
    given, overrides = options.parse_known_args(arguments)
    experiment = load_experiment(given.file, overrides)
    from jaxml.data.batches import EvalBatches, TrainBatches
    from jaxml.recipes.preparing import Teller, prepare_data
    from jaxml.recipes.run_directory import RunDirectory
    from jaxml.recipes.seen import skipped_steps

    prepared = prepare_data(experiment, Teller(sys.stderr))
    size = max(1, given.rows)
    if given.split == "train":
        skipped = skipped_steps(RunDirectory(Path(given.file))) if Path(given.file).is_dir() else ()
        batch = TrainBatches(prepared, experiment.train.batch_size, skipped).batch(max(1, given.step) - 1)
    else:
        batch = EvalBatches(prepared, size).batch(0)
    places = [place for place in zip(batch["source"].tolist(), batch["record"].tolist(), strict=True) if place[1] >= 0]
    rows = [prepared.describe_row(given.split, source, row) for source, row in places[:size]]
    return {"text": "\n".join(_row_text(row) for row in rows), "rows": [asdict(row) for row in rows]}, 0


def _row_text(row: RowInfo) -> str:
    lines = [
        f"{row.split} row {row.row} of {row.source}: {len(row.segments)} segments, {row.num_padding} padding positions"
    ]
    for number, segment in enumerate(row.segments, start=1):
        document = segment.document
        label = f", label {document.label}" if document.label is not None else ""
        lines.append(
            f"  segment {number}: {document.place}, from token {segment.start}, {segment.length} tokens{label}"
        )
        lines.append(f"    inputs      {segment.text!r}")
        if segment.last_target:
            lines.append(f"    last target {segment.last_target!r}")
    if row.num_padding:
        lines.append(f"  padding: {row.num_padding} positions with loss_mask False")
    return "\n".join(lines)
