"""One update is one function of state and batch, however the batch is split and wherever it runs."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml import trees
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.errors import ConfigError, RecompileError
from jaxml.numerics.spec import PrecisionSpec
from jaxml.train.gradients import loss_gradients
from jaxml.train.spec import Adafactor, AdamW, Lion, Muon, TrainSpec
from jaxml.train.step import build_program, to_host
from tests.train import tiny
from tests.train.tiny import CLASSIFICATION, LANGUAGE, OPTIMIZER, ROWS, assert_close, host

pytestmark = pytest.mark.usefixtures("float64")

SPLITS = [(2, 1, 1), (4, 1, 1), (1, 4, 2), (2, 2, 2), (1, 1, 3)]


@cache
def after_one_step(accumulate: int, data: int, fsdp: int, task: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(new state on the host, metrics)."""
    program = tiny.program(accumulate, data, fsdp, task)
    batch = tiny.language_batch() if task is LANGUAGE else tiny.classification_batch()
    state, metrics = program.train_step(tiny.state_of(program), batch)
    return host(state), to_host(metrics)


@pytest.mark.parametrize(("accumulate", "data", "fsdp"), SPLITS)
def test_any_accumulation_and_mesh_gives_the_step_of_the_full_batch_on_one_device(accumulate, data, fsdp):
    """With packed segments, ragged masks, dropout, two loss terms and clipping. On fsdp=3 neither the vocabulary of 11
    nor the width of 8 divides (torchtitan 1136)."""
    state, metrics = after_one_step(accumulate, data, fsdp, LANGUAGE)
    expected_state, expected_metrics = after_one_step(1, 1, 1, LANGUAGE)
    assert_close(state, expected_state)
    assert_close(metrics, expected_metrics)


def test_classification_is_the_same_on_eight_devices_with_accumulation():
    state, metrics = after_one_step(3, 4, 2, CLASSIFICATION)
    expected_state, expected_metrics = after_one_step(1, 1, 1, CLASSIFICATION)
    assert_close(state, expected_state)
    assert_close(metrics, expected_metrics)


def test_an_axis_that_divides_no_dimension_is_noted_by_name():
    program = tiny.program(1, 1, 3)
    assert any("embed.table" in note and "fsdp=3" in note for note in program.notes)
    assert program.abstract_state["params"]["embed"]["table"].sharding.is_fully_replicated


def test_the_batch_is_never_computed_whole_when_it_is_accumulated():
    """The weights of the whole batch come first; XLA must drop the forward pass that they do not need."""
    flops = {}
    for accumulate in (1, 4):
        program = tiny.program(accumulate)
        program.compile(tiny.language_batch())
        flops[accumulate] = program.train_step.compiled.cost_analysis()["flops"]
    assert flops[4] < 0.6 * flops[1]  # a scan's body counts once: a quarter of the batch, and the optimizer


def test_the_gradient_is_that_of_the_loss():
    program = tiny.program()
    params = tiny.state_of(program)["params"]
    batch = program.put(tiny.language_batch())
    key = jax.random.key(0)

    @jax.jit
    def value(params):
        result = loss_gradients(
            program.bound, program.task, params, batch, key, 1, program.mesh, program.state_shardings["params"]
        )
        return result.loss, result.gradients

    _, gradients = value(params)
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), params)
    step = 1e-5
    ahead, behind = (value(jax.tree.map(lambda p, d, h=h: p + h * d, params, direction))[0] for h in (step, -step))
    slope = sum(
        float(jnp.vdot(g, d)) for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True)
    )
    assert float(ahead - behind) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_every_declared_loss_term_varies_with_the_parameters():
    """A term that is silently 0 or constant is a bug (maxtext a8427ccb7)."""
    program = tiny.program()
    state, batch = tiny.state_of(program), tiny.language_batch()
    state, first = program.train_step(state, batch)
    _, second = program.train_step(state, batch)
    terms = [name for name in first if name.startswith("loss/")]
    assert terms == ["loss/loss", "loss/z_loss"]
    assert all(float(first[name]) > 0 and float(first[name]) != float(second[name]) for name in terms)
    total = float(first["loss/loss"]) + LANGUAGE.z_loss * float(first["loss/z_loss"])
    assert float(first["loss"]) == pytest.approx(total, rel=1e-12)


