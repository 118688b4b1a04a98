"""report.html of a run: curves, where the time went, facts, guard events, samples, and the first packed rows.

Reads `observe.report`, `observe.metrics_log`, `infer.language_model` and the assembled run; `recipes.train` calls it at the
end of a process.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from jaxml.infer.language_model import LanguageModel
from jaxml.observe.metrics_log import read_metrics
from jaxml.observe.report import RunReport, render_report
from jaxml.recipes.assemble import Assembly
from jaxml.recipes.run_directory import RunDirectory, write_whole
from jaxml.tasks.spec import TextClassification
from jaxml.telemetry import WallClock

ROWS_SHOWN, SAMPLE_TOKENS = 3, 400


def write_report(
    assembly: Assembly,
    directory: RunDirectory,
    facts: dict[str, str],
    clock: WallClock,
    events: list[str],
    prompts: Sequence[str] = (),
) -> None:
    """Write report.html beside run.json (whole or not at all); `prompts` are answered by the newest checkpoint.

    Raises RunError when it cannot be written, RequestError for a prompt that cannot be answered.
    """
    rows = first_rows(assembly, ROWS_SHOWN)
    report = RunReport(
        title=assembly.experiment.name,
        facts=facts,
        records=read_metrics(directory.metrics),
        clock_shares=clock.shares(),
        events=events,
        rows=rows,
        samples=sample(directory, prompts),
        commands=commands(assembly, directory),
    )
    write_whole(directory.report, render_report(report).encode())


def sample(directory: RunDirectory, prompts: Sequence[str]) -> list[tuple[str, str]]:
    """(prompt, answer) for each prompt, as anybody gets it from the checkpoint with temperature 0.8 and seed 0."""
    if not prompts:
        return []
    model = LanguageModel.open(directory.path)
    answers = model.generate(list(prompts), max_tokens=SAMPLE_TOKENS, temperature=0.8, seed=0)
    return list(zip(prompts, (answer.text for answer in answers), strict=True))


def commands(assembly: Assembly, directory: RunDirectory) -> list[tuple[str, str]]:
    """What can be done with the run now, and how."""
    path = shlex.quote(str(directory.path))
    steps = 2 * assembly.experiment.train.steps
    lines = [("Train on", f"jaxml resume {path} --train.steps {steps}"), ("Describe it", f"jaxml inspect {path}")]
    lines.append(("Measure it on the held-out data", f"jaxml eval {path}"))
    if isinstance(assembly.experiment.task, TextClassification):
        lines.append(("Label a text", f'jaxml predict {path} "a text"'))
    else:
        lines.append(("Let it write", f'jaxml generate {path} --prompt "a text" --stream'))
    return [*lines, ("Serve it", f"jaxml serve {path}")]


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
