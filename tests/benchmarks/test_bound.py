"""Laws of the bound of decoding: what a step reads, counted leaf by leaf on small models and by hand on the large one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.bound import bound_tokens_per_s, cache_bytes, step_bytes, weight_bytes
from jaxml import trees
from jaxml.models.build import bind_model
from jaxml.models.cache import empty_cache
from jaxml.models.presets import gpt2_124m, llama_15m, nanogpt_cpu
from jaxml.models.spec import DecoderSpec, ExecutionSpec
from jaxml.numerics.spec import PrecisionSpec

UNTIED = dataclasses.replace(llama_15m(), tied_head=False)


def stored_bytes(spec: DecoderSpec, leaf: str = "") -> int:
    """Bytes of all parameters, or of one leaf, by the model itself."""
    leaves = trees.flatten(bind_model(spec, PrecisionSpec(), ExecutionSpec()).abstract_params)
    return sum(4 * value.size for name, value in leaves.items() if not leaf or name == leaf)


def test_a_tied_model_without_positions_reads_all_that_it_has():
    assert weight_bytes(llama_15m(), 1) == stored_bytes(llama_15m()) == 4 * 15_191_712
    assert weight_bytes(llama_15m(), 8) == weight_bytes(llama_15m(), 1)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_table_that_is_only_looked_up_costs_one_row_for_each_row(num_rows):
    row_bytes = 4 * UNTIED.width * num_rows
    assert weight_bytes(UNTIED, num_rows) == stored_bytes(UNTIED) - stored_bytes(UNTIED, "embed.table") + row_bytes
    spec = nanogpt_cpu()
    expected = stored_bytes(spec) - 4 * spec.width * (spec.context_length - num_rows)
    assert weight_bytes(spec, num_rows) == expected


def test_the_cache_of_a_token_is_that_of_the_slots_it_sees():
    spec = nanogpt_cpu()
    cache = empty_cache(spec, 1, 10, jnp.float32)
    assert cache_bytes(spec, 10) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_a_window_bounds_the_cache():
    spec = nanogpt_cpu()
    attention = dataclasses.replace(spec.blocks[0].attention, window=4)
    windowed = dataclasses.replace(spec, blocks=(dataclasses.replace(spec.blocks[0], attention=attention),))
    assert cache_bytes(windowed, 3) == cache_bytes(spec, 3)
    assert cache_bytes(windowed, 9) == cache_bytes(spec, 4)


def test_a_step_reads_the_weights_once_and_the_mean_cache_of_every_row():
    spec = gpt2_124m()
    # Four tokens after a prompt of two: the first comes with the prompt, then steps see 3, 4 and 5 tokens.
    assert step_bytes(spec, 8, 2, 4) == weight_bytes(spec, 8) + 8 * cache_bytes(spec, 4)


def test_gpt2_at_one_row_is_bound_by_half_a_gigabyte_a_token():
    spec = gpt2_124m()
    assert step_bytes(spec, 1, 1, 64) == pytest.approx(
        4 * (124_439_808 - 1023 * 768) + 2 * 12 * 768 * 4 * 33, rel=1e-12
    )
    assert bound_tokens_per_s(spec, 1, 1, 64, gbytes_per_s=40.0) == pytest.approx(80.5, abs=0.3)
    assert bound_tokens_per_s(spec, 1, 1, 64, 80.0) == 2 * bound_tokens_per_s(spec, 1, 1, 64, 40.0)