def test_dropout_differs_by_step_and_repeats_for_the_same_step():
    program, batch = tiny.program(), tiny.language_batch()

    def loss_at(step: int) -> float:
        state = tiny.state_of(program)
        state["step"] = jax.device_put(np.asarray(step, np.int32), state["step"].sharding)
        return float(program.train_step(state, batch)[1]["loss"])

    assert loss_at(3) == loss_at(3) != loss_at(4)


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (4, 2)])
def test_clipping_is_by_the_norm_of_the_global_gradient_that_is_reported(data, fsdp):
    """nanochat 061f83c clipped on each device before the reduction. Adam's first moment shows the clipped gradient."""
    program = tiny.program(1, data, fsdp)
    state = tiny.state_of(program)
    before = host(state["opt_state"])
    state, metrics = program.train_step(state, tiny.language_batch())
    after, metrics = host(state["opt_state"]), to_host(metrics)
    moments = [path for path in before if ".mu." in path]
    clipped = {path: (after[path] - OPTIMIZER.rule.b1 * before[path]) / (1 - OPTIMIZER.rule.b1) for path in moments}
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in clipped.values()))
    assert metrics["grad_norm"] > 2 * OPTIMIZER.clip_norm
    assert norm == pytest.approx(OPTIMIZER.clip_norm, rel=1e-9)
    assert np.sqrt(np.sum(metrics["leaf_grad_norms"] ** 2)) == pytest.approx(metrics["grad_norm"], rel=1e-12)
    shrink = OPTIMIZER.clip_norm / metrics["grad_norm"]
    leaf_norms = [np.sqrt(np.sum(leaf**2)) for leaf in clipped.values()]
    assert np.allclose(leaf_norms, shrink * metrics["leaf_grad_norms"], rtol=1e-9)


def test_the_average_remembers_long_when_its_decay_is_near_one():
    """levanter PR 883 had the direction backwards."""
    program = tiny.program()
    state = tiny.state_of(program)
    before = host(state)
    after = host(program.train_step(state, tiny.language_batch())[0])
    for path in (path for path in after if path.startswith("ema.")):
        params = after[path.replace("ema.", "params.", 1)]
        assert np.allclose(after[path], 0.9 * before[path] + 0.1 * params, rtol=1e-12, atol=0)
    assert program.eval_params({"params": 1, "ema": 2}) == 2


def test_a_step_that_is_not_finite_changes_nothing_but_the_step():
    program = tiny.program()
    state = tiny.state_of(program)
    state["params"]["final_norm"]["scale"] = state["params"]["final_norm"]["scale"].at[0].set(jnp.nan)
    before = host(state)
    state, metrics = program.train_step(state, tiny.language_batch())
    after, metrics = host(state), to_host(metrics)
    assert after.pop("step") == before.pop("step") + 1
    assert all(after[path].tobytes() == before[path].tobytes() for path in before)
    assert not metrics["is_finite"]
    assert not metrics["update_applied"]


def test_a_batch_without_a_counted_token_has_no_loss_and_no_gradient():
    program = tiny.program()
    batch = tiny.language_batch()
    metrics = to_host(
        program.train_step(tiny.state_of(program), batch | {"loss_mask": np.zeros_like(batch["loss_mask"])})[1]
    )
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert metrics["is_finite"]


def test_metrics_name_the_leaves_and_count_the_tokens():
    metrics = after_one_step(1, 1, 1, LANGUAGE)[1]
    program, batch = tiny.program(), tiny.language_batch()
    assert metrics["leaf_grad_norms"].shape == (len(trees.flatten(program.abstract_state["params"])),)
    assert metrics["num_tokens"] == (batch["segment_ids"] > 0).sum()
    assert metrics["learning_rate"] == pytest.approx(0.05 * (1 - 0.9 * (3 - 2) / (9 - 2)))  # update number 3 of 10


def test_the_state_is_donated_and_keeps_its_shardings():
    program = tiny.program(1, 4, 2)
    state = tiny.state_of(program)
    new, _ = program.train_step(state, tiny.language_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    same = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, new, program.state_shardings)
    assert all(jax.tree.leaves(same))
    assert not new["params"]["embed"]["table"].sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("tokens", lambda batch: batch | {"tokens": batch["tokens"][:, :5]}),
        ("loss_mask", lambda batch: batch | {"loss_mask": batch["loss_mask"].astype(np.int32)}),
        ("row", lambda batch: {name: value for name, value in batch.items() if name != "row"}),
        ("extra", lambda batch: batch | {"extra": batch["row"]}),
        ("positions", lambda batch: {name: value[:5] for name, value in batch.items()}),
    ],
)
def test_a_second_lowering_is_refused_with_the_argument_that_changed(column, change):
    program, batch = tiny.program(1, 4, 2), tiny.language_batch()
    program.compile(batch)
    with pytest.raises(RecompileError, match=rf"train_step, argument batch\.{column}"):
        program.train_step(tiny.state_of(program), change(batch))
    with pytest.raises(RecompileError, match=rf"argument batch\.{column}"):
        program.compile(change(batch))
    assert program.train_step.num_lowered == 1


def test_a_state_that_lies_elsewhere_is_refused_with_its_leaf():
    program = tiny.program(1, 4, 2)
    state = tiny.state_of(program)
    whole = jax.device_put(state["params"]["embed"]["table"], program.state_shardings["step"])
    state["params"]["embed"]["table"] = whole
    program.compile(tiny.language_batch())
    with pytest.raises(RecompileError, match=r"argument state\.params\.embed\.table") as raised:
        program.train_step(state, tiny.language_batch())
    assert "sharded" in raised.value.faults[0].expected


