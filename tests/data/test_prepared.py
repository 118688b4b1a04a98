"""Opened data says what its rows and documents are, and a damaged directory is never trained on."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxml.data.batches import EvalBatches, TrainBatches
from jaxml.data.prepared import Prepared, open_prepared
from jaxml.errors import DataError
from tests.data.conftest import sentence


@pytest.fixture
def copied(mixed: Prepared, tmp_path: Path) -> Prepared:
    """A copy of the mixed corpus that a test may damage."""
    shutil.copytree(mixed.directory, tmp_path / "prepared")
    return open_prepared(dataclasses.replace(mixed.spec, prepared=str(tmp_path / "prepared")))


def files(prepared: Prepared) -> list[str]:
    return sorted(file.name for file in prepared.directory.iterdir() if file.suffix in (".bin", ".npy"))


def test_a_truncated_extended_or_missing_file_is_refused_by_name(copied: Prepared) -> None:
    for name in files(copied):
        file = copied.directory / name
        content = file.read_bytes()
        for damaged in (content[:-1], content + b"x", b""):
            file.write_bytes(damaged)
            with pytest.raises(
                DataError, match=f"{name}\n  expected: {len(content)} bytes\n  got:      {len(damaged)} bytes"
            ):
                open_prepared(copied.spec)
        file.unlink()
        with pytest.raises(DataError, match=f"{name}\n(.|\n)*no such file"):
            open_prepared(copied.spec)
        file.write_bytes(content)
    open_prepared(copied.spec)


def test_all_damaged_files_are_named_at_once(copied: Prepared) -> None:
    names = files(copied)
    for name in names:
        (copied.directory / name).unlink()
    with pytest.raises(DataError) as caught:
        open_prepared(copied.spec)
    assert sorted(Path(fault.failed).name for fault in caught.value.faults) == names


def test_a_damaged_record_or_tokenizer_is_refused(copied: Prepared) -> None:
    record = copied.directory / "dataset.json"
    content = record.read_text()
    for damaged in (content[:-5], content.replace('"format":1', '"format":99'), "{}", "[]"):
        record.write_text(damaged)
        with pytest.raises(DataError, match=r"dataset\.json"):
            open_prepared(copied.spec)
    record.write_text(content)
    (copied.directory / "tokenizer" / "tokenizer_spec.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_spec\.json"):
        open_prepared(copied.spec)


def test_nothing_prepared_says_what_to_run(mixed: Prepared, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run data prepare"):
        open_prepared(dataclasses.replace(mixed.spec, prepared=str(tmp_path / "none")))


def test_a_described_row_is_the_row_of_the_batch(mixed: Prepared) -> None:
    batch = TrainBatches(mixed, 8).batch(3)
    for index in range(8):
        source, row = int(batch["source"][index]), int(batch["record"][index])
        info = mixed.describe_row("train", source, row)
        assert info.source == mixed.source_names[source]
        assert info.num_padding == int((~batch["loss_mask"][index]).sum())
        assert [segment.length for segment in info.segments] == np.bincount(batch["segment_ids"][index])[1:].tolist()
        begin = 0
        for segment in info.segments:
            here = slice(begin, begin + segment.length)
            assert segment.text == mixed.tokenizer.decode(batch["tokens"][index, here])
            assert segment.last_target == mixed.tokenizer.decode(batch["targets"][index, here][-1:])
            begin += segment.length


def test_rows_that_do_not_exist_are_refused(mixed: Prepared) -> None:
    for row in (-1, mixed.num_rows("held_out")[1]):
        with pytest.raises(DataError, match="row of source 'b', held_out"):
            mixed.describe_row("held_out", 1, row)
    with pytest.raises(DataError, match="document"):
        mixed.rows_of_document(len(mixed.documents))


@pytest.mark.parametrize("name", ["mixed", "concatenated", "labelled"])
def test_rows_of_document_inverts_the_plan(name: str, request: pytest.FixtureRequest) -> None:
    prepared: Prepared = request.getfixturevalue(name)
    expected: dict[int, set[tuple[str, int, int]]] = {number: set() for number in range(len(prepared.documents))}
    for split in ("train", "held_out"):
        for source, count in enumerate(prepared.num_rows(split)):
            for row in range(count):
                for document in prepared.segments(split, source, row)["document"].tolist():
                    expected[document].add((split, source, row))
    for number, places in expected.items():
        found = prepared.rows_of_document(number)
        assert set(found) == places
        assert len(found) == len(places)


def test_documents_are_found_by_their_text_or_a_part_of_it(mixed: Prepared) -> None:
    (number,) = mixed.find_document(sentence(42))
    assert mixed.tokenizer.decode(mixed.tokens(number)) == sentence(42)
    assert mixed.describe_document(number).source == "a"
    (other,) = mixed.find_document("107: ")
    assert mixed.describe_document(other).place.endswith("b.txt, line 8")
    assert mixed.find_document("no such text") == []
    assert mixed.find_document("") == []


def test_which_steps_saw_a_document(mixed: Prepared) -> None:
    batches = TrainBatches(mixed, 4, skipped=(2, 5))
    number = next(n for n in range(97) if mixed.describe_document(n).split == "train")
    rows = [(source, row) for _, source, row in mixed.rows_of_document(number)]
    seen = {step for source, row in rows for step in batches.order.steps_of(source, row, 0, 60, 4)}
    expected = set()
    for step in range(60):
        batch = batches.batch(step)
        pairs = zip(batch["source"].tolist(), batch["record"].tolist(), strict=True)
        expected |= {step} if set(rows) & set(pairs) else set()
    assert seen == expected
    assert len(seen) > 2


def test_statistics_agree_with_the_batches(mixed: Prepared) -> None:
    batches = EvalBatches(mixed, 5)
    positions = sum(int(batches.batch(index)["loss_mask"].sum()) for index in range(len(batches)))
    assert positions == sum(counts["held_out"]["positions"] for counts in mixed.statistics)
    assert 0.5 < mixed.fill("train") <= 1.0
