"""report.html of a run: curves, where the time went, facts, guard events and the first packed rows.

Reads `observe.report`, `observe.metrics_log` and the assembled run; `recipes.train` calls it at the end of a process.
"""

from __future__ import annotations

from jaxml.observe.metrics_log import read_metrics
from jaxml.observe.report import RunReport, render_report
from jaxml.recipes.assemble import Assembly
from jaxml.recipes.run_directory import RunDirectory, write_whole
from jaxml.telemetry import WallClock

ROWS_SHOWN = 3


def write_report(
    assembly: Assembly, directory: RunDirectory, facts: dict[str, str], clock: WallClock, events: list[str]
) -> None:
    """Write report.html beside run.json (whole or not at all)."""
    rows = first_rows(assembly, ROWS_SHOWN)
    report = RunReport(
        title=assembly.experiment.name,
        facts=facts,
        records=read_metrics(directory.metrics),
        clock_shares=clock.shares(),
        events=events,
        rows=rows,
    )
    write_whole(directory.report, render_report(report).encode())


def first_rows(assembly: Assembly, num_rows: int) -> list[list[tuple[str, int]]]:
    """The first rows of step 1 as (decoded text, segment id) pieces, as training sees them."""
    batch = assembly.train_batches(()).batch(0)
    tokenizer = assembly.prepared.tokenizer
    shown = []
    for tokens, segments in list(zip(batch["tokens"], batch["segment_ids"], strict=True))[:num_rows]:
        pieces = [
            (tokenizer.decode(tokens[segments == i].tolist()), int(i)) for i in sorted(set(segments.tolist())) if i
        ]
        shown.append(pieces)
    return shown
