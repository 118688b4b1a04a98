"""Batches are ragged and still consistent; moments are told by the tree and the parameter that they belong to."""

from __future__ import annotations

import numpy as np

from jaxml.prove.subject import Subject, moments


def test_rows_are_ragged_in_segments_padding_and_targets(subject: Subject) -> None:
    batch = subject.batch(0)
    segments, mask = batch["segment_ids"], batch["loss_mask"]
    assert len({int(row.max()) for row in segments}) > 1
    assert (segments == 0).any(axis=1).any()
    assert not mask[segments == 0].any()
    assert len({int(count) for count in mask.sum(axis=1)}) > 3
    starts = np.diff(segments, axis=1) != 0
    assert (batch["positions"][:, 1:][starts] == 0).all()
    same = subject.batch(0)
    assert all(np.array_equal(batch[name], same[name]) for name in batch)


def test_moments_are_compared_tree_by_tree() -> None:
    found = moments(
        ({"count": np.array(2), "mu": {"w": {"x": np.ones(2)}}, "nu": {"w": {"x": np.ones(2)}}}, {}), ["w.x"]
    )
    assert set(found) == {"opt_state", "opt_state.0.mu", "opt_state.0.nu"}
    assert list(found["opt_state.0.mu"]) == ["w.x"]
    assert list(found["opt_state"]) == ["0.count"]
