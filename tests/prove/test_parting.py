"""Two runs are laid side by side value by value, whatever loops each of them has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxml.prove.meshes import SINGLE
from jaxml.prove.named_values import NamedValue
from jaxml.prove.parting import _merged, apart, in_backward_order, part
from jaxml.prove.subject import Subject


def test_scanned_layers_chunks_and_microbatches_lie_beside_the_whole_batch(change: Callable[..., Subject]) -> None:
    """Every value of two layers that are scanned and computed again, with the loss in three chunks, by microbatches."""
    execution = dict(layers="scanned", rematerialize="full", logits_chunk_bytes=24 * 24 * 60 * 8 // 3)
    subject = change(model=dict(num_layers=2), execution=execution)
    expected = subject.expected(1, "float64")
    got = subject.taken(SINGLE, 2, "float64", expected)
    assert apart(got, expected)[0] < 1e-12
    parting, picture = part(subject, ((SINGLE, 2, "float64"), (SINGLE, 1, "float64")), got, expected)
    assert parting is None
    ((_, points),) = picture.curves
    # The embedding, two layers, the final norm, the logits; then what is computed again.
    assert len(points) >= 1 + 2 * 7 + 1 + 1
    assert max(error for _, error in points if error is not None) < 1e-13


def test_microbatch_j_of_a_holds_rows_j_and_j_plus_a() -> None:
    whole = np.arange(6.0).reshape(6, 1)
    parts = whole.reshape(3, 2, 1).swapaxes(0, 1)
    (merged,) = _merged([NamedValue("query", "", (1,), parts)], 2, 6)
    assert (merged.scans, merged.value.tolist()) == ((), whole.tolist())
    layers = np.stack([whole, 10 * whole])
    (merged,) = _merged([NamedValue("query", "", (1, 2), np.stack([parts, 10 * parts], axis=1))], 2, 6)
    assert (merged.scans, merged.value.tolist()) == ((2,), layers.tolist())
    other = NamedValue("query", "", (1,), np.ones((3, 5)))
    assert _merged([other], 2, 6) == [other]


def test_gradients_are_told_from_the_last_layer_to_the_first() -> None:
    paths = ["blocks.0.mlp.up.kernel", "embed.table", "final_norm.scale", "head.kernel", "positions.table"]
    assert in_backward_order(paths) == [paths[3], paths[2], paths[0], paths[4], paths[1]]
