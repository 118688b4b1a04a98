"""The probe finds one changed bit where the program must be exact, and a changed model everywhere."""

from __future__ import annotations

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxml.checkpoint.manifest import Manifest
from jaxml.checkpoint.probe import BOUNDS, TOP, bound, check, probe_tokens, record
from tests.checkpoint.tiny import manifest_of, parts_of


def logits(dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, 5, 11)).astype(dtype)


def elsewhere(recorded: dict) -> dict:
    return {**recorded, "where": {**recorded["where"], "processor": "another"}}


@given(vocab_size=st.integers(1, 300_000), length=st.integers(1, 64))
def test_probe_tokens_lie_in_the_vocabulary_and_never_change(vocab_size: int, length: int) -> None:
    tokens = probe_tokens(vocab_size, length)
    assert (tokens.shape, tokens.dtype) == ((2, length), np.int32)
    assert 0 <= tokens.min() <= tokens.max() < vocab_size
    assert tokens.tolist() == probe_tokens(vocab_size, length).tolist()
    assert probe_tokens(65, 4).tolist() == [[0, 16, 32, 48], [16, 36, 52, 7]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_the_same_logits_pass_and_one_flipped_bit_does_not(dtype: object) -> None:
    sealed = json.loads(json.dumps(record(logits(dtype))))
    assert check(sealed, logits(dtype)) == []
    changed = logits(dtype)
    changed.view(np.uint8).reshape(-1)[0] ^= 1
    (fault,) = check(sealed, changed)
    assert fault.failed == "logits of the probe"


def test_the_record_holds_the_top_logits_and_the_logsumexp_of_every_position() -> None:
    sealed, flat = record(jnp.asarray(logits())), logits().reshape(10, 11).astype(np.float64)
    assert np.shape(sealed["top_ids"]) == np.shape(sealed["top_values"]) == (10, TOP)
    np.testing.assert_array_equal(sealed["top_values"], -np.sort(-flat, axis=-1)[:, :TOP])
    np.testing.assert_allclose(sealed["logsumexp"], np.log(np.exp(flat).sum(-1)), rtol=1e-12)
    assert record(logits()[:, 0])["shape"] == [2, 11], "class logits have no positions"


def test_elsewhere_rounding_passes_and_a_difference_beyond_the_bound_does_not() -> None:
    sealed = elsewhere(record(logits()))
    tolerance = bound(sealed, record(logits()))
    assert tolerance == BOUNDS["float32"] * sealed["largest"]
    assert check(sealed, logits() + np.float32(tolerance / 2)) == []
    (fault,) = check(sealed, logits() + np.float32(tolerance * 2))
    assert fault.expected.startswith("within")
    other = np.zeros_like(logits())
    assert {fault.failed for fault in check(sealed, other)} >= {"top token at probe position 1", "logits of the probe"}


def test_elsewhere_a_top_token_may_change_only_where_its_lead_is_within_the_bound() -> None:
    near, far = np.float32([[0.0, 1.0, 1.00001]]), np.float32([[0.0, 1.0, 1.001]])
    assert check(elsewhere(record(near)), near[:, [0, 2, 1]]) == []
    faults = check(elsewhere(record(far)), far[:, [0, 2, 1]])
    assert [fault.failed for fault in faults] == ["logits of the probe", "top token at probe position 0"]


def test_accelerators_and_narrow_products_have_wider_bounds_and_layouts_are_not_held_to_bits() -> None:
    here = record(logits())
    gpu = {**here, "where": {**here["where"], "backend": "gpu"}}
    assert bound(here, here) < bound(gpu, here) <= bound(here, record(logits(), compute="bfloat16"))
    nudged = np.nextafter(logits(), np.float32(9))
    assert check(record(logits(), layout="data=8"), nudged, layout="data=1") == []
    assert check(record(logits(), layout="data=8"), nudged, layout="data=8") != []


def test_other_shapes_and_dtypes_are_named() -> None:
    sealed = record(logits())
    assert check(sealed, logits()[:1])[0].failed == "shape of the probe's logits"
    assert check(sealed, logits(np.float64))[0].failed == "dtype of the probe's logits"


def test_a_model_that_gives_nan_is_sealed_and_recognised() -> None:
    bad = np.full((1, 2, 9), np.nan, np.float32)
    bad[0, 1] = np.inf
    value = json.loads(json.dumps(manifest_of(1, parts_of(), probe=record(bad)).to_json()))
    sealed = Manifest.from_json(value).probe
    assert check(sealed, bad) == []
    assert check(elsewhere(sealed), bad * 1) == []
    assert check(elsewhere(sealed), np.zeros_like(bad)) != []
