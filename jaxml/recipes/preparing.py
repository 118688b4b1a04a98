"""The prepared data of an experiment: opened, or prepared where there is none yet, with words about it.

Reads `data.prepare` and `data.prepared`; `recipes.assemble` and `cli` call it. No jax.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from jaxml.data.layout import DATASET_FILE
from jaxml.data.prepare import prepare
from jaxml.data.prepared import Prepared, open_prepared
from jaxml.data.tokenise import Progress
from jaxml.models.check import decoder_of
from jaxml.observe.progress import Stream
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import TextClassification


def prepare_data(experiment: Experiment, tell: Callable[[Progress], None] | None = None) -> Prepared:
    """Open the prepared directory, or prepare it where there is none yet. A stale one is refused, not overwritten."""
    if (Path(experiment.data.prepared) / DATASET_FILE).exists():
        return open_prepared(
            experiment.data, decoder_of(experiment.model).vocab_size, labels_of(experiment), tell or (lambda _: None)
        )
    return prepare_again(experiment, tell)


def prepare_again(
    experiment: Experiment, tell: Callable[[Progress], None] | None = None, force: bool = False
) -> Prepared:
    """Prepare what is not prepared yet; with `force` also over a directory that holds other data."""
    vocab_size, labels = decoder_of(experiment.model).vocab_size, labels_of(experiment)
    return prepare(experiment.data, has_labels=labels, vocab_size=vocab_size, progress=tell, force=force)


def labels_of(experiment: Experiment) -> tuple[str, ...]:
    """The class names of a classification task; empty for any other."""
    return experiment.task.labels if isinstance(experiment.task, TextClassification) else ()


class Teller:
    """Tells on `stream` where a preparation is, at most once a second; calls `poll` at every report.

    `poll` may raise to leave: the finished shards are kept, and the next preparation goes on after them.
    """

    def __init__(self, stream: Stream, poll: Callable[[], None] = lambda: None):
        self.stream, self.poll = stream, poll
        self._told = float("-inf")

    def __call__(self, progress: Progress) -> None:
        self.poll()
        now = time.monotonic()
        if now - self._told >= 1.0:
            self._told = now
            counts = f"{progress.documents:,} documents, {progress.tokens:,} tokens, {progress.shards} shards"
            print(f"preparing data: {progress.stage} {progress.name}: {counts}", file=self.stream, flush=True)
