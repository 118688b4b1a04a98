"""Prepared data, opened: tokens, documents and rows as memory-mapped arrays, and what a row or a document is.

Reads the records of `data.layout`; `data.batches` makes batches of it, `data show` and `seen` describe it. Opening
checks the fingerprint against spec, inputs and tokenizer, the files against their hashes (`data.verified`), and the ids
against the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt

from jaxml.config.spec import from_json
from jaxml.data.fingerprint import Inputs, changes, current_inputs, source_fingerprint, what_matters
from jaxml.data.layout import (
    DOCUMENTS_FILE,
    SPLITS,
    TOKENIZER_FOLDER,
    State,
    plan_files,
    read_state,
    token_type,
)
from jaxml.data.packing import Plan
from jaxml.data.sources import place
from jaxml.data.spec import DataSpec, check_data, source_names
from jaxml.data.tokenise import Progress, hash_text
from jaxml.data.verified import verify
from jaxml.errors import ConfigError, DataError, Faults
from jaxml.inputs.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class DocumentInfo:
    """A prepared document. `number` counts over all sources; `label` is its class name (None: no labels)."""

    number: int
    source: str
    place: str
    split: str
    num_tokens: int
    label: str | None


@dataclass(frozen=True)
class SegmentInfo:
    """A segment of a row: `length` input positions from `start` of its document, their text, and the text of the last
    target.
    """

    document: DocumentInfo
    start: int
    length: int
    text: str
    last_target: str


@dataclass(frozen=True)
class RowInfo:
    """A row, decoded. `num_padding` positions at its end have no segment and weigh nothing."""

    split: str
    source: str
    row: int
    segments: tuple[SegmentInfo, ...]
    num_padding: int


class Prepared:
    """An opened directory. `notes` are what a user should hear: dropped documents, inputs that could not be checked."""

    def __init__(self, spec: DataSpec, folder: Path, state: State, tokenizer: Tokenizer, notes: tuple[str, ...]):
        self.spec, self.directory, self.tokenizer, self.notes = spec, folder, tokenizer, notes
        self.labels = state.labels
        self.fingerprint = state.fingerprint
        self.tokenizer_fingerprint = state.tokenizer_fingerprint
        self.vocab_size = tokenizer.vocab_size
        self.source_names = source_names(spec)
        self.statistics = state.sources
        self._state = state
        self.documents = np.load(folder / DOCUMENTS_FILE, mmap_mode="r").view(np.ndarray)
        self._plans = [
            [_open_plan(folder, split, source) for source in range(len(spec.sources))] for split in range(len(SPLITS))
        ]
        kind = token_type(self.vocab_size)
        self._shards = [
            np.memmap(folder / shard.tokens.file, kind, mode="r").view(np.ndarray)
            for shard in state.shards
            if shard.num_tokens
        ]
        self._shard_begins = np.cumsum([0, *(len(shard) for shard in self._shards)])

    def num_rows(self, split: str) -> tuple[int, ...]:
        """Rows of each source in `train` or `held_out`."""
        return tuple(len(plan) for plan in self._plans[SPLITS.index(split)])

    def fill(self, split: str) -> float:
        """The share of positions that are not padding."""
        positions = sum(counts[split]["positions"] for counts in self.statistics)
        return positions / max(1, sum(self.num_rows(split)) * self.spec.sequence_length)

    def segments(self, split: str, source: int, row: int) -> Shaped[np.ndarray, " S"]:
        """The segments of a row: a structured array of document, start, length."""
        plan = self._plans[SPLITS.index(split)][source]
        return plan.segments[plan.rows[row] : plan.rows[row + 1]]

    def tokens(self, document: int, start: int = 0, length: int | None = None) -> UInt[np.ndarray, " T"]:
        """Stored ids of a document, without a copy."""
        info = self.documents[document]
        count = int(info["length"]) - start if length is None else length
        position = int(info["position"]) + start
        shard = int(np.searchsorted(self._shard_begins, position, side="right")) - 1
        begin = position - int(self._shard_begins[shard])
        return self._shards[shard][begin : begin + count]

    def describe_document(self, document: int) -> DocumentInfo:
        """Where a document came from and what it is."""
        if not 0 <= document < len(self.documents):
            raise DataError(
                "document",
                expected=f"a number from 0 to {len(self.documents) - 1}",
                got=str(document),
                todo="look for the document by its text",
            )
        info = self.documents[document]
        source = int(info["source"])
        file = self._state.inputs["sources"][source][int(info["file"])]["name"]
        return DocumentInfo(
            number=document,
            source=self.source_names[source],
            place=place(self.spec.sources[source], file, int(info["line"])),
            split=SPLITS[int(info["split"])],
            num_tokens=int(info["length"]),
            label=self.labels[int(info["label"])] if self.labels else None,
        )

    def describe_row(self, split: str, source: int, row: int) -> RowInfo:
        """A row with its segments decoded. Raises DataError when there is no such row."""
        count = self.num_rows(split)[source]
        if not 0 <= row < count:
            raise DataError(
                f"row of source {self.source_names[source]!r}, {split}",
                expected=f"a number from 0 to {count - 1}" if count else "a split with rows",
                got=str(row),
                todo="choose a row that exists",
            )
        found = []
        for document, start, length in self.segments(split, source, row).tolist():
            target = [] if self.labels else self.tokens(document, start + length, 1)
            text = self.tokenizer.decode(self.tokens(document, start, length))
            found.append(
                SegmentInfo(self.describe_document(document), start, length, text, self.tokenizer.decode(target))
            )
        padding = self.spec.sequence_length - sum(segment.length for segment in found)
        return RowInfo(split, self.source_names[source], row, tuple(found), padding)

    def find_document(self, text: str) -> list[int]:
        """The numbers of the documents that are exactly this text; where none is, of those that contain it (a slow
        scan).
        """
        exact = np.flatnonzero(self.documents["hash"] == np.uint64(hash_text(text, self.spec.seed)))
        if len(exact):
            return exact.tolist()
        every = range(len(self.documents))
        return [number for number in every if text in self.tokenizer.decode(self.tokens(number))] if text else []

    def rows_of_document(self, document: int) -> list[tuple[str, int, int]]:
        """(split, source, row) of every row that holds a piece of a document."""
        self.describe_document(document)
        split, source = int(self.documents["split"][document]), int(self.documents["source"][document])
        plan = self._plans[split][source]
        places = np.flatnonzero(plan.segments["document"] == document)
        rows = np.unique(np.searchsorted(plan.rows, places, side="right") - 1)
        return [(SPLITS[split], source, int(row)) for row in rows]


def open_prepared(
    spec: DataSpec,
    vocab_size: int | None = None,
    has_labels: tuple[str, ...] | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Prepared:
    """Open what `data.prepare` wrote. `has_labels`: the class names that the task expects (None: whatever is there).

    The first opening after files were written, copied or touched reads them all; `progress` is called for each of them.
    Raises DataError: nothing prepared or not finished; a stale fingerprint (spec, sources or tokenizer changed); a file
    that is missing or not as it was written; ids outside the vocabulary.
    """
    faults = Faults(ConfigError)
    check_data(spec, faults, has_labels or ())
    faults.raise_if_any()
    folder = Path(spec.prepared)
    state, is_complete = read_state(folder)
    if state is None or not is_complete:
        raise DataError(
            "data.prepared",
            expected=f"prepared data in {folder}",
            got="nothing" if state is None else f"an unfinished preparation ({len(state.shards)} shards done)",
            todo="run data prepare" + ("" if state is None else "; it goes on from there"),
        )
    labels = state.labels if has_labels is None else has_labels
    recorded = Inputs.from_json(state.inputs)
    recorded_spec = from_json(state.spec)
    inputs, notes = current_inputs(spec, recorded_spec, recorded)
    if source_fingerprint(spec, labels, inputs) != state.source_fingerprint:
        before = what_matters(recorded_spec, state.labels, recorded)
        raise DataError(
            "data.prepared",
            expected=f"data prepared from this spec and these inputs ({folder})",
            got=f"stale data: {changes(before, what_matters(spec, labels, inputs))}",
            todo="prepare the data again with force, or name another directory",
        )
    recorded_files = [*(shard.tokens for shard in state.shards), *state.files]
    verify(folder, recorded_files, lambda name: progress(Progress("verify", name)))
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    if tokenizer.fingerprint != state.tokenizer_fingerprint:
        raise DataError(
            str(folder / TOKENIZER_FOLDER),
            expected=f"the tokenizer that wrote the shards ({state.tokenizer_fingerprint[:12]})",
            got=tokenizer.fingerprint[:12],
            todo="prepare the data again with force",
        )
    if vocab_size is not None:
        check_vocabulary(max([tokenizer.vocab_size, *(shard.max_id + 1 for shard in state.shards)]), vocab_size)
    return Prepared(spec, folder, state, tokenizer, (*notes, *_notes(spec, state)))


def check_vocabulary(needed: int, vocab_size: int) -> None:
    """Raises DataError when a tokenizer or stored ids do not fit the model's vocabulary."""
    if needed > vocab_size:
        raise DataError(
            "model.vocab_size",
            expected=f"at least {needed}, the number of ids of the tokenizer",
            got=str(vocab_size),
            todo="raise the model's vocab_size, or use another tokenizer",
        )


def _open_plan(folder: Path, split: int, source: int) -> Plan:
    rows, segments = (np.load(folder / file, mmap_mode="r").view(np.ndarray) for file in plan_files(split, source))
    return Plan(rows, segments)


def _notes(spec: DataSpec, state: State) -> list[str]:
    notes = []
    names = [name for shard in state.shards for name in shard.dropped_names]
    dropped: Counter[int] = Counter()
    for shard in state.shards:
        dropped.update({int(source): count for source, count in shard.dropped.items()})
    if names:
        total = sum(dropped.values())
        notes.append(f"{total} documents empty or too short, left out: " + ", ".join(names[:5]) + ", ..." * (total > 5))
    for name, counts in zip(source_names(spec), state.sources, strict=True):
        truncated = sum(_count(counts, split) for split in SPLITS)
        if truncated:
            notes.append(f"{truncated} documents of source {name!r} cut to {spec.sequence_length} positions")
        if spec.held_out > 0 and counts["held_out"]["rows"] == 0:
            notes.append(f"source {name!r} has no held-out rows")
    return notes


def _count(counts: dict[str, Any], split: str) -> int:
    return int(counts[split]["truncated"])
