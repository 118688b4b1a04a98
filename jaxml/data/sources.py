"""Documents out of text, JSONL, table, Parquet and ArrayRecord files, one at a time, each with its place.

Reads `data.spec` and `data.files`; `data.prepare` tokenises what it yields. Nothing is ever skipped in silence: what
cannot be read is a DataError that names file, line and byte.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxml.config.spec import suggest
from jaxml.data.files import FileRef
from jaxml.data.spec import ArrayRecordSource, JsonlSource, ParquetSource, SourceSpec, TableSource, TextSource
from jaxml.errors import DataError, require_extra

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ROWS_A_READ = 1024


@dataclass(frozen=True, slots=True)
class Document:
    """One document. `file` is the index of its file, `number` its place among the documents of that file (from 0),
    `line` the line or row where it begins (from 1)."""

    text: str
    label: str | None
    file: int
    number: int
    line: int


Record = tuple[int, str, str | None]  # line or row, text, label


def read_documents(
    source: SourceSpec, files: Sequence[FileRef], first_file: int = 0, first_number: int = 0
) -> Iterator[Document]:
    """The documents of a source in order, from document `first_number` of file `first_file` on.

    Raises DataError (file and place named): invalid UTF-8, a missing field, a malformed record.
    """
    for file in range(first_file, len(files)):
        for number, (line, text, label) in enumerate(_read(source, files[file])):
            if file > first_file or number >= first_number:
                yield Document(text, label, file, number, line)


def place(source: SourceSpec, file_name: str, line: int) -> str:
    """How messages name a document: its file, and its line or row there."""
    if isinstance(source, TextSource) and source.documents == "file":
        return file_name
    unit = "row" if isinstance(source, ParquetSource | ArrayRecordSource) else "line"
    return f"{file_name}, {unit} {line}"


def _read(source: SourceSpec, file: FileRef) -> Iterator[Record]:
    match source:
        case TextSource(documents="file"):
            return _read_whole(file)
        case TextSource(documents="line"):
            return _read_lines(file)
        case TextSource():
            return _read_paragraphs(file)
        case JsonlSource():
            return _read_jsonl(source, file)
        case TableSource():
            return _read_table(source, file)
        case ParquetSource():
            return _read_parquet(source, file)
        case ArrayRecordSource():
            return _read_array_record(source, file)


def _read_whole(file: FileRef) -> Iterator[Record]:
    with file.open() as stream:
        content = stream.read()
    offset = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
    yield 1, _decoded(content[offset:], file.name, offset), None


def _read_lines(file: FileRef) -> Iterator[Record]:
    with file.open() as stream:
        for number, line in _lines(stream, file.name):
            if line.strip():
                yield number, line.rstrip("\r\n"), None


def _read_paragraphs(file: FileRef) -> Iterator[Record]:
    begun, paragraph = 0, []
    with file.open() as stream:
        for number, line in _lines(stream, file.name):
            if line.strip():
                begun = begun if paragraph else number
                paragraph.append(line.rstrip("\r\n"))
            elif paragraph:
                yield begun, "\n".join(paragraph), None
                paragraph = []
    if paragraph:
        yield begun, "\n".join(paragraph), None


def _read_jsonl(source: JsonlSource, file: FileRef) -> Iterator[Record]:
    with file.open() as stream:
        for number, line in _lines(stream, file.name):
            if line.strip():
                where = f"{file.name}, line {number}"
                yield number, *_fields(source, _json_object(line, where), where)


def _read_table(source: TableSource, file: FileRef) -> Iterator[Record]:
    with file.open() as stream:
        rows = _quoted_rows(source, file, stream) if source.quoted else _plain_rows(source, file, stream)
        columns = source.columns
        for number, row in rows:
            if not columns:
                columns = tuple(row)
                continue
            where = f"{file.name}, line {number}"
            if len(row) != len(columns):
                raise DataError(
                    where,
                    expected=f"{len(columns)} columns ({', '.join(columns)}) with {source.delimiter!r} between them",
                    got=f"{len(row)} columns",
                    todo="correct the line, the delimiter, `columns`, or `quoted` (are fields in double quotes?)",
                )
            yield number, *_fields(source, dict(zip(columns, row, strict=True)), where)


def _plain_rows(source: TableSource, file: FileRef, stream: Iterable[bytes]) -> Iterator[tuple[int, list[str]]]:
    for number, line in _lines(stream, file.name):
        if line.strip("\r\n"):
            yield number, line.rstrip("\r\n").split(source.delimiter)


def _quoted_rows(source: TableSource, file: FileRef, stream: Iterable[bytes]) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(sys.maxsize)  # csv refuses fields over 128 KiB, and documents may be longer
    reader = csv.reader((line for _, line in _lines(stream, file.name)), delimiter=source.delimiter, strict=True)
    try:
        begun = 1
        for row in reader:
            if row:
                yield begun, row
            begun = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file.name}, line {reader.line_num}",
            expected="fields in double quotes, a quote inside one doubled",
            got=str(error),
            todo="correct the line, or set quoted to False",
        ) from error


def _read_parquet(source: ParquetSource, file: FileRef) -> Iterator[Record]:
    arrow = require_extra("pyarrow", "data")
    parquet = require_extra("pyarrow.parquet", "data")
    names = [source.text] + ([source.label] if source.label else [])
    with file.open(compression=None) as stream:
        try:
            table = parquet.ParquetFile(stream)
            for name in names:
                if name not in table.schema_arrow.names:
                    raise _missing(name, file.name, table.schema_arrow.names)
            number = 0
            for batch in table.iter_batches(batch_size=ROWS_A_READ, columns=names):
                for row in batch.to_pylist():
                    number += 1
                    yield number, *_fields(source, row, f"{file.name}, row {number}")
        except arrow.ArrowException as error:
            raise DataError(
                file.name, expected="a Parquet file", got=str(error), todo="correct the path, or write the file again"
            ) from error


def _read_array_record(source: ArrayRecordSource, file: FileRef) -> Iterator[Record]:
    library = require_extra("array_record.python.array_record_module", "data")
    if "file" not in file.system.protocol:
        raise DataError(
            file.name,
            expected="a local ArrayRecord file",
            got="another file system",
            todo="copy the file here; the library reads local paths",
        )
    reader = library.ArrayRecordReader(file.path)
    # The library answers "0 records" for a file that it cannot read: an unreadable file must not look like an empty
    # one.
    if not reader.ok():
        raise _damaged(file, "the library cannot open it")
    try:
        count = reader.num_records()
        for first in range(0, count, ROWS_A_READ):
            for number, content in enumerate(reader.read(first, min(first + ROWS_A_READ, count)), first + 1):
                where = f"{file.name}, row {number}"
                text = _decoded(content, where, 0)
                if source.text:
                    yield number, *_fields(source, _json_object(text, where), where)
                else:
                    yield number, text, None
    except RuntimeError as error:
        raise _damaged(file, str(error)[:200]) from error
    finally:
        reader.close()


def _damaged(file: FileRef, got: str) -> DataError:
    return DataError(
        file.name, expected="an ArrayRecord file", got=got, todo="correct the path, or write the file again"
    )


def _lines(stream: Iterable[bytes], name: str) -> Iterator[tuple[int, str]]:
    offset = 0
    for number, raw in enumerate(stream, 1):
        skipped = len(BYTE_ORDER_MARK) if offset == 0 and raw.startswith(BYTE_ORDER_MARK) else 0
        yield number, _decoded(raw[skipped:], name, offset + skipped)
        offset += len(raw)


def _decoded(content: bytes, name: str, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            name,
            expected="UTF-8 text",
            got=f"byte 0x{content[error.start]:02x} at offset {offset + error.start} ({error.reason})",
            todo="convert the file, for instance: iconv -f latin1 -t utf-8",
        ) from error


def _json_object(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(where, expected="a JSON object", got=str(error), todo="correct the line") from error
    if not isinstance(value, dict):
        raise DataError(where, expected="a JSON object", got=repr(value)[:80], todo="put the text into a field")
    return value


def _fields(
    source: JsonlSource | TableSource | ParquetSource | ArrayRecordSource, row: Mapping[str, Any], where: str
) -> tuple[str, str | None]:
    for name in (source.text, source.label):
        if name and name not in row:
            raise _missing(name, where, list(row))
    text = row[source.text]
    if not isinstance(text, str):
        raise DataError(
            where, expected=f"text in the field {source.text!r}", got=repr(text)[:80], todo="correct the record"
        )
    if not text.isascii():
        _refuse_surrogates(text, where)
    return text, _label(row[source.label], source.label, where) if source.label else None


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            where,
            expected="text that UTF-8 can hold",
            got=f"half of a surrogate pair, {text[error.start]!r}, at character {error.start}",
            todo="correct the escape: a character outside the basic plane takes both halves",
        ) from error


def _label(value: Any, name: str, where: str) -> str:
    spell: Callable[[Any], str] = json.dumps if isinstance(value, bool) else str
    if not isinstance(value, str | int):
        raise DataError(
            where, expected=f"a class name in the field {name!r}", got=repr(value)[:80], todo="correct the record"
        )
    return spell(value)


def _missing(name: str, where: str, known: list[str]) -> DataError:
    return DataError(
        where,
        expected=f"the field {name!r}",
        got="fields " + (", ".join(repr(field) for field in known) or "(none)"),
        todo=suggest(name, known),
    )
