"""Meshes that split tokens and widths give the step of one device, in float64, with packing, dropout and accumulation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from jaxml import trees
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.models.spec import AttentionSpec, BlockSpec, ClassifierSpec, ExecutionSpec, MlpSpec, NormSpec, RopeSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.train.spec import TrainSpec
from jaxml.train.step import build_program, to_host
from tests.train import tiny
from tests.train.tiny import CLASSIFICATION, LANGUAGE, OPTIMIZER, ROWS, assert_close, host

pytestmark = pytest.mark.usefixtures("float64")

HEADS = AttentionSpec(num_heads=4, num_kv_heads=2, head_width=4, rope=RopeSpec(), has_bias=True, window=3)
MODEL = replace(
    tiny.DECODER,
    blocks=(BlockSpec(HEADS, MlpSpec(12), NormSpec()), BlockSpec(replace(HEADS, window=None), MlpSpec(12), NormSpec())),
)
ONE = MeshSpec(data=1)


@cache
def after_one_step(mesh: MeshSpec, accumulate: int, execution: ExecutionSpec, task: Any = LANGUAGE) -> tuple[Any, Any]:
    """(new state on the host, metrics)."""
    model = MODEL if task is LANGUAGE else ClassifierSpec(MODEL, num_classes=3, pooling="last")
    train = TrainSpec(steps=10, batch_size=ROWS, accumulate=accumulate, seed=3)
    precision = PrecisionSpec("float64", "float64")
    program = build_program(model, task, OPTIMIZER, train, build_mesh(mesh), precision, execution)
    batch = tiny.language_batch(num_tokens=8) if task is LANGUAGE else tiny.classification_batch(num_tokens=8)
    state, metrics = program.train_step(tiny.state_of(program), batch)
    return host(state), to_host(metrics)


PLAIN = ExecutionSpec()


# Every mesh of the standard set is held to one device by `jaxml prove` too (tests/prove).
@pytest.mark.parametrize(
    ("mesh", "accumulate", "execution"),
    [
        (
            MeshSpec(data=1, tensor=4),
            1,
            ExecutionSpec("unrolled", "dots"),
        ),  # divides four query heads, not two key heads
        (MeshSpec(data=2, context=2, tensor=2), 3, PLAIN),
        (
            MeshSpec(data=1, fsdp=2, context=4),
            2,
            ExecutionSpec("scanned", "names", ("query", "mlp_hidden"), logits_chunk_bytes=2048),
        ),
    ],
)
def test_a_step_on_the_mesh_is_the_step_of_one_device(mesh, accumulate, execution) -> None:
    state, metrics = after_one_step(mesh, accumulate, execution)
    expected_state, expected_metrics = after_one_step(ONE, 1, PLAIN)
    assert_close(state, expected_state)
    assert_close(metrics, expected_metrics)


def test_classification_is_the_same_over_tokens_and_widths() -> None:
    state, metrics = after_one_step(MeshSpec(data=2, context=2, tensor=2), 2, PLAIN, CLASSIFICATION)
    expected_state, expected_metrics = after_one_step(ONE, 1, PLAIN, CLASSIFICATION)
    assert_close(state, expected_state)
    assert_close(metrics, expected_metrics)


def test_every_parameter_with_heads_hidden_units_or_vocabulary_is_split_over_tensor() -> None:
    train = TrainSpec(steps=10, batch_size=ROWS)
    model = replace(MODEL, vocab_size=12)
    program = build_program(
        model, LANGUAGE, OPTIMIZER, train, build_mesh(MeshSpec(1, 2, 1, 2)), PrecisionSpec("float64")
    )
    whole = {
        path
        for path, leaf in trees.flatten(program.abstract_state["params"]).items()
        if "tensor" not in leaf.sharding.spec
    }
    assert {path.rpartition(".")[0].rpartition(".")[2] for path in whole} == {
        "attention_norm",
        "mlp_norm",
        "final_norm",
    }
    assert program.notes == []


def test_a_block_border_keeps_rows_and_tokens_where_they_are() -> None:
    """No activation of the compiled forward pass has all tokens of a row: weights are gathered, tokens are not."""
    train = TrainSpec(steps=10, batch_size=8)
    mesh = build_mesh(MeshSpec(data=2, context=4))
    model = replace(MODEL, context_length=64, vocab_size=13)
    program = build_program(model, LANGUAGE, OPTIMIZER, train, mesh, PrecisionSpec("float64", "float64"))
    program.compile(tiny.language_batch(rows=8, num_tokens=64))
    text = program.train_step.compiled.as_text()
    gathered = [
        line for line in text.splitlines() if " all-gather(" in line and ",64," in line.split(" all-gather(")[0]
    ]
    assert not gathered, gathered[:3]


def test_heads_that_tensor_does_not_divide_are_computed_whole_and_the_run_says_so() -> None:
    train = TrainSpec(steps=10, batch_size=ROWS)
    program = build_program(
        MODEL, LANGUAGE, OPTIMIZER, train, build_mesh(MeshSpec(1, tensor=4)), PrecisionSpec("float64")
    )
    heads = "replicated, tensor=4 does not divide both num_heads=4 and num_kv_heads=2"
    assert [note for note in program.notes if "heads" in note] == [f"blocks.{i}.attention: {heads}" for i in (0, 1)]
    assert "embed.table: replicated, tensor=4 divides none of vocab=11" in program.notes
