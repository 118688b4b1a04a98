"""No correct experiment is accused: claims hold for every kind of piece, optimizer, packing, mask and precision.

A few run by default; the twenty whole proofs are marked slow (`nox -s scale`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxml.data.spec import DataSpec, TextSource
from jaxml.devices.spec import MeshSpec
from jaxml.infer.opening import open_checkpoint
from jaxml.inputs.spec import BpeTokenizerSpec, ByteTokenizerSpec, CharTokenizerSpec
from jaxml.models.presets import gpt2_124m, llama_1b, llama_15m, nanogpt_cpu, nanogpt_gpu_char, shakespeare
from jaxml.models.spec import AttentionSpec, BlockSpec, DecoderSpec, LearnedPositionSpec, MlpSpec, RopeSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.prove import accumulation, decoding, evaluation, lowering, order, resuming, sharding
from jaxml.prove.meshes import SINGLE
from jaxml.prove.prove import KINDS, prove
from jaxml.prove.subject import Subject
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import LanguageModeling
from jaxml.train.spec import Adafactor, Lion, Muon, ScheduleSpec, TrainSpec
from tests.conftest import ROOT
from tests.prove.conftest import ATTENTION
from tests.prove.test_faults import RING, SHARDED, SPLIT
from tests.tiny import TEXT


def test_claims_about_steps_hold_without_a_fault(subject: Subject) -> None:
    """The same claims that the planted faults fail."""
    claims = [sharding.sharded(subject, mesh) for mesh in (SPLIT, RING, SHARDED)]
    claims += [accumulation.accumulated(subject, 2, SINGLE), evaluation.counted(subject), order.ordered(subject)]
    claims.append(lowering.lowered(subject))
    assert [claim.verdict for claim in claims] == ["pass"] * len(claims), claims
    assert max(claim.error for claim in claims) < 1e-12


def test_claims_about_checkpoints_hold_without_a_fault(with_straight_run: Subject) -> None:
    with open(os.devnull, "w") as nowhere:
        claims = [resuming.resumed(with_straight_run, nowhere)]
    claims.append(decoding.cached(with_straight_run, open_checkpoint(with_straight_run.directory / "straight")))
    assert [claim.verdict for claim in claims] == ["pass"] * len(claims), claims


def test_elements_whose_gradient_is_rounding_are_left_out_and_counted_where_an_update_is_a_sign(
    change: Callable[..., Subject],
) -> None:
    """A key's bias has no gradient but rounding where nothing turns the keys: a softmax does not see a shift."""
    block = BlockSpec(replace(ATTENTION, rope=None, window=None), MlpSpec(12))
    model = dict(blocks=(block,), position=LearnedPositionSpec())
    claim = sharding.sharded(change(model=model, optimizer=dict(rule=Lion(), ema_decay=0.0)), SHARDED)
    assert claim.verdict == "pass", claim
    assert "elements left out, whose gradient is rounding alone" in claim.detail


BASE_TEXT = TextSource(str(TEXT), documents="paragraph")
ROPE = AttentionSpec(4, 2, 16, rope=RopeSpec())


def variant(name: str, directory: Path, **parts: Any) -> Experiment:
    """An experiment of usual size on Tiny Shakespeare, with some fields replaced."""
    model = parts.pop("model", shakespeare())
    data = DataSpec(
        sources=(BASE_TEXT,), prepared=str(directory / "never"), sequence_length=64, tokenizer=CharTokenizerSpec()
    )
    experiment = Experiment(
        name=name, model=model, task=LanguageModeling(), data=data, train=TrainSpec(steps=1000, batch_size=16)
    )
    whole = {field: value for field, value in parts.items() if not isinstance(value, dict)}
    experiment = replace(experiment, **whole)
    fields = {field: value for field, value in parts.items() if isinstance(value, dict)}
    return replace(experiment, **{field: replace(getattr(experiment, field), **new) for field, new in fields.items()})


