"""A checkpoint opens only as what was sealed: its probe, its tokenizer, its spec."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxml.checkpoint.manifest import Manifest
from jaxml.checkpoint.store import CheckpointStore
from jaxml.errors import CheckpointError
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.opening import describe_checkpoint, open_checkpoint
from tests.infer.written import write_classifier, write_language_model


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("written"))


@pytest.fixture
def copied(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def saved_with(folder: Path, copied: Path, change) -> Path:
    """The copied checkpoint saved again elsewhere, with other parameters and the same manifest."""
    with CheckpointStore(copied) as store:
        manifest = store.manifest(1)
    opened = open_checkpoint(copied)
    params = {"params": change(opened.params)}
    with CheckpointStore(folder) as store:
        store.save(1, params, manifest, opened.require_tokenizer().files())
    return folder


def test_it_describes_without_an_array_and_opens_with_its_tokenizer(written):
    described = describe_checkpoint(written)
    assert (described.name, described.step, described.model.vocab_size) == ("small", 1, 257)
    opened = open_checkpoint(written)
    assert opened.require_tokenizer().encode("hi") == [104, 105]


def test_other_weights_under_the_same_seal_are_refused(copied, tmp_path):
    """The last bit of one weight is enough on the machine that sealed it."""

    def nudged(params):
        table = np.array(params["embed"]["table"])
        table[:] = np.nextafter(table, np.inf)
        return {**params, "embed": {"table": table}}

    with pytest.raises(CheckpointError, match="logits of the probe"):
        open_checkpoint(saved_with(tmp_path / "nudged", copied, nudged))


def test_a_decoding_layout_that_gives_other_logits_is_refused(written, monkeypatch):
    from jaxml.infer import decoding_model

    real = decoding_model.unrolled_params

    def swapped(spec, params):
        params = real(spec, params)
        return {**params, "blocks": {"0": params["blocks"]["1"], "1": params["blocks"]["0"]}}

    monkeypatch.setattr(decoding_model, "unrolled_params", swapped)
    with pytest.raises(CheckpointError, match="logits of the probe"):
        LanguageModel.open(written)


def tokenizer_file(copied: Path) -> Path:
    return copied / "1" / "tokenizer" / "metadata"


def test_another_tokenizer_is_refused(copied):
    files = json.loads(tokenizer_file(copied).read_text())
    spec = json.loads(files["tokenizer_spec.json"])
    spec["spec"]["type"] = "jaxml.inputs.spec.CharTokenizerSpec"
    changed = {"tokenizer_spec.json": json.dumps(spec), "characters.json": json.dumps("abc")}
    tokenizer_file(copied).write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match="the fingerprint that is sealed"):
        open_checkpoint(copied)


@pytest.mark.parametrize("name", ["../escaped.json", "/tmp/x.json", "a/b.json", ""])
def test_a_tokenizer_file_cannot_leave_its_folder(copied, name):
    tokenizer_file(copied).write_text(json.dumps({name: "{}"}))
    with pytest.raises(CheckpointError, match="plain file names"):
        open_checkpoint(copied)


def test_a_checkpoint_without_a_tokenizer_answers_ids_and_refuses_text(copied):
    shutil.rmtree(copied / "1" / "tokenizer")
    model = LanguageModel.open(copied)
    (answer,) = model.generate([[1, 2]], temperature=0.0, max_tokens=3)
    assert len(answer.tokens) == 3
    for ask in (lambda: model.generate("text"), lambda: model.generate([[1]], stop=("x",))):
        with pytest.raises(CheckpointError, match="tokenizer of checkpoint"):
            ask()


def test_a_foreign_directory_a_changed_manifest_and_an_unknown_spec_are_named(copied, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="a folder named after a step"):
        open_checkpoint(tmp_path / "foreign")
    file = copied / "1" / "manifest" / "metadata"
    manifest = json.loads(file.read_text())
    manifest["experiment"]["model"]["width"] = 32
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="seal"):
        open_checkpoint(copied)
    del manifest["seal"]
    manifest["experiment"]["model"] = {"type": "os.system", "command": "true"}
    manifest = {**manifest, "skipped_steps": (), "lineage": (), "labels": ()}
    file.write_text(json.dumps(Manifest(**manifest).to_json()))
    with pytest.raises(CheckpointError, match="a model, a task, a precision"):
        open_checkpoint(copied)


def test_a_classifier_does_not_generate(tmp_path):
    with pytest.raises(CheckpointError, match="causal decoder"):
        LanguageModel.open(write_classifier(tmp_path))
