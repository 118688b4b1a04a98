"""Each planted fault fails the right line of the proof, and nothing but the fault does: unpatched, the same claim holds.

The faults are planted by patching the functions of jaxml that hold the rule; the proof itself is the real one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxml.keys
from jaxml.data.batches import EvalBatches
from jaxml.data.order import Order
from jaxml.devices.sharding import BATCH_AXES, WIDTH_AXIS
from jaxml.devices.spec import MeshSpec
from jaxml.infer.opening import open_checkpoint
from jaxml.models import attention_split, cache
from jaxml.models.decoder import Decoder
from jaxml.models.named import named
from jaxml.prove import accumulation, decoding, evaluation, order, resuming, sharding
from jaxml.prove.claims import Claim
from jaxml.prove.meshes import SINGLE
from jaxml.prove.subject import Subject
from jaxml.recipes.saving import Saver
from jaxml.train import step as step_file
from jaxml.train.gradients import LossGradients, loss_gradients

Patch = pytest.MonkeyPatch
SPLIT = MeshSpec(data=2, context=2, tensor=2)
RING = MeshSpec(data=1, context=4)
SHARDED = MeshSpec(data=1, fsdp=4)


def wrong_axis_rule(patch: Patch) -> None:
    """The segment ids of a stretch of tokens are split by the axis of the heads."""
    real = attention_split._partitions

    def partitions(num_heads: int, num_kv_heads: int) -> tuple[PartitionSpec, PartitionSpec]:
        return real(num_heads, num_kv_heads)[0], PartitionSpec(BATCH_AXES, WIDTH_AXIS)

    patch.setattr(attention_split, "_partitions", partitions)


def segment_mask_left_out(patch: Patch) -> None:
    """Round the ring a query sees the keys of every document."""
    real = attention_split._masked

    def masked(scores: Any, segment_ids: Any, rows: Any, first_key: Any, shape: Any) -> Any:
        same = rows._replace(segment_ids_BS=jnp.ones_like(rows.segment_ids_BS))
        return real(scores, jnp.ones_like(segment_ids), same, first_key, shape)

    patch.setattr(attention_split, "_masked", masked)


def tied_weights_untied(patch: Patch) -> None:
    """On a mesh the head has a copy of the embedding, which nothing brings back."""
    real = Decoder.logits

    def logits(self: Decoder, features: Any) -> Any:
        if jax.sharding.get_abstract_mesh().size == 1:
            return real(self, features)
        return named(features @ jax.lax.stop_gradient(self.embed.table[...]).T, "logits")

    patch.setattr(Decoder, "logits", logits)


def reused_dropout_key(patch: Patch) -> None:
    """Rows are numbered within the microbatch."""
    real = jaxml.keys.row_keys
    patch.setattr(jaxml.keys, "row_keys", lambda key, rows: real(key, jnp.arange(rows.shape[0], dtype=rows.dtype)))


def mean_of_means(patch: Patch) -> None:
    """Each microbatch is divided by its own weight, and the means are averaged."""

    def averaged(bound, task, params, batch, key, accumulate, mesh, shardings, *rest) -> LossGradients:
        def one(rows: Any) -> LossGradients:
            return loss_gradients(bound, task, params, rows, key, 1, mesh, shardings, *rest)

        if accumulate == 1:
            return one(batch)
        parts = {name: jnp.moveaxis(x.reshape(-1, accumulate, *x.shape[1:]), 1, 0) for name, x in batch.items()}
        _, every = jax.lax.scan(lambda carry, rows: (carry, one(rows)), 0, parts)
        return jax.tree.map(lambda leaf: leaf.mean(axis=0), every)

    patch.setattr(step_file, "loss_gradients", averaged)


def loss_divided_per_microbatch(patch: Patch) -> None:
    """What is divided by the weight of the whole batch already is divided by the number of microbatches too."""

    def divided(bound, task, params, batch, key, accumulate, *rest) -> LossGradients:
        whole = loss_gradients(bound, task, params, batch, key, accumulate, *rest)
        return jax.tree.map(lambda leaf: leaf / accumulate, whole)

    patch.setattr(step_file, "loss_gradients", divided)


def last_batch_dropped(patch: Patch) -> None:
    patch.setattr(EvalBatches, "__len__", lambda self: int(self._ends[-1]) // self.batch_size)


def host_dependent_order(patch: Patch) -> None:
    """Each process begins its permutation at its own first row."""
    real = Order.slots

    def slots(self: Order, step: int, batch_size: int, lo: int = 0, hi: int | None = None) -> Any:
        sources, rows, epochs = real(self, step, batch_size, lo, hi)
        return sources, (rows + lo) % np.array(self.rows_per_source)[sources], epochs

    patch.setattr(Order, "slots", slots)


def moments_not_restored(patch: Patch) -> None:
    real = Saver.restore

    def restore(self: Saver, step: int) -> Any:
        state, skipped = real(self, step)
        forgotten = jax.tree.map(lambda leaf: leaf * (leaf.dtype == jnp.int32), state["opt_state"])
        return state | {"opt_state": forgotten}, skipped

    patch.setattr(Saver, "restore", restore)


def cache_off_by_one(patch: Patch) -> None:
    """A query does not see its own token."""
    real = cache.visible
    patch.setattr(cache, "visible", lambda positions, *rest: real(jnp.maximum(positions - 1, 0), *rest))


def resumed(subject: Subject) -> Claim:
    with open(os.devnull, "w") as nowhere:
        return resuming.resumed(subject, nowhere)


def cached(subject: Subject) -> Claim:
    return decoding.cached(subject, open_checkpoint(subject.directory / "straight"))


def sharded_on(mesh: MeshSpec) -> Callable[[Subject], Claim]:
    return lambda subject: sharding.sharded(subject, mesh)


def accumulated(subject: Subject) -> Claim:
    return accumulation.accumulated(subject, 2, SINGLE)


# What is planted, the claim that has to fail, and the first value that parts with the file that made it ("": the claim is
# one of plain counting, and tells what it counted).
FAULTS = [
    (wrong_axis_rule, sharded_on(SPLIT), "attention_mixed, layer 0", "jaxml/models/attention.py"),
    (segment_mask_left_out, sharded_on(RING), "attention_mixed, layer 0", "jaxml/models/attention.py"),
    (tied_weights_untied, sharded_on(SHARDED), "gradient of embed.table", "the backward pass"),
    (reused_dropout_key, accumulated, "embedded", "jaxml/models/decoder.py"),
    (mean_of_means, accumulated, "loss", "jaxml/train/gradients.py"),
    (loss_divided_per_microbatch, accumulated, "loss", "jaxml/train/gradients.py"),
    (last_batch_dropped, evaluation.counted, "", "counted 0 times"),
    (host_dependent_order, order.ordered, "", "other values in 'tokens'"),
    (moments_not_restored, resumed, "opt_state of 0.mu.blocks", "jaxml/train/optimizer.py"),
    (cache_off_by_one, cached, "layer 0", "jaxml/models"),
]


@pytest.mark.parametrize(("plant", "claim", "name", "made_by"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_planted_fault_fails_its_line_and_names_where_it_begins(
    with_straight_run: Subject,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Patch], None],
    claim: Callable[[Subject], Claim],
    name: str,
    made_by: str,
) -> None:
    plant(monkeypatch)
    found = claim(with_straight_run)
    assert found.verdict == "fail"
    assert found.error > found.bound
    if not name:
        assert made_by in found.detail
        assert found.parting is None
        return
    assert found.parting is not None
    assert name in found.parting.name
    assert made_by in found.parting.made_by
