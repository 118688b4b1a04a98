"""What a whole proof writes and returns, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxml.data.batches import EvalBatches
from jaxml.errors import ConfigError, RunError
from jaxml.prove import evaluation
from jaxml.prove.claims import Claim, Parting, Picture
from jaxml.prove.lowering import FORBIDDEN
from jaxml.prove.meshes import STANDARD
from jaxml.prove.page import render_page
from jaxml.prove.prove import prove, proving
from jaxml.prove.report import Proof, print_table
from tests.prove.conftest import packed_experiment


def test_a_proof_writes_its_table_its_json_and_its_page_and_a_failure_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, words = packed_experiment(tmp_path / "data"), io.StringIO()
    good = prove(experiment, tmp_path / "proof", only=("evaluated",), wants_float32=False, stream=words)
    assert good.is_passed
    told = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert told["verdict"] == "pass"
    assert [claim["verdict"] for claim in told["claims"]] == ["pass", "pass"]
    assert {"name", "error", "bound", "verdict"} <= set(told["claims"][0])
    assert "evaluation counts each record once" in words.getvalue()
    assert "precision: float64 in the place of yours" in words.getvalue()
    page = (tmp_path / "proof" / "proof.html").read_text()
    assert "2 of 2" in page
    monkeypatch.setattr(EvalBatches, "__len__", lambda self: int(self._ends[-1]) // self.batch_size)
    words = io.StringIO()
    bad = prove(experiment, tmp_path / "proof", only=("evaluated",), wants_float32=False, stream=words)
    assert not bad.is_passed
    assert bad.claims[0].name == "record ids"
    assert "counted 0 times" in words.getvalue()
    assert json.loads((tmp_path / "proof" / "proof.json").read_text())["verdict"] == "fail"


@pytest.mark.parametrize(
    "error",
    [RunError("reading", expected="a", got="b", todo="c"), jax.errors.JaxRuntimeError("cannot be compiled")],
    ids=["ours", "xla"],
)
def test_a_claim_that_ends_in_an_error_has_failed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> Claim:
        raise error

    monkeypatch.setattr(evaluation, "counted", refuse)
    experiment, words = packed_experiment(tmp_path / "data"), io.StringIO()
    found = prove(experiment, tmp_path / "p", only=("evaluated",), wants_float32=False, stream=words)
    assert [claim.verdict for claim in found.claims] == ["fail", "pass"]
    assert found.claims[0].group == evaluation.GROUP
    assert found.claims[0].detail.startswith(type(error).__name__)
    assert json.loads((tmp_path / "p" / "proof.json").read_text())["claims"][0]["error"] is None


def test_a_mistake_in_the_code_ends_the_proof_and_nothing_is_called_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any) -> Claim:
        raise TypeError("takes one argument")

    monkeypatch.setattr(evaluation, "counted", mistaken)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "proof.json").write_text("{}")
    with pytest.raises(TypeError, match="one argument"):
        prove(packed_experiment(tmp_path / "data"), tmp_path / "p", only=("evaluated",), stream=io.StringIO())
    assert not (tmp_path / "p" / "proof.json").exists()


def test_float64_and_quick_compiles_end_with_the_proof() -> None:
    before = jax.config.values["jax_enable_x64"]
    try:
        jax.config.update("jax_enable_x64", False)
        with proving():
            assert jax.numpy.ones(1).dtype == "float64"
        assert jax.numpy.ones(1).dtype == "float32"
    finally:
        jax.config.update("jax_enable_x64", before)


def test_an_unknown_claim_and_a_directory_of_something_else_are_refused(tmp_path: Path) -> None:
    experiment = packed_experiment(tmp_path / "data")
    with pytest.raises(ConfigError, match="sharded, accumulated"):
        prove(experiment, tmp_path / "p", only=("shard",))
    with pytest.raises(RunError, match="another --out"):
        prove(experiment, tmp_path / "data")
    assert (tmp_path / "data" / "a.txt").exists()


def test_the_page_draws_every_claim_and_escapes_what_it_is_told() -> None:
    claims = (
        Claim("sharded", "data=8", 2e-15, 1e-9, "<b>", 3e-6),
        Claim(
            "sharded", "fsdp=8", 0.3, 1e-9, parting=Parting("query, layer 0", "jaxml/x.py, line 1", 0.3),
            pictures=(Picture("Where <i>", "error", (("error", ((0.0, 1e-17), (1.0, 0.3))),)),),
        ),
        Claim("resumed", "kills", 0.0, 0.0),
    )  # fmt: skip
    proof = Proof("a<script>", claims, ("<rule>",), ("x: 1 -> 2",), ("note",), 12.0)
    page = render_page(proof, STANDARD)
    assert "<script" not in page.replace("default-src", "")
    assert "&lt;b&gt;" in page
    assert "&lt;rule&gt;" in page
    assert page.count('class="dot pass"') == 1
    assert page.count('class="dot fail"') == 1
    assert page.count("devices</figcaption>") == len(STANDARD)
    assert "first parts at query, layer 0, made by jaxml/x.py, line 1" in page
    words = io.StringIO()
    print_table(proof.claims, words)
    assert "first parts at query, layer 0" in words.getvalue()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('%c = f32[] custom-call(), custom_call_target="xla_python_cpu_callback"', "a callback"),
        ("%i = ((f32[]), token[]) infeed(token[] %t)", "an infeed"),
        ("%o = token[] outfeed(f32[] %x, token[] %t)", "an outfeed"),
        ("%s = send(f32[] %x), channel_id=1, is_host_transfer=true", "a send to the host"),
        ("%x = f32[8,4]{1,0:T(8,128)S(5)} copy(f32[8,4] %y)", "host memory"),
    ],
)
def test_what_waits_for_the_host_is_found_in_a_compiled_text(text: str, what: str) -> None:
    assert [name for name, pattern in FORBIDDEN.items() if pattern.search(text)] == [what]
