"""Batches hold what the plan says: targets are next tokens, masks are booleans, and every row counts exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxml.data.batches import Batch, EvalBatches, TrainBatches
from jaxml.data.prepared import Prepared
from jaxml.errors import DataError

TOKEN_KEYS = {"tokens", "targets", "positions", "segment_ids", "loss_mask", "row", "record", "source"}
LABEL_KEYS = {"tokens", "positions", "segment_ids", "label", "is_valid", "row", "record", "source"}


def equal(left: Batch, right: Batch) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def reference(prepared: Prepared, split: str, source: int, row: int) -> list[tuple[int, int, int, int]]:
    """(token, target, position, segment id) of each position of a row, straight from the documents."""
    found = []
    for number, (document, start, length) in enumerate(prepared.segments(split, source, row).tolist(), 1):
        ids = prepared.tokens(document).tolist()
        found += [(ids[start + i], ids[start + i + 1], i, number) for i in range(length)]
    return found


@pytest.mark.parametrize("name", ["mixed", "concatenated"])
def test_every_target_is_the_next_token_of_the_same_document(name: str, request: pytest.FixtureRequest) -> None:
    prepared: Prepared = request.getfixturevalue(name)
    batch = TrainBatches(prepared, 16).batch(2)
    for index in range(16):
        expected = reference(prepared, "train", int(batch["source"][index]), int(batch["record"][index]))
        columns = ("tokens", "targets", "positions", "segment_ids")
        got = list(zip(*(batch[column][index].tolist() for column in columns), strict=True))
        assert got[: len(expected)] == expected
        assert set(got[len(expected) :]) <= {(0, 0, 0, 0)}


def test_masks_are_booleans_and_weigh_every_segment_alike(mixed: Prepared) -> None:
    batch = TrainBatches(mixed, 16).batch(0)
    assert batch.keys() == TOKEN_KEYS
    assert batch["loss_mask"].dtype == np.bool_
    np.testing.assert_array_equal(batch["loss_mask"], batch["segment_ids"] > 0)
    assert batch["segment_ids"].max() >= 2
    assert {name: array.dtype for name, array in batch.items() if name != "loss_mask"} == {
        name: np.dtype(np.int32) for name in TOKEN_KEYS - {"loss_mask"}
    }


def test_a_labelled_row_is_a_whole_document_with_its_label(labelled: Prepared) -> None:
    batch = TrainBatches(labelled, 8).batch(1)
    assert batch.keys() == LABEL_KEYS
    assert batch["is_valid"].dtype == np.bool_
    assert batch["is_valid"].all()
    for index in range(8):
        (segment,) = labelled.describe_row("train", 0, int(batch["record"][index])).segments
        assert labelled.labels[batch["label"][index]] == segment.document.label
        length = min(segment.document.num_tokens, 64)
        np.testing.assert_array_equal(
            batch["tokens"][index, :length], labelled.tokens(segment.document.number)[:length]
        )
        assert batch["segment_ids"][index].tolist() == [1] * length + [0] * (64 - length)
        assert batch["positions"][index].tolist() == [*range(length), *[0] * (64 - length)]


@pytest.mark.parametrize("name", ["mixed", "labelled"])
@pytest.mark.parametrize("batch_size", [1, 7, 13, 64])
def test_evaluation_has_every_held_out_row_exactly_once(
    name: str, batch_size: int, request: pytest.FixtureRequest
) -> None:
    prepared: Prepared = request.getfixturevalue(name)
    batches = EvalBatches(prepared, batch_size)
    found = [batches.batch(index) for index in range(len(batches))]
    assert {batch["tokens"].shape for batch in found} == {(batch_size, 64)}
    is_row = np.concatenate([batch.get("is_valid", batch["segment_ids"].any(axis=1)) for batch in found])
    columns = (np.concatenate([batch[key] for batch in found])[is_row].tolist() for key in ("source", "record"))
    pairs = Counter(zip(*columns, strict=True))
    expected = [(s, row) for s, count in enumerate(prepared.num_rows("held_out")) for row in range(count)]
    assert sorted(pairs) == expected
    assert set(pairs.values()) == {1}
    padding = {name: np.concatenate([batch[name] for batch in found])[~is_row] for name in found[0]}
    assert not padding["segment_ids"].any()
    assert not padding.get("loss_mask", padding.get("is_valid")).any()
    assert set(padding["record"].tolist()) <= {-1}
    with pytest.raises(IndexError):
        batches.batch(len(batches))


@pytest.mark.parametrize("name", ["mixed", "labelled"])
def test_shares_of_processes_make_up_the_batch_however_many_there_are(
    name: str, request: pytest.FixtureRequest
) -> None:
    prepared: Prepared = request.getfixturevalue(name)
    for make in (TrainBatches, EvalBatches):
        whole = make(prepared, 12).batch(0)
        assert whole["row"].tolist() == list(range(12))
        for num_processes in (2, 3, 4):
            share = 12 // num_processes
            parts = [make(prepared, 12, lo=lo, hi=lo + share).batch(0) for lo in range(0, 12, share)]
            assert equal({key: np.concatenate([part[key] for part in parts]) for key in whole}, whole)


@pytest.mark.parametrize("name", ["mixed", "labelled"])
def test_rows_that_are_not_asked_for_keep_their_place_and_stay_empty(name: str, request: pytest.FixtureRequest) -> None:
    prepared: Prepared = request.getfixturevalue(name)
    for make in (TrainBatches, EvalBatches):
        whole = make(prepared, 12).batch(0)
        joined = {key: np.zeros_like(column) for key, column in whole.items()}
        for lo, hi in ((0, 5), (5, 6), (6, 12)):
            part = make(prepared, 12, filled=(lo, hi)).batch(0)
            for key, column in part.items():
                joined[key][lo:hi] = column[lo:hi]
                assert column.shape == whole[key].shape
            assert all(np.array_equal(part[key], whole[key]) for key in ("row", "record", "source"))
            assert not np.delete(part["tokens"], slice(lo, hi), axis=0).any()
        assert equal(joined, whole)


def test_going_on_at_any_step_is_the_straight_run_across_epochs(mixed: Prepared) -> None:
    straight = TrainBatches(mixed, 6)
    border = sum(mixed.num_rows("train")) // 6
    epochs = [straight.order.slots(step, 6)[2] for step in range(2 * border)]
    assert any(len(set(epoch.tolist())) > 1 for epoch in epochs)  # a batch that spans an epoch border
    expected = [straight.batch(step) for step in range(2 * border)]
    for first in (1, border - 1, border):
        resumed = TrainBatches(mixed, 6)
        assert all(equal(resumed.batch(step), expected[step]) for step in range(first, 2 * border))
    # Later epochs see everything, not only what was left when the run stopped.
    records = np.concatenate([batch["record"][batch["source"] == 0] for batch in expected])
    assert set(records.tolist()) == set(range(mixed.num_rows("train")[0]))


def test_each_epoch_of_a_source_has_all_its_rows_in_another_order(mixed: Prepared) -> None:
    count = mixed.num_rows("train")[1]
    batches = TrainBatches(mixed, 4)
    records = []
    for step in range(2 * count):
        batch = batches.batch(step)
        records += batch["record"][batch["source"] == 1].tolist()
    first, second = records[:count], records[count : 2 * count]
    assert sorted(first) == sorted(second) == list(range(count))
    assert first != second


def test_weights_of_the_mix_are_those_of_the_spec(mixed: Prepared) -> None:
    batch = TrainBatches(mixed, 16).batch(5)
    assert np.bincount(batch["source"]).tolist() == [12, 4]


def test_skipped_data_steps_are_left_out(mixed: Prepared) -> None:
    straight, skipping = TrainBatches(mixed, 4), TrainBatches(mixed, 4, skipped=(1, 2))
    assert equal(skipping.batch(0), straight.batch(0))
    assert equal(skipping.batch(1), straight.batch(3))


@pytest.mark.parametrize(("batch_size", "lo", "hi"), [(0, 0, None), (4, 4, None), (4, 0, 5), (4, -1, 2), (4, 2, 2)])
def test_shares_outside_the_batch_are_refused(mixed: Prepared, batch_size: int, lo: int, hi: int | None) -> None:
    for make in (TrainBatches, EvalBatches):
        with pytest.raises(DataError, match="rows of the batch"):
            make(mixed, batch_size, lo=lo, hi=hi)
