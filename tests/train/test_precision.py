"""Training in each precision: the float32 loss within a bound, the loss scale inside the sharded step, float8 products."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.errors import MissingExtraError
from jaxml.models.build import bind_model
from jaxml.models.spec import (
    AttentionSpec,
    BlockSpec,
    ClassifierSpec,
    DecoderSpec,
    ExecutionSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)
from jaxml.numerics.spec import LossScaleSpec, PrecisionSpec
from jaxml.tasks.spec import LanguageModeling
from jaxml.train.gradients import training_model
from jaxml.train.guard import endless_overflow
from jaxml.train.spec import OptimizerSpec, ScheduleSpec, TrainSpec
from jaxml.train.step import Program, build_program, to_host

VOCAB, ROWS, TOKENS, STEPS = 11, 16, 16, 40
BLOCK = BlockSpec(
    AttentionSpec(num_heads=2, num_kv_heads=1, head_width=8, rope=RopeSpec()),
    MlpSpec(width=32, activation="swiglu"),
    NormSpec("rms"),
)
DECODER = DecoderSpec(vocab_size=VOCAB, context_length=TOKENS, width=16, num_layers=2, blocks=(BLOCK,))
OPTIMIZER = OptimizerSpec(learning_rate=0.02, schedule=ScheduleSpec("linear", warmup_steps=2), ema_decay=0.9)
SCALING = LossScaleSpec()
# The largest relative difference to float32 of the loss in any of 40 steps: docs/adr/0008-precision.md.
TOLERANCES = {"bfloat16": 0.01, "float16": 0.005, "float8": 0.03}


def batch(step: int) -> dict[str, np.ndarray]:
    """Each token determines the next, but for one in ten: in 40 steps the loss falls from 2.42 to 0.75."""
    rng = np.random.default_rng(step)
    tokens = np.empty((ROWS, TOKENS + 1), np.int32)
    tokens[:, 0] = rng.integers(0, VOCAB, ROWS)
    for place in range(TOKENS):
        is_free = rng.random(ROWS) < 0.1
        tokens[:, place + 1] = np.where(is_free, rng.integers(0, VOCAB, ROWS), (3 * tokens[:, place] + 1) % VOCAB)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)),
        "segment_ids": np.ones((ROWS, TOKENS), np.int32),
        "loss_mask": np.ones((ROWS, TOKENS), bool),
        "row": np.arange(ROWS, dtype=np.int32),
    }


@cache
def program(
    compute: Any, mesh: MeshSpec = MeshSpec(1, 1), accumulate: int = 1, scaling: LossScaleSpec = SCALING
) -> Program:
    train = TrainSpec(steps=STEPS, batch_size=ROWS, accumulate=accumulate)
    precision = PrecisionSpec(compute=compute, loss_scale=scaling)
    return build_program(DECODER, LanguageModeling(), OPTIMIZER, train, build_mesh(mesh), precision)


@cache
def first_params() -> Any:
    return jax.device_get(jax.jit(program("float32").bound.init)(jax.random.key(0)))


def start(built: Program, scale: float = SCALING.initial) -> dict[str, Any]:
    """The state before the first step, the same in every precision and on every mesh; made without compiling anything."""
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), built.abstract_state)
    state |= {"params": first_params(), "ema": first_params()}
    if "loss_scale" in state:
        state["loss_scale"]["scale"] = np.float32(scale)
    return jax.device_put(state, built.state_shardings)


def run(built: Program, scale: float = SCALING.initial, steps: int = STEPS) -> list[dict[str, Any]]:
    """The metrics of each step."""
    state, metrics = start(built, scale), []
    for step in range(steps):
        state, found = built.train_step(state, batch(step))
        metrics.append(to_host(found))
    return metrics


@cache
def losses(compute: Any) -> np.ndarray:
    return np.array([metrics["loss"] for metrics in run(program(compute))])


@pytest.mark.parametrize("compute", TOLERANCES)
def test_every_precision_follows_the_float32_loss(compute):
    assert losses("float32")[-1] < 0.8 < 2.4 < losses("float32")[0]
    np.testing.assert_allclose(losses(compute), losses("float32"), rtol=TOLERANCES[compute])


def test_the_default_is_bit_for_bit_the_dtype_that_it_means_here():
    assert program("auto").bound.policy == program("float32").bound.policy


def test_float16_on_a_mesh_with_accumulation_skips_the_same_steps_and_has_the_same_losses():
    """From a scale so high that the first steps overflow; it then doubles so often that it overflows again."""
    often = LossScaleSpec(growth_interval=3)
    single, split = (
        run(program("float16", mesh, 2, often), scale=2.0**21) for mesh in (MeshSpec(1, 1), MeshSpec(2, 2))
    )
    skipped = [metrics["is_overflow"] for metrics in single]
    assert skipped[0]
    assert sum(skipped) > sum(skipped[:10]) > 2  # and again, later
    for name in ("is_overflow", "loss_scale", "skipped_updates", "skipped_in_a_row", "update_applied", "is_finite"):
        assert [metrics[name] for metrics in single] == [metrics[name] for metrics in split], name
    for name in ("loss", "grad_norm"):
        pairs = [[metrics[name] for metrics in metrics_of] for metrics_of in (single, split)]
        good = ~np.array(skipped) | (name == "loss")
        np.testing.assert_allclose(np.array(pairs[1])[good], np.array(pairs[0])[good], rtol=5e-3)


def test_an_overflow_halves_the_scale_and_leaves_everything_else_as_it_was():
    built = program("float16")
    before = start(built, scale=2.0**30)
    kept = jax.device_get(before)
    after, metrics = built.train_step(before, batch(0))
    found = to_host(metrics)
    assert (found["is_overflow"], found["is_finite"], found["update_applied"]) == (True, False, False)
    assert (found["loss_scale"], found["skipped_updates"], found["skipped_in_a_row"]) == (2.0**30, 1, 1)
    assert np.isfinite(found["loss"])
    after = jax.device_get(after)
    assert after["step"] == kept["step"] + 1
    assert after["loss_scale"] == {"scale": 2.0**29, "good_steps": 0, "skipped": 1, "skipped_in_a_row": 1}
    jax.tree.map(
        np.testing.assert_array_equal, *({k: s[k] for k in ("params", "opt_state", "ema")} for s in (after, kept))
    )


def test_the_gradient_is_unscaled_before_its_norm_is_taken_and_clipped():
    built = program("float16")
    low, high = (built.train_step(start(built, scale), batch(0)) for scale in (2.0**8, 2.0**15))
    norms = [float(metrics["grad_norm"]) for _, metrics in (low, high)]
    assert norms == pytest.approx([run(program("float32"), steps=1)[0]["grad_norm"]] * 2, rel=1e-2)


def test_a_loss_that_is_not_finite_is_no_overflow_and_does_not_move_the_scale():
    built = program("float16")
    state = start(built)
    table = state["params"]["embed"]["table"]
    state["params"]["embed"]["table"] = jax.device_put(jnp.full_like(table, jnp.nan), table.sharding)
    after, metrics = built.train_step(state, batch(0))
    assert (bool(metrics["is_finite"]), bool(metrics["is_overflow"])) == (False, False)
    assert (float(after["loss_scale"]["scale"]), int(after["loss_scale"]["skipped"])) == (SCALING.initial, 0)


@pytest.mark.parametrize(
    ("scale", "in_a_row", "verdict"),
    [(2.0, 3, ""), (1.0, 1, "at a loss scale of 1, the smallest"), (2.0, 4, "in 4 steps in a row")],
)
def test_overflow_goes_on_for_ever_at_the_smallest_scale_or_after_too_many_in_a_row(scale, in_a_row, verdict):
    metrics = {"loss_scale": scale, "skipped_in_a_row": in_a_row}
    found = endless_overflow(metrics, LossScaleSpec(), max_skips=3)
    assert verdict in found
    assert bool(found) == bool(verdict)


def products_of(text: str) -> list[tuple[str, str]]:
    """The dtypes on both sides of every product of a StableHLO program."""
    return re.findall(r"stablehlo\.dot_general .*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)", text)


def test_every_product_of_the_blocks_is_in_float8_and_none_elsewhere():
    """Seven linear maps in each of two layers, forward and twice backward; attention and the head are not among them."""
    built = program("float8")
    built.compile(batch(0), batch(0))
    with jax.set_mesh(built.mesh):
        train, evaluate = (
            products_of(step.function.lower(*step.expected).as_text()) for step in (built.train_step, built.eval_step)
        )
    forward, backward = ("f8E4M3FN", "f8E4M3FN"), {("f8E5M2", "f8E4M3FN"), ("f8E4M3FN", "f8E5M2")}
    assert train.count(forward) == 14
    assert sum(train.count(pair) for pair in backward) == 28
    assert set(train) - backward - {forward} == {("f32", "f32")}
    assert set(evaluate) == {("f32", "f32")}


def test_a_classifier_trains_its_blocks_in_float8_and_not_its_head():
    bound = bind_model(ClassifierSpec(DECODER, num_classes=3), PrecisionSpec(compute="float8"), ExecutionSpec())
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), bound.abstract_params)
    model = training_model(bound, params)
    assert model.decoder.blocks["0"].mlp.up.is_float8
    assert not model.head.is_float8
    assert not bound.bind(params).decoder.blocks["0"].mlp.up.is_float8


def test_float8_without_qwix_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(MissingExtraError, match="float8"):
        program.__wrapped__("float8")
