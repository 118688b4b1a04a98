"""`jaxml quantize`: what it writes serves and is sealed, what loses too much is not written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxml import trees
from jaxml.checkpoint.store import CheckpointStore
from jaxml.cli import main as command
from jaxml.cli.quantize import main
from jaxml.config.spec import from_json
from jaxml.errors import CheckpointError, ConfigError
from jaxml.infer.evaluation import evaluate_text
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.opening import Opened, open_checkpoint
from jaxml.infer.request import Sampling
from jaxml.infer.scoring import score
from jaxml.models.spec import DecoderSpec
from jaxml.recipes.agreement import compare, pieces_of_run, pieces_of_text
from jaxml.recipes.quantized import QuantizedModel
from tests.infer.written import write_classifier, write_language_model
from tests.recipes.conftest import NOWHERE

TEXT = "The fox saw the dog, and the dog saw the fox; neither of the two ran. " * 3


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "held-out.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(autouse=True)
def _known_verb(monkeypatch) -> None:
    monkeypatch.setitem(command.VERBS, "quantize", ("quantize", "", ""))


def quantize(source: Path, out: Path, scheme: str, *more: str) -> dict:
    return main([str(source), "--scheme", scheme, "--out", str(out), *more])[0]


@pytest.fixture(scope="module", params=["int8", "int8-weights"])
def made(request, source, text, tmp_path_factory) -> tuple[Path, dict]:
    """A quantized checkpoint and its report."""
    out = tmp_path_factory.mktemp("made") / request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(command.VERBS, "quantize", ("quantize", "", ""))
        return out, quantize(source, out, request.param, "--text", str(text))


def test_it_opens_as_what_it_is_and_its_report_is_sealed_in_it(made, source):
    out, report = made
    opened, before = open_checkpoint(out), open_checkpoint(source)
    assert isinstance(opened.model, DecoderSpec)
    assert opened.model.quantization == report["scheme"] == out.name
    assert dataclasses.replace(opened.model, quantization=None) == before.model
    assert isinstance(from_json(opened.manifest.experiment), QuantizedModel)
    assert opened.manifest.lineage[-1]["source_seal"] == before.manifest.seal
    assert opened.manifest.seal == report["seal"]
    metrics = {name: value for name, value in report.items() if isinstance(value, int | float)}
    assert opened.manifest.metrics == metrics
    assert report["bytes_before"] == trees.num_bytes(before.params)
    assert report["bytes_after"] == trees.num_bytes(opened.params) < 0.35 * report["bytes_before"]
    assert str(out) not in json.dumps(opened.manifest.to_json())


def test_its_numbers_are_those_of_the_two_models_measured_alone(made, source):
    out, report = made
    opened, before = open_checkpoint(out), open_checkpoint(source)
    for model, name in ((before, "before"), (opened, "after")):
        assert report[f"perplexity_{name}"] == pytest.approx(evaluate_text(model, TEXT).perplexity, rel=1e-5)
    assert report["num_tokens"] == len(TEXT) - 1
    assert 0 < report["largest_logit_error"] < 1
    assert 0.9 < report["greedy_agreement"] <= 1
    assert abs(report["perplexity_increase"]) < 0.05


def test_it_generates_what_its_own_full_forward_pass_finds_most_likely(made):
    """Or, where rounding of the two differs, what is nearly as likely there."""
    out, _ = made
    model = LanguageModel.open(out)
    answers = model.generate(["The fox", "A dog sat"], Sampling(temperature=0.0, max_tokens=12, num_logprobs=0))
    for prompt, answer in zip(["The fox", "A dog sat"], answers, strict=True):
        ids = [*model.encode(prompt), *answer.tokens]
        wanted = score(model.opened, [ids])[0][-len(answer.tokens) :]
        got = [item.logprob for item in answer.logprobs]
        np.testing.assert_allclose(got, wanted, atol=0.02)


def test_a_changed_weight_does_not_open(made, tmp_path):
    opened = open_checkpoint(made[0])
    params = jax.tree.map(np.array, opened.params)
    params["blocks"]["0"]["mlp"]["down"]["values"][0, 0, :4] ^= 1
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"params": params}, opened.manifest, opened.require_tokenizer().files())
    with pytest.raises(CheckpointError, match="logits of the probe"):
        open_checkpoint(tmp_path)


def test_a_loss_beyond_the_limit_is_refused_and_nothing_is_written(source, text, tmp_path, monkeypatch):
    from jaxml.recipes import quantizing

    real = quantizing.quantized_params

    def spoiled(bound, params):
        made = real(bound, params)
        return {**made, "final_norm": jax.tree.map(lambda leaf: 3 * leaf, made["final_norm"])}

    monkeypatch.setattr(quantizing, "quantized_params", spoiled)
    out = tmp_path / "out"
    words = ["quantize", str(source), "--scheme", "int8", "--out", str(out), "--text", str(text), "--json"]
    assert command.main(words) == 1
    assert not out.exists()
    with pytest.raises(CheckpointError, match=r"at most 5 % above .*\n.*nothing is written"):
        quantize(source, out, "int8", "--text", str(text))
    assert quantize(source, out, "int8", "--text", str(text), "--max-perplexity-increase", "1e9")["num_tokens"] > 0


def test_what_cannot_be_quantized_is_refused_by_name(made, source, text, tmp_path):
    words = ("--text", str(text))
    with pytest.raises(CheckpointError, match="floating-point weights"):
        quantize(made[0], tmp_path / "a", "int8", *words)
    with pytest.raises(CheckpointError, match="new or empty directory"):
        quantize(source, made[0], "int8", *words)
    with pytest.raises(CheckpointError, match="causal language model"):
        quantize(write_classifier(tmp_path / "classifier"), tmp_path / "a", "int8", *words)
    with pytest.raises(ConfigError, match="at least 0"):
        quantize(source, tmp_path / "a", "int8", *words, "--max-perplexity-increase", "-1")
    assert not (tmp_path / "a").exists()


def test_a_long_text_is_cut_and_every_token_counted_once(source):
    opened: Opened = open_checkpoint(source)
    long = TEXT * 4
    pieces = pieces_of_text(opened, long, 700)
    assert sum(piece.num_counted for piece in pieces) == 700
    counted = np.concatenate([piece.ids[piece.counted_from :] for piece in pieces])
    assert counted.tolist() == list(long[1:701].encode())
    same = compare(opened, opened, pieces)
    assert (same.greedy_agreement, same.largest_logit_error, same.perplexity_increase) == (1.0, 0.0, 0.0)
    assert same.perplexity_before == pytest.approx(evaluate_text(opened, long[:701]).perplexity, rel=1e-5)


def test_without_a_text_it_is_judged_on_what_the_run_held_out(straight, tmp_path):
    sealed = open_checkpoint(straight.run_dir).manifest.metrics
    num_tokens = int(sealed["eval_num_tokens"])  # the run's evaluation takes the first batches of its split
    report = quantize(straight.run_dir, tmp_path / "out", "int8", "--max-tokens", str(num_tokens))
    assert report["perplexity_before"] == pytest.approx(np.exp(sealed["eval_loss"]), rel=1e-5)
    assert report["num_tokens"] == num_tokens
    few = pieces_of_run(open_checkpoint(straight.run_dir), 10, NOWHERE)
    assert sum(piece.num_counted for piece in few) == 10
    with pytest.raises(ConfigError, match="--text"):
        pieces_of_run(open_checkpoint(tmp_path / "out"), 10, NOWHERE)
