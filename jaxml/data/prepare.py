"""`data prepare`: sources to token shards, document table, packing plans and a fingerprint, resumable at every shard.

Reads `data.tokenise` (documents to shards), `data.packing` (rows) and the record files; `recipes` and `cli` call
`prepare`, training opens the result with `data.prepared`.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxml.config.spec import from_json, to_json
from jaxml.data.files import FileRef
from jaxml.data.fingerprint import (
    Inputs,
    changes,
    data_fingerprint,
    list_inputs,
    record_inputs,
    source_fingerprint,
    what_matters,
)
from jaxml.data.layout import (
    DATASET_FILE,
    DOCUMENT,
    DOCUMENTS_FILE,
    LOCK_FILE,
    PROGRESS_FILE,
    SPLITS,
    TOKENIZER_FOLDER,
    VERIFIED_FILE,
    ShardRecord,
    State,
    is_ours,
    plan_files,
    read_state,
    record,
)
from jaxml.data.lock import only_writer
from jaxml.data.packing import plan_rows
from jaxml.data.prepared import Prepared, check_vocabulary, open_prepared
from jaxml.data.shards import write_array
from jaxml.data.spec import DataSpec, check_data, source_names
from jaxml.data.tokenise import Progress, Work, minimum_tokens, tokenizer_texts, write_shards
from jaxml.errors import ConfigError, DataError, Faults
from jaxml.inputs.tokenizers import SPEC_FILE, Tokenizer, build_tokenizer, load_tokenizer


def prepare(
    spec: DataSpec,
    *,
    has_labels: tuple[str, ...] = (),
    vocab_size: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    force: bool = False,
) -> Prepared:
    """Prepare the data of a spec in `spec.prepared` and open it. What is there already, whole and unchanged, is kept.

    `has_labels`: the class names of a classification task, in class order. `vocab_size`: the model's, which the
    tokenizer's must fit. `progress` is called after each file, batch and shard, and several times a second while
    another process prepares there, which is waited for; what it raises ends the preparation, and finished shards are
    kept. `force`: prepare anew over other data. Raises ConfigError for the spec; DataError for sources that cannot be
    read or used, a directory that holds other data (unless `force`), and nothing left to train or evaluate on.
    """
    report = progress or (lambda _: None)
    faults = Faults(ConfigError)
    check_data(spec, faults, has_labels)
    faults.raise_if_any()
    folder = Path(spec.prepared)
    _state_before(folder, force)  # The lock, too, is a file: none is put into a directory that is not ours.
    with only_writer(folder, lambda holder: report(Progress("wait", holder))):
        return _prepare(spec, folder, has_labels, vocab_size, report, force)


def _prepare(
    spec: DataSpec,
    folder: Path,
    has_labels: tuple[str, ...],
    vocab_size: int | None,
    report: Callable[[Progress], None],
    force: bool,
) -> Prepared:
    """`prepare`, by the one process that may write."""
    files, tokenizer_file = list_inputs(spec)
    before, is_complete = _state_before(folder, force)
    known = None if before is None else Inputs.from_json(before.inputs)
    inputs = record_inputs(files, tokenizer_file, known, lambda name: report(Progress("hash", name)))
    wanted = source_fingerprint(spec, has_labels, inputs)
    if before is not None and before.source_fingerprint != wanted:
        if not force and (is_complete or before.shards):
            raise _other_data(folder, before, what_matters(spec, has_labels, inputs))
        before, is_complete = None, False
    if before is not None and is_complete and not force:
        _tidy(folder, before)
        if inputs != known:  # touched or moved, not changed: the next opening need not read them to know
            dataclasses.replace(before, inputs=inputs.to_json()).write(folder / DATASET_FILE)
        return open_prepared(spec, vocab_size, has_labels, report)
    if before is None or is_complete:
        before = State(to_json(spec), has_labels, wanted, inputs.to_json())
        _start_anew(folder, before)
    tokenizer = _tokenizer(spec, files, folder, before, report)
    if vocab_size is not None:
        check_vocabulary(tokenizer.vocab_size, vocab_size)
    state = dataclasses.replace(before, tokenizer_fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)
    state.write(folder / PROGRESS_FILE)
    for with_shard in write_shards(Work(spec, files, has_labels, tokenizer), folder, state, report):
        state = with_shard
        state.write(folder / PROGRESS_FILE)
    _finish(spec, folder, state, has_labels, report)
    return open_prepared(spec, vocab_size, has_labels, report)


def _state_before(folder: Path, force: bool) -> tuple[State | None, bool]:
    try:
        before, is_complete = read_state(folder)
    except DataError:
        if not force:
            raise
        return None, False
    names = sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not name.endswith(".tmp") and name != LOCK_FILE]
    if before is None and foreign:
        raise DataError(
            "data.prepared",
            expected=f"a new or empty directory, or one that data prepare wrote ({folder})",
            got="other files: " + ", ".join(foreign[:5]),
            todo="name another directory",
        )
    return before, is_complete


def _other_data(folder: Path, before: State, matters: dict[str, Any]) -> DataError:
    then = what_matters(from_json(before.spec), tuple(before.labels), Inputs.from_json(before.inputs))
    return DataError(
        "data.prepared",
        expected=f"an empty directory, or the data of this spec ({folder})",
        got=f"other data: {changes(then, matters)}",
        todo="name another directory, or prepare with force to write over it",
    )


def _start_anew(folder: Path, state: State) -> None:
    """Record what is begun, then remove what an earlier preparation left: at no moment is the directory nobody's."""
    folder.mkdir(parents=True, exist_ok=True)
    state.write(folder / PROGRESS_FILE)
    (folder / DATASET_FILE).unlink(missing_ok=True)
    if (folder / TOKENIZER_FOLDER).is_dir():
        shutil.rmtree(folder / TOKENIZER_FOLDER)
    _remove_others(folder, {PROGRESS_FILE})


