"""Laws of the models that the rivals share: a published Llama comes back as written, and GGUF holds what llama.cpp expects."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.gguf_llama import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNMERGED,
    interleaved,
    tensors_of,
    vocabulary,
    write_gguf,
)
from benchmarks.published import llama_config, llama_shapes, random_llama, read, write
from jaxml.checkpoint.hf import PublishedWeights, read_config
from jaxml.models.cost import num_parameters
from jaxml.models.families.llama import spec_from_config, tensors

TINY = llama_config(vocab_size=300, context=16, width=12, layers=2, heads=3, kv_heads=1, mlp_width=20)


def test_a_written_llama_is_what_jaxml_imports(tmp_path):
    random = random_llama(TINY)
    write(tmp_path, TINY, random)
    spec = spec_from_config(read_config(tmp_path))
    assert {tensor.name: tensor.shape for tensor in tensors(spec)} == llama_shapes(TINY)
    assert num_parameters(spec) == sum(tensor.size for tensor in random.values())
    with PublishedWeights(tmp_path) as weights:
        for name, tensor in random.items():
            np.testing.assert_array_equal(weights.read(name), tensor)


def test_a_written_llama_is_read_back(tmp_path):
    random = random_llama(TINY)
    config, found = read(write(tmp_path / "new", TINY, random))
    assert config == TINY
    assert list(found) == list(random)
    for name, tensor in random.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_other_dtypes_are_refused(tmp_path):
    write(tmp_path, TINY, {"model.norm.weight": np.ones(12, np.float32)})
    place = tmp_path / "model.safetensors"
    place.write_bytes(place.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is I32, expected F32"):
        read(tmp_path)


def test_neighbouring_rotary_pairs_give_the_scores_of_halves():
    draw = np.random.default_rng(0)
    heads, width, features = 3, 8, 5
    angle = draw.uniform(size=width // 2)
    query, key = (draw.standard_normal((heads * width, features)) for _ in range(2))
    x, y = draw.standard_normal(features), draw.standard_normal(features)

    def turned(vector: np.ndarray, first: slice, second: slice) -> np.ndarray:
        out = vector.copy()
        a, b = vector[:, first], vector[:, second]
        out[:, first], out[:, second] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return out

    halves, pairs = (slice(0, 4), slice(4, 8)), (slice(0, None, 2), slice(1, None, 2))
    expected = turned((query @ x).reshape(heads, width), *halves) * (key @ y).reshape(heads, width)
    swapped_query, swapped_key = interleaved(query, heads), interleaved(key, heads)
    got = turned((swapped_query @ x).reshape(heads, width), *pairs) * (swapped_key @ y).reshape(heads, width)
    np.testing.assert_allclose(got.sum(1), expected.sum(1), rtol=1e-12)


def test_every_tensor_has_a_name_of_its_own_and_only_queries_and_keys_change():
    random = random_llama(TINY)
    found = tensors_of(TINY, random)
    assert len(found) == len(random)
    assert found["token_embd.weight"] is random["model.embed_tokens.weight"]
    assert found["blk.1.attn_v.weight"] is random["model.layers.1.self_attn.v_proj.weight"]
    query = random["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(found["blk.1.attn_q.weight"][:4], query[[0, 2, 1, 3]])


def test_scores_follow_the_merges_and_types_the_role_of_a_token():
    tokenizer = {
        "added_tokens": [{"content": text, "special": True} for text in ("<unk>", "<s>")],
        "model": {
            "vocab": {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "ab": 3, "abc": 4, "a": 5, "b": 6, "c": 7},
            "merges": [["a", "b"], "ab c"],
        },
    }
    texts, scores, types = vocabulary(tokenizer, 8)
    assert texts == ["<unk>", "<s>", "<0x0A>", "ab", "abc", "a", "b", "c"]
    assert scores == [UNMERGED, UNMERGED, UNMERGED, 0.0, -1.0, UNMERGED, UNMERGED, UNMERGED]
    assert types == [UNKNOWN, CONTROL, BYTE, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL]


def test_an_invented_vocabulary_has_the_size_and_no_text_twice():
    texts, scores, types = vocabulary(None, 300)
    assert len(texts) == len(set(texts)) == len(scores) == len(types) == 300
    assert types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE]


def test_the_file_holds_the_tensors_and_what_llama_cpp_reads(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is in the environment of `nox -s peers`")
    random = random_llama(TINY)
    write(tmp_path, TINY, random)
    reader = gguf.GGUFReader(write_gguf(tmp_path, tmp_path / "tiny.gguf"))
    expected = tensors_of(TINY, random)
    assert {tensor.name for tensor in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        np.testing.assert_array_equal(
            np.asarray(tensor.data).reshape(expected[tensor.name].shape), expected[tensor.name]
        )
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["llama.attention.head_count_kv"] == 1
    assert fields["llama.rope.dimension_count"] == 4
    assert fields["tokenizer.ggml.tokens"][1] == "<s>"
    assert fields["tokenizer.ggml.add_bos_token"] is True


def test_the_stories_keep_their_vocabulary(assets, tmp_path):
    tokenizer = json.loads((assets / "stories260k-hf" / "tokenizer.json").read_text())
    texts, scores, types = vocabulary(tokenizer, 512)
    assert texts[259:261] == ["▁t", "he"]
    assert scores[259:261] == [0.0, -1.0]
    assert types.count(BYTE) == 256
