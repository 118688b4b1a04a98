"""Reading published directories: whole, in shards, in half precision; and every way in which one can be wrong."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxml import trees
from jaxml.checkpoint.hf import INDEX_FILE, Header, PublishedWeights, check_tensors, read_config
from jaxml.errors import CheckpointError
from jaxml.models.families.tensors import PublishedTensor
from tests.models.families.tiny import CONFIG, random_tensors, write

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16), "c": np.zeros(2, np.float32)}
EXPECTED = (PublishedTensor("a", (2, 3), "a"), PublishedTensor("b", (4,), "b"))
NOTHING = re.compile("(?!)")


def faults_of(directory: Path) -> list[str]:
    with pytest.raises(CheckpointError) as raised, PublishedWeights(directory):
        pass
    return [f"{fault.failed}: {fault.got}" for fault in raised.value.faults]


def edit_index(directory: Path, **places: str) -> None:
    file = directory / INDEX_FILE
    index = json.loads(file.read_text())
    index["weight_map"].update(places)
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_headers_and_values_are_those_that_were_written_whole_or_in_shards(tmp_path, num_shards):
    written = random_tensors(CONFIG)
    with PublishedWeights(write(tmp_path, CONFIG, written, num_shards)) as weights:
        assert {name: header.shape for name, header in weights.headers.items()} == {
            name: value.shape for name, value in written.items()
        }
        assert trees.compare(written, {name: weights.read(name) for name in weights.headers}) == []
        assert len({header.file for header in weights.headers.values()}) == num_shards


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_keep_the_dtype_of_the_file(tmp_path, dtype):
    value = (np.arange(6) / 7).astype(dtype)
    name = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[np.dtype(dtype).name]
    header = json.dumps({"x": {"dtype": name, "shape": [6], "data_offsets": [0, value.nbytes]}}).encode()
    content = struct.pack("<Q", len(header)) + header + value.tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    with PublishedWeights(tmp_path) as weights:
        assert weights.headers["x"] == Header("model.safetensors", (6,), np.dtype(dtype).name)
        read = weights.read("x")
    assert read.dtype == dtype
    assert read.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "place", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "m.bin", "a\\b.safetensors", ""]
)
def test_an_index_cannot_name_a_file_that_is_not_a_plain_safetensors_file_of_the_directory(tmp_path, place):
    outside = write(tmp_path / "outside", CONFIG, TENSORS)
    inside = write(outside / "inside", CONFIG, TENSORS, num_shards=2)
    edit_index(inside, a=place)
    assert faults_of(inside) == [f"{INDEX_FILE}: weight_map: {place!r}"]


def test_every_missing_shard_is_named(tmp_path):
    write(tmp_path, CONFIG, TENSORS, num_shards=3)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    assert faults_of(tmp_path) == [
        "shard model-00001-of-00003.safetensors: a missing file",
        "shard model-00003-of-00003.safetensors: a missing file",
    ]


def test_an_index_that_disagrees_with_its_shards_is_refused_tensor_by_tensor(tmp_path):
    write(tmp_path, CONFIG, TENSORS, num_shards=3)
    edit_index(tmp_path, a="model-00002-of-00003.safetensors", ghost="model-00001-of-00003.safetensors")
    assert faults_of(tmp_path) == ["tensor a: model-00001-of-00003.safetensors", "tensor ghost: in no shard"]


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', "[]", "{", "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path, content):
    (tmp_path / INDEX_FILE).write_text(content)
    assert len(faults_of(tmp_path)) == 1


@pytest.mark.parametrize("cut", [0, 4, 40, -1])
def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path, cut):
    file = write(tmp_path, CONFIG, TENSORS) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    assert "SafetensorError" in faults_of(tmp_path)[0]


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    file = write(tmp_path, CONFIG, TENSORS) / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**40) + file.read_bytes()[8:])
    assert "SafetensorError" in faults_of(tmp_path)[0]


def test_all_damaged_shards_are_named(tmp_path):
    write(tmp_path, CONFIG, TENSORS, num_shards=3)
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").write_bytes(b"x")
    assert len(faults_of(tmp_path)) == 2


def test_pickles_are_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (tmp_path / "config.json").write_text("{}")
    assert faults_of(tmp_path) == [
        f"weights in {tmp_path}: pickles, which are code: ['pytorch_model.bin']",
    ]


def test_a_directory_without_weights_says_what_is_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert faults_of(tmp_path) == [f"weights in {tmp_path}: other files: config.json"]


def test_every_missing_unexpected_and_misshapen_tensor_is_named_at_once(tmp_path):
    odd = {"a": TENSORS["a"].T.copy(), "c": TENSORS["c"], "n": np.ones(2, np.int64)}
    safetensors.numpy.save_file(odd, tmp_path / "model.safetensors")
    expected = (*EXPECTED, PublishedTensor("n", (2,), "n"))
    with PublishedWeights(tmp_path) as weights, pytest.raises(CheckpointError) as raised:
        check_tensors(weights.headers, expected, NOTHING, {})
    assert [(fault.failed, fault.got) for fault in raised.value.faults] == [
        ("shape of tensor a", "[3, 2]"),
        ("tensor b", "no such tensor"),
        ("tensor c", "float32[2] in model.safetensors"),
        ("dtype of tensor n", "I64"),
    ]


def test_what_a_family_does_not_need_is_listed_and_not_refused():
    headers = {tensor.name: Header("f", tensor.shape, "float16") for tensor in EXPECTED}
    headers |= {"old.inv_freq": Header("f", (2,), "float32"), "head": Header("f", (2, 3), "float16")}
    assert check_tensors(headers, EXPECTED, re.compile(r"old\..*"), {"head": "a"}) == ("head", "old.inv_freq")
    with pytest.raises(CheckpointError, match="tensor head"):
        check_tensors(headers, EXPECTED, re.compile(r"old\..*"), {"head": "another"})


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_a_config_that_is_no_object_is_refused_by_its_path(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_place_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nothing there"):
        read_config(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file"):
        read_config(tmp_path / "file")
