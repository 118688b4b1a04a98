"""The choice of an attention form as a pure function, and laws of the forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxml.errors import ConfigError
from jaxml.models.attention import Visible, _attend_pallas, attend, choose

GPU = {"backend": "gpu", "dtype": "bfloat16", "head_width": 64, "has_softcap": False, "num_tokens": 256}
TPU = {**GPU, "backend": "tpu"}
CPU = {**GPU, "backend": "cpu", "dtype": "float32"}


@pytest.mark.parametrize(
    ("facts", "form"),
    [
        (CPU, "xla"),
        (GPU, "cudnn"),
        (GPU | {"dtype": "float32"}, "xla"),
        (GPU | {"head_width": 256}, "xla"),
        (GPU | {"head_width": 36}, "xla"),
        (GPU | {"has_softcap": True}, "xla"),
        (TPU, "pallas"),
        (TPU | {"has_softcap": True, "dtype": "float32"}, "pallas"),
        (TPU | {"num_tokens": 200}, "xla"),
        (TPU | {"dtype": "float64"}, "xla"),
    ],
)
def test_auto_takes_the_kernel_of_the_backend_where_it_can(facts, form):
    assert choose("auto", **facts) == form
    assert choose("xla", **facts) == "xla"


@pytest.mark.parametrize(
    ("choice", "facts", "reason"),
    [
        ("cudnn", CPU, "backend is cpu"),
        ("cudnn", TPU, "backend is tpu"),
        ("cudnn", GPU | {"dtype": "float32"}, "not float32"),
        ("cudnn", GPU | {"head_width": 256}, "not 256"),
        ("cudnn", GPU | {"has_softcap": True}, "soft-cap"),
        ("pallas", GPU, "backend is gpu"),
        ("pallas", TPU | {"num_tokens": 200}, "not 200"),
        ("pallas", TPU | {"dtype": "float64"}, "not float64"),
    ],
)
def test_a_form_that_cannot_work_is_refused_with_the_reason(choice, facts, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        choose(choice, **facts)
    assert raised.value.faults[0].failed == "execution.attention"


def random_heads(num_tokens: int, *num_heads: int, width: int = 8, batch: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(batch, num_tokens, n, width)), jnp.float32) for n in num_heads]


def attended(q, k, v, seen: Visible, **options) -> jax.Array:
    """`attend` as one program: step by step it would be dozens."""

    def run(q, k, v, ids):
        return attend(q, k, v, seen._replace(segment_ids_BT=ids), **options)

    return jax.jit(run)(q, k, v, seen.segment_ids_BT)


def test_grouped_queries_equal_repeated_keys_and_values():
    q, k, v = random_heads(8, 4, 2, 2)
    seen = Visible(jnp.ones((2, 8), jnp.int32), is_causal=True, window=None)
    grouped = attended(q, k, v, seen, form="xla")
    repeated = attended(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2), seen, form="xla")
    np.testing.assert_allclose(grouped, repeated, rtol=0, atol=1e-6)


def test_a_window_as_long_as_the_row_changes_nothing_and_a_window_of_one_returns_the_value():
    q, k, v = random_heads(8, 2, 2, 2)
    ids = jnp.ones((2, 8), jnp.int32)
    whole = attended(q, k, v, Visible(ids, True, None), form="xla")
    np.testing.assert_array_equal(attended(q, k, v, Visible(ids, True, 8), form="xla"), whole)
    np.testing.assert_allclose(attended(q, k, v, Visible(ids, False, 1), form="xla"), v, rtol=0, atol=1e-6)


def test_a_wide_softcap_changes_little_and_a_narrow_one_averages():
    q, k, v = random_heads(8, 2, 2, 2)
    seen = Visible(jnp.ones((2, 8), jnp.int32), False, None)
    plain = attended(q, k, v, seen, form="xla")
    np.testing.assert_allclose(attended(q, k, v, seen, form="xla", logit_softcap=1e4), plain, rtol=0, atol=1e-5)
    flat = attended(q, k, v, seen, form="xla", logit_softcap=1e-6)
    np.testing.assert_allclose(flat, jnp.broadcast_to(v.mean(1, keepdims=True), v.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("is_causal", "window", "cap"), [(True, None, None), (False, 3, 0.5)])
def test_the_pallas_form_interpreted_equals_the_xla_form(is_causal, window, cap):
    q, k, v = random_heads(128, 2, 1, 1, batch=1)
    ids = jnp.asarray([[1] * 50 + [2] * 60 + [0] * 18], jnp.int32)
    seen = Visible(ids, is_causal, window)
    expected = attended(q, k, v, seen, form="xla", logit_softcap=cap)
    got = _attend_pallas(q, k, v, seen, cap, interpret=True)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