def decoder_with(attention: AttentionSpec = ROPE, mlp: MlpSpec = MlpSpec(160), **fields: Any) -> DecoderSpec:
    """A decoder of width 64 with one kind of block."""
    known = dict(vocab_size=65, context_length=64, width=64, num_layers=4, blocks=(BlockSpec(attention, mlp),))
    return DecoderSpec(**(known | fields))


LOCAL_GLOBAL = (BlockSpec(replace(ROPE, window=16), MlpSpec(160, "geglu")), BlockSpec(ROPE, MlpSpec(160, "geglu")))
TWO_SOURCES = (replace(BASE_TEXT, name="a", weight=3), TextSource(str(TEXT), documents="line", name="b", weight=2))

VARIANTS: dict[str, dict[str, Any]] = {
    "shakespeare": {},
    "nanogpt_cpu": dict(model=nanogpt_cpu()),
    "nanogpt_gpu_char": dict(model=nanogpt_gpu_char()),
    "gpt2_124m": dict(model=gpt2_124m(), train=dict(accumulate=4)),
    "llama_15m": dict(model=llama_15m()),
    "llama_1b": dict(model=llama_1b(), mesh=MeshSpec(data=-1, fsdp=4)),
    "lion": dict(optimizer=dict(rule=Lion(), learning_rate=1e-4)),
    "adafactor": dict(optimizer=dict(rule=Adafactor(min_dim_to_factor=8))),
    "muon": dict(optimizer=dict(rule=Muon(), schedule=ScheduleSpec("wsd", warmup_steps=10))),
    "average": dict(optimizer=dict(ema_decay=0.99, clip_norm=0.0)),
    "best_fit": dict(data=dict(packing="best_fit", sources=TWO_SOURCES)),
    "concatenate": dict(data=dict(sources=TWO_SOURCES), train=dict(accumulate=2)),
    "bytes": dict(data=dict(tokenizer=ByteTokenizerSpec()), model=decoder_with(vocab_size=257, tied_head=False)),
    "bpe": dict(data=dict(tokenizer=BpeTokenizerSpec(2000)), model=decoder_with(vocab_size=2000, head_bias=True)),
    "local_global": dict(model=decoder_with(blocks=LOCAL_GLOBAL, dropout=0.2), mesh=MeshSpec(data=2, context=4)),
    "softcap": dict(model=decoder_with(replace(ROPE, logit_softcap=20.0), logit_softcap=10.0), task=dict(z_loss=1e-4)),
    "scanned": dict(execution=dict(layers="scanned", rematerialize="full")),
    "names": dict(execution=dict(rematerialize="names", saved_names=("query", "key", "value"), context="ring")),
    "odd": dict(
        model=decoder_with(replace(ROPE, num_heads=3, num_kv_heads=3), width=60), data=dict(sequence_length=63)
    ),
    "bfloat16": dict(precision=PrecisionSpec("float32", "bfloat16"), execution=dict(logits_chunk_bytes=2**16)),
    "float16": dict(precision=PrecisionSpec("float32", "float16"), execution=dict(layers="scanned")),
    "multi_query": dict(model=decoder_with(replace(ROPE, num_kv_heads=1, has_bias=True), MlpSpec(160, "squared_relu"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_no_correct_variant_is_accused(name: str, tmp_path: Path) -> None:
    """All claims but the served one, which is the same for all."""
    experiment = variant(name, tmp_path, **VARIANTS[name])
    with open(os.devnull, "w") as nowhere:
        only = [kind for kind in KINDS if kind != "served"]
        proof = prove(experiment, tmp_path / "proof", only=only, wants_float32=False, stream=nowhere)
    assert proof.is_passed, [claim for claim in proof.claims if claim.verdict == "fail"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shakespeare", "spam"])
def test_the_experiments_are_proven_by_one_command_in_under_five_minutes(name: str, tmp_path: Path) -> None:
    """A classifier and a language model, the served answer among the claims."""
    script = "import sys; from jaxml.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "prove", f"experiments/{name}.py", "--out", str(tmp_path / "p"), "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    claims = json.loads(ended.stdout.splitlines()[-1])["claims"]
    assert len(claims) >= 18
    assert all(claim["verdict"] == "pass" and claim["error"] <= claim["bound"] for claim in claims)