def _remove_others(folder: Path, keep: set[str]) -> None:
    """Remove our files but those to keep. Files that we never write are not touched."""
    for item in list(folder.iterdir()):
        if is_ours(item.name) and item.name not in keep:
            item.unlink()


def _tokenizer(
    spec: DataSpec, files: list[list[FileRef]], folder: Path, before: State, report: Callable[[Progress], None]
) -> Tokenizer:
    saved = folder / TOKENIZER_FOLDER
    if before.tokenizer_fingerprint and (saved / SPEC_FILE).exists():
        tokenizer = load_tokenizer(saved)
        if tokenizer.fingerprint == before.tokenizer_fingerprint:
            return tokenizer
    report(Progress("tokenizer", type(spec.tokenizer).__name__))
    tokenizer = build_tokenizer(spec.tokenizer, tokenizer_texts(spec, files, bool(before.labels), report))
    tokenizer.save(saved)
    return tokenizer


def _finish(
    spec: DataSpec, folder: Path, state: State, labels: tuple[str, ...], report: Callable[[Progress], None]
) -> None:
    """Join the document tables, plan the rows, and write `dataset.json`."""
    tables = [np.load(folder / shard.documents.file) for shard in state.shards]
    documents = np.concatenate(tables) if tables else np.empty(0, DOCUMENT)
    write_array(folder / DOCUMENTS_FILE, documents)
    written = [record(folder / DOCUMENTS_FILE)]
    faults = Faults(DataError)
    sources: list[dict[str, Any]] = []
    for source, name in enumerate(source_names(spec)):
        counts: dict[str, Any] = {"dropped": sum(shard.dropped.get(str(source), 0) for shard in state.shards)}
        for split, split_name in enumerate(SPLITS):
            report(Progress("plan", name))
            chosen = np.flatnonzero((documents["source"] == source) & (documents["split"] == split))
            positions = documents["length"][chosen].astype(np.int64) - (0 if labels else 1)
            plan = plan_rows(chosen, positions, spec.sequence_length, spec.packing)
            for file, array in zip(plan_files(split, source), (plan.rows, plan.segments), strict=True):
                write_array(folder / file, array)
                written.append(record(folder / file))
            num_positions = int(plan.segments["length"].sum(dtype=np.int64))
            counts[split_name] = {
                "documents": len(chosen),
                "tokens": int(documents["length"][chosen].sum(dtype=np.int64)),
                "rows": len(plan),
                "positions": num_positions,
                "truncated": int((positions > spec.sequence_length).sum()) if spec.packing == "single" else 0,
            }
        sources.append(counts)
    _check_nothing_is_missing(spec, state.shards, sources, labels, faults)
    if faults.found:
        _remove_others(folder, set())
        shutil.rmtree(folder / TOKENIZER_FOLDER)
    faults.raise_if_any()
    complete = dataclasses.replace(
        state,
        fingerprint=data_fingerprint(state.source_fingerprint, state.tokenizer_fingerprint),
        files=tuple(written),
        sources=tuple(sources),
    )
    complete.write(folder / DATASET_FILE)
    _tidy(folder, complete)


def _tidy(folder: Path, state: State) -> None:
    """Remove what the finished data does not need: the record of progress, the tables that were joined, left-overs."""
    finished = [*(shard.tokens for shard in state.shards), *state.files]
    _remove_others(folder, {DATASET_FILE, VERIFIED_FILE, *(file.file for file in finished)})


def _check_nothing_is_missing(
    spec: DataSpec,
    shards: tuple[ShardRecord, ...],
    sources: list[dict[str, Any]],
    labels: tuple[str, ...],
    faults: Faults,
) -> None:
    """No source of a mix without rows to train on, and no empty evaluation where one was asked for."""
    dropped = [name for shard in shards for name in shard.dropped_names]
    for name, counts in zip(source_names(spec), sources, strict=True):
        if counts["train"]["rows"] == 0:
            faults.add(
                f"source {name!r}",
                expected=f"at least one document of {minimum_tokens(labels)} tokens to train on",
                got=f"{counts['held_out']['documents']} documents held out, {counts['dropped']} empty or too short"
                + (f" ({', '.join(dropped[:5])})" if counts["dropped"] else ""),
                todo="correct the source, leave it out of the mix, or lower held_out",
            )
    if spec.held_out > 0 and not faults.found and not any(counts["held_out"]["rows"] for counts in sources):
        faults.add(
            "data.held_out",
            expected="at least one document held out",
            got=f"none, at the fraction {spec.held_out}",
            todo="raise it, choose another seed, or set it to 0 to train without evaluation",
        )