def test_evaluation_counts_every_token_once_on_a_size_that_divides_nothing():
    """53 rows in batches of 24 on eight devices, padded in two ways (accelerate 575 and others)."""
    program = tiny.program(1, 4, 2)
    rows = tiny.language_batch(5, 53)
    params = tiny.state_of(program)["ema"]

    def evaluated(sizes: list[int]) -> tuple[float, int]:
        assert sum(sizes) == 53
        nll, num_tokens, first = 0.0, 0, 0
        for size in sizes:
            padding = ((0, ROWS - size), (0, 0))
            part = {n: np.pad(c[first : first + size], padding[: c.ndim]) for n, c in rows.items()}
            sums, outputs = program.eval_step(params, part)
            assert outputs == {}
            nll, num_tokens, first = nll + float(sums["nll"]), num_tokens + int(sums["num_tokens"]), first + size
        return nll, num_tokens

    nll, num_tokens = evaluated([24, 24, 5])
    assert num_tokens == rows["loss_mask"].sum()
    assert evaluated([13, 17, 23]) == (pytest.approx(nll, rel=1e-12), num_tokens)
    assert program.eval_step.num_lowered == 1


def test_the_initial_state_is_the_same_on_one_device_and_born_sharded():
    one, many = tiny.program(1, 1, 1), tiny.program(1, 4, 2)
    state = many.init(5)
    same = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, state, many.state_shardings)
    assert all(jax.tree.leaves(same))
    assert trees.compare(one.init(5), state) == []
    assert trees.compare(state["params"], state["ema"]) == []


@pytest.mark.parametrize(
    "rule", [AdamW(), Lion(), Adafactor(min_dim_to_factor=4), Muon()], ids=lambda rule: type(rule).__name__
)
@pytest.mark.parametrize("params_dtype", ["float32", "bfloat16"])
def test_a_state_keeps_its_dtypes_and_its_moments_lie_as_their_parameters(rule, params_dtype):
    """Moments of bfloat16 parameters are float32; a moment of another dtype after a step would lower it again."""
    optimizer = dataclasses.replace(OPTIMIZER, rule=rule)
    mesh, precision = build_mesh(MeshSpec(2, 4)), PrecisionSpec(params_dtype, params_dtype)
    train = TrainSpec(steps=10, batch_size=ROWS)
    with jax.enable_x64(False):
        program = build_program(tiny.DECODER, LANGUAGE, optimizer, train, mesh, precision)
        batch = program.put({n: jax.ShapeDtypeStruct(c.shape, c.dtype) for n, c in tiny.language_batch().items()})
        with jax.set_mesh(mesh):
            after, _ = jax.eval_shape(program.train_step.function, program.abstract_state, batch)
    describe = lambda tree: {path: (leaf.shape, leaf.dtype) for path, leaf in trees.flatten(tree).items()}  # noqa: E731
    assert describe(after) == describe(program.abstract_state)
    params = trees.flatten(program.abstract_state["params"])
    moments = trees.flatten(program.abstract_state["opt_state"])
    pairs = [(moments[m], params[p]) for m in moments for p in params if m.endswith("." + p) and moments[m].ndim]
    same_shape = [(moment, param) for moment, param in pairs if moment.shape == param.shape]
    assert len(same_shape) >= 8  # Adafactor keeps matrices factored, as vectors
    assert all(moment.sharding == param.sharding and moment.dtype == jnp.float32 for moment, param in same_shape)
    assert any(not moment.sharding.is_fully_replicated for moment, _ in same_shape)


def test_predicted_memory_is_by_kind_and_for_one_device():
    one, many = tiny.program(1, 1, 1), tiny.program(1, 4, 2)
    for program in (one, many):
        program.compile(tiny.language_batch())
    assert list(one.memory_bytes()) == ["params", "opt_state", "ema", "batch", "temporaries"]
    assert one.memory_bytes()["params"] == trees.num_bytes(one.abstract_state["params"])
    assert one.memory_bytes()["params"] / 2 <= many.memory_bytes()["params"] < 0.6 * one.memory_bytes()["params"]
    assert many.memory_bytes()["batch"] == one.memory_bytes()["batch"] / 8
    assert one.memory_bytes()["temporaries"] > 0


def test_accumulation_is_refused_for_a_task_whose_rows_interact(monkeypatch):
    monkeypatch.setattr("jaxml.tasks.language.LanguageModelingTask.rows_interact", True)
    train = TrainSpec(steps=10, batch_size=ROWS, accumulate=2)
    with pytest.raises(ConfigError, match=r"train\.accumulate"):
        build_program(tiny.DECODER, LANGUAGE, OPTIMIZER, train, build_mesh(MeshSpec(1, 1)))
