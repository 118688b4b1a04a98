"""Documents come out of every source as they went in, and what cannot be read is named by file, line and byte."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from jaxml.data.files import list_files
from jaxml.data.sources import Document, place, read_documents
from jaxml.data.spec import ArrayRecordSource, JsonlSource, ParquetSource, SourceSpec, TableSource, TextSource
from jaxml.errors import DataError, MissingExtraError

TEXTS = ["first é", "second\tdocument", "third 日本"]
LABELS = ["a", "b", "a"]


def read(source: SourceSpec, first_file: int = 0, first_number: int = 0) -> list[Document]:
    return list(read_documents(source, list_files(source.path, "data.sources.0.path"), first_file, first_number))


def texts(source: SourceSpec) -> list[str]:
    return [document.text for document in read(source)]


def write_all(folder: Path) -> Iterator[SourceSpec]:
    """The same documents as every kind of source that has labels."""
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    yield JsonlSource(str(folder / "a.jsonl"), label="label")
    quoted = "".join(f'{label},"{text}"\r\n' for text, label in zip(TEXTS, LABELS, strict=True))
    (folder / "a.csv").write_bytes(b"\xef\xbb\xbf" + ("label,text\r\n" + quoted).encode())
    yield TableSource(str(folder / "a.csv"), label="label", delimiter=",", quoted=True)
    plain = "".join(f"{label};{text}\n" for text, label in zip(TEXTS, LABELS, strict=True))
    (folder / "a.txt").write_text(plain)
    yield TableSource(str(folder / "a.txt"), label="label", delimiter=";", columns=("label", "text"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    yield ParquetSource(str(folder / "a.parquet"), label="label")
    writer = array_record_module.ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for row in rows:
        writer.write(json.dumps(row).encode())
    writer.close()
    yield ArrayRecordSource(str(folder / "a.array_record"), text="text", label="label")


def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path) -> None:
    for source in write_all(tmp_path):
        found = read(source)
        assert [document.text for document in found] == TEXTS, source
        assert [document.label for document in found] == LABELS
        assert [document.number for document in found] == [0, 1, 2]
        assert read(source, 0, 1) == found[1:]


def test_a_text_is_a_file_or_lines_or_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \r\n\n\nthree\x0c\n")
    path = str(tmp_path / "a.txt")
    assert texts(TextSource(path)) == ["one\ntwo \r\n\n\nthree\x0c\n"]
    assert texts(TextSource(path, "line")) == ["one", "two ", "three\x0c"]
    assert texts(TextSource(path, "paragraph")) == ["one\ntwo ", "three\x0c"]
    assert [document.line for document in read(TextSource(path, "paragraph"))] == [1, 5]
    assert [place(TextSource(path, "line"), "a.txt", document.line) for document in read(TextSource(path, "line"))] == [
        "a.txt, line 1",
        "a.txt, line 2",
        "a.txt, line 5",
    ]


def test_array_records_may_be_plain_text(tmp_path: Path) -> None:
    writer = array_record_module.ArrayRecordWriter(str(tmp_path / "t.array_record"), "group_size:1")
    writer.write("é".encode())
    writer.close()
    assert texts(ArrayRecordSource(str(tmp_path / "t.array_record"))) == ["é"]


def test_a_path_is_a_file_a_glob_a_tuple_or_a_url(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    memory = fsspec.filesystem("memory")
    for name in ("y", "x"):
        memory.pipe(f"/jaxml-sources/{name}.txt", name.encode())
    try:
        assert texts(TextSource(f"{tmp_path}/*.txt")) == ["a", "b", "c"]
        assert texts(TextSource((f"{tmp_path}/c.txt", f"{tmp_path}/[ab].txt"))) == ["c", "a", "b"]
        assert texts(TextSource(f"file://{tmp_path}/*.txt")) == ["a", "b", "c"]
        assert texts(TextSource("memory://jaxml-sources/y.txt")) == ["y"]
        assert texts(TextSource("memory://jaxml-sources/*.txt")) == ["x", "y"]
        assert list_files("memory://jaxml-sources/y.txt", "path")[0].name == "memory:///jaxml-sources/y.txt"
    finally:
        memory.rm("/jaxml-sources", recursive=True)


def test_brackets_in_the_name_of_a_file_that_exists_are_no_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("here")
    assert texts(TextSource(f"{tmp_path}/a[1].txt")) == ["here"]


def test_a_compressed_file_is_read_as_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    assert texts(JsonlSource(f"{tmp_path}/a.jsonl.gz")) == ["packed"]


@pytest.mark.parametrize("path", ["absent.txt", "*.none", ".", "what://x/y", ("a.txt", "absent.txt")])
def test_a_path_that_names_no_file_is_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"data\.sources\.0\.path"):
        texts(TextSource(path))


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (TextSource("f"), b"ab\xff", r"f\n(.|\n)*byte 0xff at offset 2"),
        (TextSource("f"), b"\xef\xbb\xbfab\xff", r"offset 5"),
        (TextSource("f", "line"), b"good\nb\xe9d\n", r"byte 0xe9 at offset 6"),
        (JsonlSource("f"), b'{"text": "a"}\n{"txt": "b"}\n', r"f, line 2\n(.|\n)*'text'(.|\n)*'txt'"),
        (JsonlSource("f"), b'{"text": "a"}\n{"text": 5}\n', r"f, line 2\n(.|\n)*5"),
        (JsonlSource("f"), b'{"text": "a"}\n{"text": \n', r"f, line 2\n  expected: a JSON object"),
        (JsonlSource("f"), b"[]\n", r"f, line 1\n  expected: a JSON object"),
        (JsonlSource("f"), b'{"text": "a\\ud800"}\n', r"f, line 1\n(.|\n)*surrogate"),
        (JsonlSource("f", label="y"), b'{"text": "a", "y": null}\n', r"class name in the field 'y'"),
        (TableSource("f"), b"text\tlabel\nonly one\n", r"f, line 2\n  expected: 2 columns"),
        (TableSource("f", text="txt"), b"text\tlabel\na\tb\n", r"'txt'(.|\n)*did you mean 'text'"),
        (TableSource("f", quoted=True), b'text\n"open\n', r"f, line 2\n(.|\n)*double quotes"),
        (ParquetSource("f"), b"not parquet", r"f\n  expected: a Parquet file"),
        (ArrayRecordSource("f"), b"not records", r"f\n  expected: an ArrayRecord file"),
    ],
)
def test_what_cannot_be_read_is_named(
    source: SourceSpec, content: bytes, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DataError, match=expected):
        read(source)


def test_a_parquet_file_without_the_column_or_with_a_null_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "n.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(DataError, match=r"row 2\n(.|\n)*None"):
        texts(ParquetSource(path))
    with pytest.raises(DataError, match="'body'"):
        texts(ParquetSource(path, text="body"))


def test_labels_may_be_numbers_and_booleans(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "y": 3}\n{"text": "a", "y": true}\n')
    assert [document.label for document in read(JsonlSource(f"{tmp_path}/a.jsonl", label="y"))] == ["3", "true"]


def test_a_quoted_field_may_be_long_and_span_lines(tmp_path: Path) -> None:
    text = 'a "word"\n' * 20_000
    (tmp_path / "a.csv").write_text('text,n\n"' + text.replace('"', '""') + '",1\nb,2\n')
    found = read(TableSource(f"{tmp_path}/a.csv", delimiter=",", quoted=True))
    assert [document.text for document in found] == [text, "b"]
    assert [document.line for document in found] == [2, 20_003]


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    for source in (ParquetSource(f"{tmp_path}/f"), ArrayRecordSource(f"{tmp_path}/f")):
        with pytest.raises(MissingExtraError, match=r"jaxml\[data\]"):
            texts(source)


def test_the_sms_spam_collection_has_its_published_counts() -> None:
    path = Path(__file__).resolve().parents[2] / "experiments" / "data" / "sms-spam" / "SMSSpamCollection.tsv"
    found = read(TableSource(str(path), label="label", columns=("label", "text")))
    assert Counter(document.label for document in found) == {"ham": 4827, "spam": 747}
    assert found[0].text.startswith("Go until jurong point, crazy..")
