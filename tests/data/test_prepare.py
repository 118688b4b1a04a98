"""Preparing loses nothing and repeats nothing, is the same whenever it is interrupted, and refuses what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.config.spec import Spec
from jaxml.data.fingerprint import list_inputs
from jaxml.data.layout import VERIFIED_FILE
from jaxml.data.prepare import prepare
from jaxml.data.prepared import Prepared, open_prepared
from jaxml.data.sources import Document
from jaxml.data.spec import DataSpec, JsonlSource, TextSource
from jaxml.data.tokenise import (
    BATCH_DOCUMENTS,
    REPORT_TEXTS,
    Progress,
    hash_text,
    is_held_out,
    tokenizer_texts,
    write_shards,
)
from jaxml.errors import ConfigError, DataError
from jaxml.inputs.spec import BpeTokenizerSpec, ByteTokenizerSpec, CharTokenizerSpec, HuggingFaceTokenizerSpec
from jaxml.inputs.tokenizers import ByteTokenizer, CharTokenizer, build_tokenizer
from tests.data.conftest import sentence

Write = Callable[[str, list[str]], str]
REPOSITORY = Path(__file__).resolve().parents[2]


def lines_spec(path: str, folder: Path, **changes: Any) -> DataSpec:
    return DataSpec((TextSource(path, "line"),), str(folder / "prepared"), 16, **{"held_out": 0.2, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the one that holds inodes and times."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != VERIFIED_FILE]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def all_documents(prepared: Prepared) -> list[str]:
    return [prepared.tokenizer.decode(prepared.tokens(number)) for number in range(len(prepared.documents))]


class Killed(BaseException):
    """What a killed process looks like from inside: nothing handles it."""


def test_every_document_is_stored_once_in_order(tmp_path: Path, write_lines: Write) -> None:
    texts = [sentence(n) for n in range(400)]
    prepared = prepare(lines_spec(write_lines("a.txt", texts), tmp_path, shard_tokens=2000))
    assert all_documents(prepared) == texts
    assert len(list((tmp_path / "prepared").glob("tokens-*.bin"))) > 5
    assert prepared.documents["line"].tolist() == list(range(1, 401))
    info = prepared.describe_document(41)
    assert (info.source, info.place) == ("source0", f"{tmp_path}/a.txt, line 42")
    assert not list((tmp_path / "prepared").glob(".*"))


def test_the_held_out_split_is_by_content_and_equal_documents_stay_together(tmp_path: Path, write_lines: Write) -> None:
    texts = [sentence(n % 300) for n in range(600)]
    prepared = prepare(lines_spec(write_lines("a.txt", texts), tmp_path, seed=9))
    split = prepared.documents["split"]
    np.testing.assert_array_equal(split[:300], split[300:])
    assert 0.13 < split.mean() < 0.27
    assert split.tolist() == [int(is_held_out(hash_text(text, 9), 0.2)) for text in texts]
    assert split.tolist() != [int(is_held_out(hash_text(text, 10), 0.2)) for text in texts]


@settings(max_examples=30)
@given(low=st.floats(0, 0.9), more=st.floats(0, 0.09), text=st.text(max_size=5))
def test_a_larger_held_out_fraction_only_adds(low: float, more: float, text: str) -> None:
    assert is_held_out(hash_text(text, 0), low) <= is_held_out(hash_text(text, 0), low + more)


def test_a_lone_document_is_cut_at_the_last_fraction_of_its_characters(tmp_path: Path) -> None:
    path = REPOSITORY / "experiments" / "data" / "tinyshakespeare" / "input.txt"
    text = path.read_text()
    spec = DataSpec((TextSource(str(path)),), str(tmp_path / "prepared"), 64, CharTokenizerSpec())
    prepared = prepare(spec, vocab_size=65)
    # nanoGPT, data/shakespeare_char/prepare.py: 1,003,854 and 111,540 tokens of 65 characters.
    assert prepared.documents["length"].tolist() == [1_003_854, 111_540]
    assert prepared.tokenizer.vocab_size == 65
    characters = sorted(set(text))
    np.testing.assert_array_equal(prepared.tokens(0)[:5000], [characters.index(c) for c in text[:5000]])
    assert prepared.tokenizer.decode(prepared.tokens(1)) == text[int(len(text) * 0.9) :]
    assert prepared.num_rows("train") == (-(-1_003_853 // 64),)
    assert prepared.tokens(0).dtype == np.uint16


def test_characters_that_only_the_held_out_part_has_are_in_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd" * 50 + "é")
    spec = DataSpec((TextSource(f"{tmp_path}/a.txt"),), str(tmp_path / "prepared"), 16, CharTokenizerSpec())
    assert prepare(spec).tokenizer.decode([4]) == "é"


def interrupted(spec: DataSpec, shards: int) -> int:
    """Prepare until so many shards are done, then die; gives the documents tokenised."""
    documents = 0

    def report(progress: Progress) -> None:
        nonlocal documents
        documents = max(documents, progress.documents)
        if progress.stage == "tokenise" and progress.shards >= shards:
            raise Killed

    with pytest.raises(Killed):
        prepare(spec, progress=report)
    return documents


def test_after_a_kill_finished_shards_are_kept_and_not_tokenised_again(tmp_path: Path, write_lines: Write) -> None:
    texts = [sentence(n) for n in range(600)]
    path = write_lines("a.txt", texts)
    straight = prepare(lines_spec(path, tmp_path / "straight", shard_tokens=6000))
    spec = lines_spec(path, tmp_path / "killed", shard_tokens=6000)
    done = interrupted(spec, 3)
    assert 0 < done < len(texts)
    with pytest.raises(DataError, match="unfinished preparation"):
        open_prepared(spec)
    kept = [(tmp_path / "killed" / "prepared" / f"tokens-0000{k}.bin").stat().st_mtime_ns for k in range(3)]
    reports: list[Progress] = []
    resumed = prepare(spec, progress=reports.append)
    assert max(report.documents for report in reports) == len(texts) - done
    again = [(tmp_path / "killed" / "prepared" / f"tokens-0000{k}.bin").stat().st_mtime_ns for k in range(3)]
    assert again == kept
    assert contents(resumed.directory)["documents.npy"] == contents(straight.directory)["documents.npy"]
    assert resumed.fingerprint == straight.fingerprint


@pytest.mark.parametrize("tokenizer", [BpeTokenizerSpec(260), CharTokenizerSpec()])
def test_what_progress_raises_leaves_the_training_of_a_tokenizer(
    tmp_path: Path, write_lines: Write, tokenizer: Any
) -> None:
    spec = lines_spec(write_lines("a.txt", [sentence(n) for n in range(2 * REPORT_TEXTS)]), tmp_path)
    reported: list[int] = []

    def report(progress: Progress) -> None:
        reported.append(progress.documents)
        if progress.stage == "tokenizer" and progress.documents == REPORT_TEXTS:
            raise Killed

    with pytest.raises(Killed):
        prepare(dataclasses.replace(spec, tokenizer=tokenizer), progress=report)
    assert reported[-1] == REPORT_TEXTS
    assert not (tmp_path / "prepared" / "tokenizer").exists()
    assert prepare(dataclasses.replace(spec, tokenizer=tokenizer)).num_rows("train")


def test_a_kill_at_any_file_operation_loses_nothing(
    tmp_path: Path, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines("a.txt", [sentence(n) for n in range(1, 10)])

    def spec_in(name: str) -> DataSpec:
        return lines_spec(path, tmp_path / name, shard_tokens=150, tokenizer=CharTokenizerSpec())

    straight = prepare(spec_in("straight"))
    expected = {**contents(straight.directory), "dataset.json": b""}
    assert len([name for name in expected if name.startswith("tokens-")]) == 2
    replace = os.replace
    left = 0

    def counted(operation: Callable[..., None], *arguments: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        operation(*arguments)

    monkeypatch.setattr(os, "replace", lambda *names: counted(replace, *names))
    monkeypatch.setattr(os, "fsync", lambda descriptor: counted(lambda: None))
    for kill_at in itertools.count(1):
        left = kill_at
        with contextlib.suppress(Killed):
            prepare(spec_in(f"killed{kill_at}"))
        is_over = left > 0
        left = 0
        found = contents(prepare(spec_in(f"killed{kill_at}")).directory)
        assert json.loads(found["dataset.json"])["fingerprint"] == straight.fingerprint
        assert {**found, "dataset.json": b""} == expected
        if is_over:
            break
    assert kill_at > 30


def test_what_is_prepared_is_kept_and_opened(tmp_path: Path, write_lines: Write) -> None:
    spec = lines_spec(write_lines("a.txt", [sentence(n) for n in range(50)]), tmp_path)
    first = prepare(spec)
    before = (first.directory / "dataset.json").stat().st_mtime_ns
    reports: list[Progress] = []
    second = prepare(dataclasses.replace(spec, prefetch=0), progress=reports.append)
    assert second.fingerprint == first.fingerprint
    assert {report.stage for report in reports} == {"hash"}
    assert (first.directory / "dataset.json").stat().st_mtime_ns == before


def test_other_data_is_not_written_over_unless_forced(tmp_path: Path, write_lines: Write) -> None:
    spec = lines_spec(write_lines("a.txt", [sentence(n) for n in range(50)]), tmp_path)
    first = prepare(spec)
    other = dataclasses.replace(spec, sequence_length=8, seed=3)
    with pytest.raises(DataError, match=r"sequence_length was 16, is 8; seed was 0, is 3(.|\n)*force"):
        prepare(other)
    assert open_prepared(spec).fingerprint == first.fingerprint
    assert prepare(other, force=True).fingerprint != first.fingerprint
    with pytest.raises(DataError, match="stale data: sequence_length was 8, is 16"):
        open_prepared(spec)


def test_a_damaged_record_is_written_over_only_when_forced(tmp_path: Path, write_lines: Write) -> None:
    spec = lines_spec(write_lines("a.txt", [sentence(n) for n in range(50)]), tmp_path)
    first = prepare(spec)
    (first.directory / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="force"):
        prepare(spec)
    assert prepare(spec, force=True).fingerprint == first.fingerprint


def test_nothing_of_larger_data_is_left_when_smaller_is_written_over_it(tmp_path: Path, write_lines: Write) -> None:
    path = write_lines("a.txt", [sentence(n) for n in range(90)])
    large = lines_spec(path, tmp_path, shard_tokens=500, tokenizer=CharTokenizerSpec())
    prepare(large)
    small = dataclasses.replace(large, shard_tokens=10_000, tokenizer=ByteTokenizerSpec())
    over = contents(prepare(small, force=True).directory)
    straight = contents(prepare(dataclasses.replace(small, prepared=str(tmp_path / "straight"))).directory)
    assert {**over, "dataset.json": b""} == {**straight, "dataset.json": b""}


def test_unfinished_other_data_is_not_written_over_either(tmp_path: Path, write_lines: Write) -> None:
    spec = lines_spec(write_lines("a.txt", [sentence(n) for n in range(90)]), tmp_path, shard_tokens=3000)
    interrupted(spec, 2)
    with pytest.raises(DataError, match="seed was 0, is 1"):
        prepare(dataclasses.replace(spec, seed=1))
    prepare(spec)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path, write_lines: Write) -> None:
    spec = lines_spec(write_lines("a.txt", [sentence(n) for n in range(50)]), tmp_path)
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "tokenizer").mkdir()
    (tmp_path / "prepared" / "tokens-mine.bin").write_text("do not touch")
    for force in (False, True):
        with pytest.raises(DataError, match=r"other files: tokenizer, tokens-mine\.bin"):
            prepare(spec, force=force)
    assert sorted(item.name for item in (tmp_path / "prepared").iterdir()) == ["tokenizer", "tokens-mine.bin"]


def changed_fields(spec: DataSpec) -> list[DataSpec]:
    source = spec.sources[0]
    return [
        dataclasses.replace(spec, sequence_length=17),
        dataclasses.replace(spec, packing="best_fit"),
        dataclasses.replace(spec, packing="single"),
        dataclasses.replace(spec, held_out=0.3),
        dataclasses.replace(spec, too_long="truncate"),
        dataclasses.replace(spec, shard_tokens=100),
        dataclasses.replace(spec, seed=1),
        dataclasses.replace(spec, tokenizer=CharTokenizerSpec()),
        dataclasses.replace(spec, tokenizer=BpeTokenizerSpec(260)),
        dataclasses.replace(spec, sources=(dataclasses.replace(source, documents="paragraph"),)),
        dataclasses.replace(spec, sources=(source, dataclasses.replace(source, name="again"))),
    ]


def test_every_field_that_decides_the_bytes_makes_prepared_data_stale(tmp_path: Path, write_lines: Write) -> None:
    spec = lines_spec(write_lines("a.txt", [sentence(n) for n in range(50)]), tmp_path)
    prepare(spec)
    for changed in changed_fields(spec):
        with pytest.raises(DataError, match="stale data"):
            open_prepared(changed)
    with pytest.raises(DataError, match="labels was"):
        open_prepared(dataclasses.replace(spec, packing="single", sources=(labelled(tmp_path),)), has_labels=("a",))


def labelled(folder: Path) -> Spec:
    (folder / "l.jsonl").write_text('{"text": "x", "label": "a"}\n')
    return JsonlSource(str(folder / "l.jsonl"), label="label")


def test_fields_that_decide_no_byte_do_not(tmp_path: Path, write_lines: Write) -> None:
    path = write_lines("a.txt", [sentence(n) for n in range(50)])
    spec = lines_spec(path, tmp_path)
    prepare(spec)
    (tmp_path / "moved").mkdir()
    moved = Path(path).rename(tmp_path / "moved" / "a.txt")
    source = TextSource(str(moved), "line", name="named", weight=7)
    assert open_prepared(dataclasses.replace(spec, sources=(source,), prefetch=9)).source_names == ("named",)


def test_a_source_that_changed_is_stale_and_one_that_is_gone_is_noted(tmp_path: Path, write_lines: Write) -> None:
    texts = [sentence(n) for n in range(50)]
    path = write_lines("a.txt", texts)
    spec = lines_spec(path, tmp_path)
    prepare(spec)
    os.utime(path, (1, 1))  # touched, not changed
    assert not open_prepared(spec).notes
    write_lines("a.txt", ["X" + text[1:] for text in texts])  # of the same size
    with pytest.raises(DataError, match=r"stale data: input files of sources.0 changed \(a\.txt\)"):
        open_prepared(spec)
    with pytest.raises(DataError, match="changed"):
        prepare(spec)
    Path(path).unlink()
    assert any("cannot be reached" in note for note in open_prepared(spec).notes)
    with pytest.raises(DataError, match=r"sources\.0\.path"):
        open_prepared(dataclasses.replace(spec, sources=(TextSource(path + "x", "line"),)))


def test_inputs_are_read_again_only_when_they_were_touched(
    tmp_path: Path, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines("a.txt", [sentence(n) for n in range(50)])
    spec = lines_spec(path, tmp_path)
    prepare(spec)
    os.utime(path, (1, 1))
    prepare(spec)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("an input was read"))
    assert open_prepared(spec).num_rows("train")


def test_a_tokenizer_file_that_changed_is_stale(tmp_path: Path, write_lines: Write) -> None:
    path = write_lines("a.txt", [sentence(n) for n in range(50)])
    for size in (260, 265):
        build_tokenizer(BpeTokenizerSpec(size), [Path(path).read_text()]).save(tmp_path / f"t{size}")
    file = tmp_path / "t260" / "tokenizer.json"
    spec = lines_spec(path, tmp_path, tokenizer=HuggingFaceTokenizerSpec(str(file), eos="<|endoftext|>"))
    prepared = prepare(spec)
    assert prepared.tokens(0)[-1] == 0  # every document ends with the token that the spec names
    with pytest.raises(DataError, match=r"stale data: tokenizer\.bos was"):
        open_prepared(dataclasses.replace(spec, tokenizer=dataclasses.replace(spec.tokenizer, bos="<|endoftext|>")))
    file.write_bytes((tmp_path / "t265" / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="stale data: tokenizer file changed"):
        open_prepared(spec)


def test_short_documents_are_left_out_by_name_where_others_remain(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ["", *"abcd", "long enough"])
    )
    source = JsonlSource(f"{tmp_path}/a.jsonl")
    spec = DataSpec((source,), str(tmp_path / "prepared"), 16, CharTokenizerSpec(), held_out=0.0)
    prepared = prepare(spec)
    assert all_documents(prepared) == ["long enough"]
    (note,) = prepared.notes
    assert note.startswith(f"5 documents empty or too short, left out: {tmp_path}/a.jsonl, line 1, ")
    assert prepared.statistics[0]["dropped"] == 5
    # With an end-of-document token, one character makes two tokens.
    byte = dataclasses.replace(spec, tokenizer=ByteTokenizerSpec(), prepared=str(tmp_path / "byte"))
    assert all_documents(prepare(byte)) == [*"abcd", "long enough"]


@pytest.mark.parametrize("tokenizer", [ByteTokenizerSpec(), CharTokenizerSpec()])
@pytest.mark.parametrize("content", ["", "a"])
def test_nothing_left_to_train_on_is_refused(tokenizer: Any, content: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    spec = DataSpec((TextSource(f"{tmp_path}/a.txt"),), str(tmp_path / "prepared"), 16, tokenizer, held_out=0.0)
    if content and isinstance(tokenizer, ByteTokenizerSpec):
        assert prepare(spec).num_rows("train") == (1,)
        return
    with pytest.raises(DataError):
        prepare(spec)
    (tmp_path / "a.txt").write_text("mended, no force needed")
    assert prepare(spec).num_rows("train") == (2,)


def test_no_source_of_a_mix_is_skipped_in_silence(tmp_path: Path, write_lines: Write) -> None:
    good = TextSource(write_lines("a.txt", [sentence(n) for n in range(50)]), "line", name="good")
    empty = TextSource(write_lines("b.txt", []), "line", name="hollow")
    spec = DataSpec((good, empty), str(tmp_path / "prepared"), 16)
    with pytest.raises(DataError, match="source 'hollow'"):
        prepare(spec)
    with pytest.raises(DataError, match=r"sources\.1\.path"):
        prepare(dataclasses.replace(spec, sources=(good, dataclasses.replace(empty, path=f"{tmp_path}/none.txt"))))


def test_an_evaluation_that_was_asked_for_and_has_no_rows_is_refused(tmp_path: Path, write_lines: Write) -> None:
    path = write_lines("a.txt", ["one document", "and another"])
    with pytest.raises(DataError, match=r"data\.held_out"):
        prepare(lines_spec(path, tmp_path, held_out=1e-6))


def test_ids_outside_the_models_vocabulary_are_refused_before_and_after(tmp_path: Path, write_lines: Write) -> None:
    spec = lines_spec(write_lines("a.txt", [sentence(n) for n in range(50)]), tmp_path)
    with pytest.raises(DataError, match=r"model\.vocab_size\n  expected: at least 257"):
        prepare(spec, vocab_size=256)
    assert prepare(spec, vocab_size=257).vocab_size == 257
    with pytest.raises(DataError, match=r"model\.vocab_size"):
        open_prepared(spec, vocab_size=200)


def test_ids_that_a_tokenizer_should_not_give_are_refused(
    tmp_path: Path, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 115)
    with pytest.raises(DataError, match=r"line 1\n  expected: ids below the tokenizer's vocabulary of 115"):
        prepare(lines_spec(write_lines("a.txt", ["zzz", "aaa"]), tmp_path, held_out=0.0))


def test_large_vocabularies_are_stored_in_four_bytes(
    tmp_path: Path, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 2**16 + 1)
    prepared = prepare(lines_spec(write_lines("a.txt", ["abc", "def"]), tmp_path, held_out=0.0))
    assert prepared.tokens(1).dtype == np.uint32
    assert prepared.tokens(1).tolist() == [*b"def", 256]


def test_labels_are_numbered_in_class_order_and_unknown_ones_named(tmp_path: Path, write_lines: Write) -> None:
    rows = [json.dumps({"text": f"text {n}", "label": ("ham", "spam")[n % 3 == 0]}) for n in range(40)]
    source = JsonlSource(write_lines("a.jsonl", rows), label="label")
    spec = DataSpec((source,), str(tmp_path / "prepared"), 16, packing="single", held_out=0.2)
    prepared = prepare(spec, has_labels=("ham", "spam"))
    assert prepared.documents["label"].tolist() == [int(n % 3 == 0) for n in range(40)]
    assert prepared.num_rows("train")[0] == int((prepared.documents["split"] == 0).sum())
    write_lines("a.jsonl", [*rows, json.dumps({"text": "x", "label": "spma"})])
    with pytest.raises(DataError, match=r"a\.jsonl, line 41\n(.|\n)*'ham', 'spam'(.|\n)*did you mean 'spam'"):
        prepare(dataclasses.replace(spec, prepared=str(tmp_path / "other")), has_labels=("ham", "spam"))


def test_a_document_longer_than_a_row_is_refused_or_truncated(tmp_path: Path, write_lines: Write) -> None:
    path = write_lines("a.txt", ["short", "a" * 17, "other"])
    spec = lines_spec(path, tmp_path, packing="single", held_out=0.0)
    with pytest.raises(DataError, match=r"a\.txt, line 2\n  expected: at most 16 positions"):
        prepare(spec)
    prepared = prepare(dataclasses.replace(spec, too_long="truncate"))
    assert prepared.describe_row("train", 0, 1).segments[0].length == 16
    assert prepared.notes == ("1 documents of source 'source0' cut to 16 positions",)


def test_faults_of_the_spec_are_told_together(tmp_path: Path) -> None:
    source = TextSource("", weight=0)
    spec = DataSpec((source, source), "", 0, held_out=1.0, prefetch=-1, shard_tokens=0)
    with pytest.raises(ConfigError) as caught:
        prepare(spec, has_labels=("a", "b"))
    fields = {fault.failed for fault in caught.value.faults}
    assert fields >= {
        "data.prepared",
        "data.sequence_length",
        "data.held_out",
        "data.prefetch",
        "data.shard_tokens",
        "data.packing",
        "data.sources.0.weight",
        "data.sources.1.path",
        "data.sources.0.label",
    }


def test_an_unknown_character_names_the_document(
    tmp_path: Path, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{prepare.__module__}.build_tokenizer", lambda spec, texts: CharTokenizer("ab"))
    path = write_lines("a.txt", ["ab", "ba", "abé"])
    with pytest.raises(DataError, match=r"a\.txt, line 3: character 'é' \(U\+00E9\)"):
        prepare(lines_spec(path, tmp_path, tokenizer=CharTokenizerSpec()))


def test_documents_are_read_only_a_batch_ahead_of_their_tokens(
    tmp_path: Path, write_lines: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[write_shards.__module__]
    read, encode = module.read_documents, ByteTokenizer.encode_many
    num_read = num_encoded = ahead = 0

    def counting_read(*arguments: Any) -> Iterator[Document]:
        nonlocal num_read
        for document in read(*arguments):
            num_read += 1
            yield document

    def counting_encode(self: ByteTokenizer, texts: list[str]) -> list[np.ndarray]:
        nonlocal num_encoded, ahead
        ahead = max(ahead, num_read - num_encoded)
        num_encoded += len(texts)
        return encode(self, texts)

    monkeypatch.setattr(module, "read_documents", counting_read)
    monkeypatch.setattr(ByteTokenizer, "encode_many", counting_encode)
    prepare(lines_spec(write_lines("a.txt", [sentence(n) for n in range(900)]), tmp_path))
    assert num_encoded == 900
    assert ahead <= BATCH_DOCUMENTS + 2  # two are read to see whether the source has one document only


def test_sources_in_memory_prepare_like_files(tmp_path: Path, write_lines: Write) -> None:
    texts = [sentence(n) for n in range(50)]
    path = write_lines("a.txt", texts)
    memory = fsspec.filesystem("memory")
    memory.pipe("/jaxml-prepare/a.txt", Path(path).read_bytes())
    try:
        remote = prepare(lines_spec("memory://jaxml-prepare/a.txt", tmp_path / "m"))
        assert remote.fingerprint == prepare(lines_spec(path, tmp_path / "l")).fingerprint
        memory.pipe("/jaxml-prepare/a.txt", b"changed")
        with pytest.raises(DataError, match="stale"):
            open_prepared(remote.spec)
    finally:
        memory.rm("/jaxml-prepare", recursive=True)


def test_a_subword_vocabulary_is_learned_from_the_training_documents_alone(tmp_path: Path) -> None:
    lines = [f"line {i}" for i in range(200)]
    held_out = [line for line in lines if is_held_out(hash_text(line, 0), 0.5)]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(lines))
    spec = DataSpec(
        (TextSource(str(text), documents="line"),), str(tmp_path / "p"), 8, BpeTokenizerSpec(262), held_out=0.5
    )
    files, _ = list_inputs(spec)
    shown = list(tokenizer_texts(spec, files, False, lambda _: None))
    assert sorted(shown) == sorted(set(lines) - set(held_out))
    every = dataclasses.replace(spec, tokenizer=CharTokenizerSpec())
    assert sorted(tokenizer_texts(every, files, False, lambda _: None)) == sorted(lines)
