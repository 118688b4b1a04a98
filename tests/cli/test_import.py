"""import, score and eval as a user types them, on a small published Llama."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxml.cli.main import main
from tests.models.families.tiny import CONFIG, random_tensors, write

TOKENS = ("the", "a", "cat", "dog", "sat", "ran", "on", "mat", "far", ".", "<s>")
WORDS = {word: number for number, word in enumerate(TOKENS)}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama over whole words, with a key that does not matter and a tensor that is not needed."""
    tensors = random_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    directory = write(tmp_path_factory.mktemp("hf") / "small-llama", CONFIG, tensors)
    library = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="."))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>"])
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    return directory


@pytest.fixture(scope="module")
def checkpoint(published: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("out") / "checkpoint")
    assert main(["import", str(published), "--out", out]) == 0
    return out


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiled programs belong to the suite's cache, not to the user's.
    monkeypatch.setattr("jaxml.devices.start.use_compilation_cache", lambda directory: None)


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    out = capsys.readouterr().out.strip().splitlines()
    assert len(out) == 1, "with --json, stdout is one object"
    return json.loads(out[0])


def test_import_reports_what_it_took_and_what_it_left(published, tmp_path, capsys):
    assert main(["import", str(published), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "(llama)" in shown and "float32; stored as float32" in shown and "11 filled from 20 tensors" in shown
    assert "unused: lm_head.weight" in shown and "no logit: use_cache" in shown and "11 ids, bos 10" in shown
    assert main(["import", str(published), "--out", str(tmp_path / "out"), "--json"]) == 1
    assert last_json(capsys)["error"] == "CheckpointError"


def test_inspect_shows_an_imported_model(checkpoint, capsys):
    assert main(["inspect", checkpoint, "--json"]) == 0
    experiment = last_json(capsys)["manifest"]["experiment"]
    assert (experiment["name"], experiment["family"]) == ("small-llama", "llama")


def test_score_and_eval_of_one_text_agree(checkpoint, tmp_path, capsys):
    text = "the cat sat on a mat"
    (tmp_path / "text.txt").write_text(text)
    assert main(["score", checkpoint, "--text", text, "--json"]) == 0
    scored = last_json(capsys)
    assert scored["tokens"] == [WORDS[word] for word in text.split()]
    assert len(scored["logprobs"]) == 6
    assert scored["sum"] == pytest.approx(sum(scored["logprobs"]))
    assert scored["mean"] == pytest.approx(scored["sum"] / 6)
    assert main(["score", checkpoint, "--file", str(tmp_path / "text.txt"), "--json"]) == 0
    assert last_json(capsys) == scored
    assert main(["eval", checkpoint, "--text", str(tmp_path / "text.txt"), "--json"]) == 0
    evaluated = last_json(capsys)
    assert (evaluated["num_tokens"], evaluated["num_bytes"], evaluated["num_windows"]) == (6, 20, 1)
    assert evaluated["loss"] == pytest.approx(-scored["mean"])


def test_eval_of_a_set_says_accuracy_and_standard_error(checkpoint, tmp_path, capsys):
    items = [{"query": "the cat", "choices": ["sat", "ran far"], "gold": gold} for gold in (0, 1, 1)]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, items)))
    assert main(["eval", checkpoint, "--set", str(tmp_path / "set.jsonl"), "--json"]) == 0
    found = last_json(capsys)
    assert found["num_items"] == 3
    assert found["accuracy"] in (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert found["accuracy_standard_error"] == pytest.approx((2 / 9 / 2) ** 0.5)
    assert main(["eval", checkpoint, "--set", str(tmp_path / "set.jsonl"), "--limit", "1", "--json"]) == 0
    assert last_json(capsys)["accuracy_standard_error"] is None, "JSON has no NaN"
    assert main(["eval", checkpoint, "--set", str(tmp_path / "set.jsonl")]) == 0
    assert "accuracy_per_character 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "exit_code", "named"),
    [
        (["eval"], 1, "--text, or a set with --set"),
        (["eval", "--limit", "3"], 2, "--limit"),
        (["eval", "--set", "SET", "--stride", "3"], 2, "--stride"),
        (["eval", "--set", "SET", "--max-tokens", "3"], 2, "--max-tokens"),
        (["eval", "--text", "BINARY"], 1, "UTF-8"),
        (["eval", "--text", "ABSENT"], 1, "ABSENT"),
        (["score", "--text", "the " * 10], 2, "shorten it by 2"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(checkpoint, tmp_path, monkeypatch, capsys, words, exit_code, named):
    monkeypatch.chdir(tmp_path)
    Path("SET").write_text(json.dumps({"query": "the", "choices": ["cat", "dog"], "gold": 0}))
    Path("BINARY").write_bytes(b"\xff\x00")
    assert main([words[0], checkpoint, *words[1:]]) == exit_code
    assert named in capsys.readouterr().err
