"""The first documents of an experiment's own sources, written to a directory as small sources of the same kind. No jax.

Reads `data.files`, `data.sources` and `data.spec`; `prove.shrink` calls it. A source of one document stays one. Any other
becomes NUM_DOCUMENTS short ones: its first documents, cut into pieces, so that there are enough to train on and to hold
out. Parquet and ArrayRecord rows are written as JSON lines.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from jaxml.data.files import list_files
from jaxml.data.sources import read_documents
from jaxml.data.spec import ArrayRecordSource, JsonlSource, ParquetSource, SourceSpec, TableSource, TextSource

NUM_DOCUMENTS, PIECE_CHARACTERS, WHOLE_CHARACTERS = 64, 192, 10_000

Piece: TypeAlias = tuple[str, str | None]  # text, label


def sliced_sources(sources: tuple[SourceSpec, ...], folder: Path) -> tuple[SourceSpec, ...]:
    """The small sources, in `folder`. Raises DataError where a source cannot be read."""
    return tuple(_sliced(source, index, folder) for index, source in enumerate(sources))


def _sliced(source: SourceSpec, index: int, folder: Path) -> SourceSpec:
    documents = read_documents(source, list_files(source.path, f"data.sources.{index}.path"))
    first = [(document.text, document.label) for document in islice(documents, NUM_DOCUMENTS)]
    file = folder / f"source{index}"
    match source:
        case TextSource(documents="file") if len(first) == 1:
            return replace(source, path=_written(file.with_suffix(".txt"), first[0][0][:WHOLE_CHARACTERS]))
        case TextSource(documents="file"):
            pieces = enumerate(_pieces(first))
            return replace(
                source, path=tuple(_written(folder / f"source{index}-{n}.txt", text) for n, (text, _) in pieces)
            )
        case TextSource():
            # A line that is cut may end in a blank, which a reader of lines keeps: pieces stay single lines.
            ending = "\n" if source.documents == "line" else "\n\n"
            return replace(source, path=_written(file.with_suffix(".txt"), ending.join(t for t, _ in _pieces(first))))
        case TableSource():
            return replace(source, path=_written_table(file.with_suffix(".txt"), source, _pieces(first)))
        case JsonlSource() | ParquetSource() | ArrayRecordSource():
            text, label = source.text or "text", source.label
            rows = ({text: t} | ({label: name} if label else {}) for t, name in _pieces(first))
            lines = "\n".join(json.dumps(row) for row in rows)
            return JsonlSource(_written(file.with_suffix(".jsonl"), lines), text, label, source.name, source.weight)


def _pieces(documents: Iterable[Piece]) -> Iterator[Piece]:
    """The first piece of every document, then the second of every one that has it, and so on: NUM_DOCUMENTS at most."""
    rest, found = list(documents), 0
    while rest and found < NUM_DOCUMENTS:
        for text, label in rest[: NUM_DOCUMENTS - found]:
            yield text[:PIECE_CHARACTERS], label
            found += 1
        rest = [(text[PIECE_CHARACTERS:], label) for text, label in rest if len(text) > PIECE_CHARACTERS]


def _written(file: Path, text: str) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
    return str(file)


def _written_table(file: Path, source: TableSource, pieces: Iterable[Piece]) -> str:
    """The columns of text and label, the others empty."""
    columns = source.columns or tuple(dict.fromkeys((source.text, *((source.label,) if source.label else ()))))
    rows = [] if source.columns else [list(columns)]
    for text, label in pieces:
        known = {source.text: text} | ({source.label: label or ""} if source.label else {})
        rows.append([known.get(column, "") for column in columns])
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        if source.quoted:
            csv.writer(stream, delimiter=source.delimiter).writerows(rows)
        else:
            stream.writelines(source.delimiter.join(row) + "\n" for row in rows)
    return str(file)
