"""Rules on stacked leaves against per-layer lists, decay by logical axes, schedules against closed forms."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml import trees
from jaxml.train.optimizer import build_optimizer, is_block_matrix, is_matrix, learning_rate
from jaxml.train.spec import Adafactor, AdamW, Lion, Muon, OptimizerSpec, ScheduleSpec
from tests.train.tiny import assert_close

LAYERS = 3
AXES = {
    "blocks": {
        "0": {
            "up": {"kernel": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")},
            "norm": {"scale": ("layers", "embed")},
        }
    },
    "embed": {"table": ("vocab", "embed")},
    "final_norm": {"scale": ("embed",)},
}
SHAPES = {"layers": LAYERS, "embed": 4, "mlp": 6, "vocab": 5}
RULES = [AdamW(), Lion(), Adafactor(min_dim_to_factor=4), Muon()]
SPEC = OptimizerSpec(learning_rate=0.1, schedule=ScheduleSpec("linear"), weight_decay=0.3)


def by_name(rule: object) -> str:
    return type(rule).__name__


def draw(seed: int) -> dict:
    """Layers of very different magnitude, so that anything pooled over the stack shows."""
    rng = np.random.default_rng(seed)

    def one(axes: tuple[str, ...]) -> np.ndarray:
        value = rng.standard_normal([SHAPES[axis] for axis in axes])
        if axes[0] == "layers":
            value *= np.array([1.0, 10.0, 100.0]).reshape(-1, *[1] * (len(axes) - 1))
        return value

    return jax.tree.map(one, AXES, is_leaf=lambda node: isinstance(node, tuple))


def unstack(tree: dict, is_axes: bool = False) -> dict:
    """The same model as a list of layers, without a stack anywhere; axes lose `layers` but stay inside blocks."""
    take = (lambda leaf, _: leaf[1:]) if is_axes else (lambda leaf, layer: leaf[layer])
    is_leaf = lambda node: isinstance(node, tuple)  # noqa: E731
    layers = {
        str(i): jax.tree.map(lambda leaf, i=i: take(leaf, i), tree["blocks"]["0"], is_leaf=is_leaf)
        for i in range(LAYERS)
    }
    return {**tree, "blocks": layers}


def run(transform: optax.GradientTransformationExtraArgs, params: dict, gradients: list[dict]) -> dict:
    @jax.jit
    def update(params, state, gradient, step):
        updates, state = transform.update(gradient, state, params, step=step)
        return optax.apply_updates(params, updates), state

    state = transform.init(params)
    for step, gradient in enumerate(gradients):
        params, state = update(params, state, gradient, jnp.asarray(step, jnp.int32))
    return params


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", [Adafactor(min_dim_to_factor=4), Adafactor(min_dim_to_factor=5)])
def test_adafactor_on_a_stack_equals_each_layer_by_itself(rule):
    """Factored and not; the clip by root mean square is per layer too."""
    spec = dataclasses.replace(SPEC, rule=rule)
    gradients = [draw(1), draw(2)]
    stacked = run(build_optimizer(spec, 10, AXES), draw(0), gradients)
    listed = run(
        build_optimizer(spec, 10, unstack(AXES, is_axes=True)), unstack(draw(0)), [unstack(g) for g in gradients]
    )
    assert_close(unstack(stacked), listed)


@pytest.mark.usefixtures("float64")
def test_muon_on_a_stack_equals_optax_muon_on_each_layer():
    """The reference is optax.contrib.muon on plain matrices, which gets its own schedule, decay and Adam."""
    rate = learning_rate(SPEC, 10)
    reference = optax.contrib.muon(
        rate, weight_decay=SPEC.weight_decay, adam_b1=0.9, adam_b2=0.95, adam_weight_decay=0.0, adam_learning_rate=rate
    )
    gradients = [draw(1), draw(2)]
    stacked = run(build_optimizer(dataclasses.replace(SPEC, rule=Muon()), 10, AXES), draw(0), gradients)["blocks"]["0"]

    def run_layer(layer: int) -> np.ndarray:
        take = lambda tree: {"kernel": tree["blocks"]["0"]["up"]["kernel"][layer]}  # noqa: E731
        params, state = take(draw(0)), reference.init(take(draw(0)))
        for gradient in gradients:
            updates, state = jax.jit(reference.update)(take(gradient), state, params)
            params = optax.apply_updates(params, updates)
        return params["kernel"]

    expected = np.stack([run_layer(layer) for layer in range(LAYERS)])
    assert_close({"kernel": stacked["up"]["kernel"]}, {"kernel": expected})


@pytest.mark.usefixtures("float64")
def test_muon_gives_all_but_block_matrices_to_adam_at_its_own_rate():
    muon = run(
        build_optimizer(dataclasses.replace(SPEC, rule=Muon(adam_learning_rate_ratio=0.25)), 10, AXES),
        draw(0),
        [draw(1)],
    )
    adam = run(build_optimizer(dataclasses.replace(SPEC, learning_rate=0.025), 10, AXES), draw(0), [draw(1)])
    for path in ("embed.table", "final_norm.scale", "blocks.0.up.bias", "blocks.0.norm.scale"):
        assert np.allclose(trees.flatten(muon)[path], trees.flatten(adam)[path], rtol=1e-12)
    assert not np.allclose(
        trees.flatten(muon)["blocks.0.up.kernel"], trees.flatten(adam)["blocks.0.up.kernel"], rtol=1e-3
    )


@pytest.mark.usefixtures("float64")
def test_adamw_is_its_closed_form():
    """p - rate (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p), in NumPy."""
    rule, gradients = AdamW(b1=0.8, b2=0.9, epsilon=1e-3), [draw(1), draw(2)]
    got = trees.flatten(run(build_optimizer(dataclasses.replace(SPEC, rule=rule), 10, AXES), draw(0), gradients))
    for path, p in trees.flatten(draw(0)).items():
        m = v = np.zeros_like(p)
        for t, gradient in enumerate((trees.flatten(g)[path] for g in gradients), start=1):
            m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
            adam = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
            decay = 0.3 * p if path in ("embed.table", "blocks.0.up.kernel") else 0
            p = p - learning_rate(SPEC, 10)(t - 1) * (adam + decay)
        assert np.allclose(got[path], p, rtol=1e-10), path


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_decay_touches_matrices_only(rule):
    zeros = jax.tree.map(np.zeros_like, draw(0))
    transform = build_optimizer(dataclasses.replace(SPEC, rule=rule), 10, AXES)
    before, after = trees.flatten(draw(0)), trees.flatten(run(transform, draw(0), [zeros]))
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {"embed.table", "blocks.0.up.kernel"}
    ratio = 1.0 if not isinstance(rule, Muon) else rule.adam_learning_rate_ratio
    assert np.allclose(after["embed.table"], before["embed.table"] * (1 - 0.1 * ratio * 0.3), rtol=1e-12)
    assert np.allclose(after["blocks.0.up.kernel"], before["blocks.0.up.kernel"] * (1 - 0.1 * 0.3), rtol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_a_rule_goes_down_a_quadratic(rule):
    spec = dataclasses.replace(SPEC, rule=rule, weight_decay=0.0, schedule=ScheduleSpec("constant"), learning_rate=0.02)
    transform = build_optimizer(spec, 10, AXES)
    start = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), draw(0))
    end = run(transform, start, [start])
    for path, leaf in trees.flatten(start).items():
        assert np.sum(np.square(trees.flatten(end)[path])) < np.sum(np.square(leaf)), path


def test_the_rate_follows_the_step_that_is_passed_and_not_a_count():
    transform = build_optimizer(SPEC, 10, AXES)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), draw(0))
    state = transform.init(params)
    first, _ = transform.update(params, state, params, step=0)
    later, _ = transform.update(params, state, params, step=9)
    assert np.allclose(later["embed"]["table"], 0.1 * first["embed"]["table"], rtol=1e-6)  # final_ratio


def test_matrices_are_told_by_their_logical_axes():
    assert is_matrix(("layers", "embed", "mlp")) and is_block_matrix(("layers", "embed", "mlp"))
    assert is_matrix(("vocab", "embed")) and not is_block_matrix(("vocab", "embed"))
    assert not is_matrix(("layers", "embed"))  # two dimensions, and yet a bias or a norm of each layer
    assert not is_matrix(("layers", "embed", None))


def schedule(kind: str, peak: float = 1.0, total: int = 100, **fields) -> np.ndarray:
    spec = OptimizerSpec(learning_rate=peak, schedule=ScheduleSpec(kind, **fields))
    return np.asarray(learning_rate(spec, total)(np.arange(total)))


def test_cosine_is_its_closed_form_with_exact_endpoints():
    rates = schedule("cosine", 2.0, warmup_steps=10, final_ratio=0.1)
    expected = [2.0 * (s + 1) / 11 for s in range(10)]
    expected += [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * (s - 10) / 89)) / 2) for s in range(10, 100)]
    assert np.allclose(rates, expected, rtol=1e-14)
    assert rates[10] == 2.0
    assert rates[99] == 0.2


def test_linear_is_its_closed_form_with_exact_endpoints():
    rates = schedule("linear", warmup_steps=0, final_ratio=0.0)
    assert np.allclose(rates, [1 - s / 99 for s in range(100)], rtol=1e-14)
    assert (rates[0], rates[99]) == (1.0, 0.0)


def test_warmup_stable_decay_is_its_closed_form_with_exact_endpoints():
    rates = schedule("wsd", warmup_steps=4, decay_steps=20, final_ratio=0.25)
    expected = [(s + 1) / 5 for s in range(4)] + [1.0] * (79 - 4) + [1 - 0.75 * (s - 79) / 20 for s in range(79, 100)]
    assert np.allclose(rates, expected, rtol=1e-14)
    assert (rates[79], rates[80] < 1, rates[99]) == (1.0, True, 0.25)
    assert np.array_equal(schedule("wsd", final_ratio=0.0), schedule("wsd", decay_steps=10, final_ratio=0.0))


def test_constant_stays_at_the_peak_after_its_warmup():
    rates = schedule("constant", warmup_steps=3, final_ratio=0.5)
    assert np.allclose(rates[:4], [0.25, 0.5, 0.75, 1.0])
    assert (rates[3:] == 1.0).all()


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 30),
    decay=st.integers(0, 30),
    final=st.floats(0, 1),
    total=st.integers(0, 50),
    steps=st.integers(1, 80),
)
def test_a_schedule_rises_to_its_peak_then_never_rises_and_keeps_its_last_rate(
    kind, warmup, decay, final, total, steps
):
    spec = OptimizerSpec(learning_rate=0.5, schedule=ScheduleSpec(kind, warmup, final, decay, total))
    rate = learning_rate(spec, steps)
    rates = np.asarray(rate(np.arange(120)))
    assert np.isfinite(rates).all() and (rates <= 0.5).all() and (rates >= 0).all()
    assert (np.diff(rates[: warmup + 1]) > 0).all()
    assert (np.diff(rates[warmup:]) <= 1e-15).all()
    end = total or steps
    if kind != "constant" and end > warmup + 1:
        assert rates[end - 1] == pytest.approx(0.5 * final, abs=1e-15)
        assert (rates[end - 1 :] == rates[-1]).all()
    assert rate(7) == rates[7]


def test_a_traced_schedule_equals_the_one_on_the_host():
    spec = OptimizerSpec(schedule=ScheduleSpec("cosine", warmup_steps=5))
    rate = learning_rate(spec, 50)
    assert np.allclose(jax.jit(rate)(jnp.arange(50)), rate(np.arange(50)), rtol=1e-6)
