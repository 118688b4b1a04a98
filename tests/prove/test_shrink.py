"""The small copy keeps the pieces, the ratios, what cuts and what divides; and its data is of the same kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxml.data.spec import JsonlSource, TableSource, TextSource
from jaxml.devices.spec import MeshSpec
from jaxml.inputs.spec import BpeTokenizerSpec, HuggingFaceTokenizerSpec
from jaxml.models.presets import gpt2_124m, llama_1b
from jaxml.models.spec import AttentionSpec, BlockSpec, ExecutionSpec, MlpSpec, RopeSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.prove.meshes import STANDARD, mesh_name, own_mesh
from jaxml.prove.shrink import ROWS, Small, _attention, _decoder, _execution, _tokenizer, _tokens, _train
from jaxml.prove.slices import NUM_DOCUMENTS, PIECE_CHARACTERS, WHOLE_CHARACTERS, sliced_sources
from jaxml.train.spec import TrainSpec
from tests.prove.conftest import packed_experiment


def test_every_field_that_changed_is_told(small: Small) -> None:
    told = "\n".join(small.changes)
    for line in ("model.vocab_size: 99 -> 59", "train.batch_size: 4 -> 24", "data.held_out: 0.1 -> 0.2"):
        assert line in told
    assert "precision.params: 'float32' -> 'float64'" in told
    assert "weight" not in told


def test_what_decides_how_a_step_is_computed_stays(small: Small, tmp_path: Path) -> None:
    before, after = packed_experiment(tmp_path), small.experiment
    assert after.model.blocks == before.model.blocks
    assert after.optimizer.rule == before.optimizer.rule
    assert (after.task, after.data.packing) == (before.task, before.data.packing)
    assert [source.weight for source in after.data.sources] == [2, 1]
    assert after.precision == PrecisionSpec("float64", "float64")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "small"),
    [
        (4, 4, (4, 4)),
        (12, 12, (4, 4)),
        (9, 9, (3, 3)),
        (32, 8, (8, 2)),
        (8, 1, (8, 1)),
        (32, 1, (8, 1)),
        (6, 2, (6, 2)),
    ],
)
def test_heads_keep_their_ratio_and_whether_two_divides_them(heads: int, kv_heads: int, small: tuple[int, int]) -> None:
    spec = _attention(AttentionSpec(heads, kv_heads, 64, rope=RopeSpec()), 128, 32)
    assert (spec.num_heads, spec.num_kv_heads) == small
    assert spec.head_width == 8


def test_a_window_that_cut_still_cuts_and_one_that_did_not_does_not() -> None:
    assert _attention(AttentionSpec(2, 2, 8, window=64), 128, 32).window == 16
    assert _attention(AttentionSpec(2, 2, 8, window=127), 128, 32).window == 31
    assert _attention(AttentionSpec(2, 2, 8, window=256), 128, 32).window == 64
    assert _attention(AttentionSpec(2, 2, 8, window=5), 24, 24).window == 5


def test_widths_vocabulary_and_tokens_keep_their_rest_by_eight() -> None:
    spec = _decoder(gpt2_124m(), 1024, 32, 61)
    assert (spec.width % 8, spec.blocks[0].mlp.width % 8, spec.vocab_size % 8) == (0, 0, 50_257 % 8)
    assert spec.vocab_size >= 61
    assert [_tokens(own) for own in (24, 128, 63, 1024)] == [24, 32, 31, 32]


def test_every_kind_of_block_stays_and_a_long_pattern_is_told_once_each() -> None:
    attention = AttentionSpec(2, 2, 8)
    kinds = tuple(BlockSpec(replace(attention, window=window), MlpSpec(8)) for window in (4, 8, None))
    spec = replace(llama_1b(), num_layers=24, blocks=kinds * 4)
    small = _decoder(spec, 32, 32, 50)
    assert small.blocks == kinds
    assert small.num_layers == 3
    assert _decoder(replace(spec, blocks=kinds), 32, 32, 50).num_layers == 6


def test_rows_are_split_evenly_by_every_mesh_and_by_the_microbatches() -> None:
    for accumulate in (1, 2, 3, 4, 16):
        small = _train(TrainSpec(steps=100, batch_size=16, accumulate=accumulate))
        for mesh in STANDARD:
            assert small.batch_size % (mesh.data * mesh.fsdp * small.accumulate) == 0
        assert small.batch_size % ROWS == 0


def test_a_loss_in_chunks_stays_one_and_a_kernel_of_an_accelerator_is_left_to_the_backend(tmp_path: Path) -> None:
    experiment = packed_experiment(tmp_path)
    train = _train(experiment.train)
    whole = _execution(experiment, train, 24, 60)
    assert whole.logits_chunk_bytes == experiment.execution.logits_chunk_bytes
    chunked = replace(experiment, execution=ExecutionSpec(logits_chunk_bytes=1000, attention="cudnn"))
    small = _execution(chunked, train, 24, 60)
    assert small.logits_chunk_bytes == 24 * 24 * 60 * 8 // 3
    assert small.attention == "auto"


def test_own_meshes_fit_eight_devices() -> None:
    assert mesh_name(own_mesh(MeshSpec())) == "data=8"
    assert mesh_name(own_mesh(MeshSpec(data=16, fsdp=64))) == "data=2 fsdp=4"
    assert mesh_name(own_mesh(MeshSpec(data=-1, context=2, tensor=2))) == "data=2 context=2 tensor=2"
    assert mesh_name(own_mesh(MeshSpec(data=5))) == "data=4"


def test_trained_vocabularies_shrink_and_large_published_ones_are_replaced() -> None:
    published = HuggingFaceTokenizerSpec("tokenizer.json", eos="</s>")
    assert _tokenizer(BpeTokenizerSpec(4000), 4000) == BpeTokenizerSpec(320)
    assert _tokenizer(published, 32_000) == BpeTokenizerSpec(320)
    assert _tokenizer(published, 512) == published


def long_text(number: int) -> str:
    """5,000 characters, no two stretches of which are the same."""
    return " ".join(str(number * 1000 + count) for count in range(1200))


def test_one_document_stays_one_and_several_become_enough(tmp_path: Path) -> None:
    (tmp_path / "whole.txt").write_text("w" * 50_000)
    for number in range(3):
        (tmp_path / f"part{number}.txt").write_text(long_text(number))
    whole, parts = sliced_sources(
        (TextSource(str(tmp_path / "whole.txt")), TextSource(str(tmp_path / "part*.txt"), weight=3)), tmp_path / "small"
    )
    assert Path(str(whole.path)).read_text() == "w" * WHOLE_CHARACTERS
    assert len(parts.path) == NUM_DOCUMENTS
    texts = [Path(file).read_text() for file in parts.path]
    assert texts[:3] == [long_text(number)[:PIECE_CHARACTERS] for number in range(3)]
    assert texts[3] == long_text(0)[PIECE_CHARACTERS : 2 * PIECE_CHARACTERS]
    assert parts.weight == 3


def test_lines_tables_and_json_keep_their_form_their_labels_and_their_characters(tmp_path: Path) -> None:
    rows = [("ham", 'a "quoted" text, with a comma'), ("spam", "zwei\u2028Zeilen, a line separator kept")]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text, "kind": label}) for label, text in rows))
    (tmp_path / "b.tsv").write_text("".join(f"{label}\tx\t{text}\n" for label, text in rows), encoding="utf-8")
    json_source, table = sliced_sources(
        (
            JsonlSource(str(tmp_path / "a.jsonl"), text="body", label="kind"),
            TableSource(str(tmp_path / "b.tsv"), label="label", columns=("label", "other", "text")),
        ),
        tmp_path / "small",
    )
    read = [json.loads(line) for line in Path(str(json_source.path)).read_text(encoding="utf-8").split("\n")]
    assert [(row["kind"], row["body"]) for row in read] == rows
    cells = [line.split("\t") for line in Path(str(table.path)).read_text(encoding="utf-8").split("\n")[:2]]
    assert cells == [[label, "", text] for label, text in rows]
