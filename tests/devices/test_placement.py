"""Rows of a process, and arrays from them. One process here: that several agree is in tests/launch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxml.devices.mesh import build_mesh
from jaxml.devices.placement import put_rows, rows_of_process
from jaxml.devices.sharding import batch_sharding
from jaxml.devices.spec import MeshSpec


class OfDevices:
    """A sharding as a process sees it that has some of its devices."""

    def __init__(self, sharding, devices):
        self.sharding, self.devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        every = self.sharding.devices_indices_map(shape)
        return {device: every[device] for device in self.devices}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (MeshSpec(data=8), [(0, 6), (6, 12), (12, 18), (18, 24)]),
        (MeshSpec(data=2, fsdp=4), [(0, 6), (6, 12), (12, 18), (18, 24)]),
        (MeshSpec(data=2, context=4), [(0, 12), (0, 12), (12, 24), (12, 24)]),
        (MeshSpec(data=1, tensor=8), [(0, 24)] * 4),
    ],
)
def test_the_processes_need_the_rows_of_their_devices_and_cover_the_batch(spec: MeshSpec, expected) -> None:
    mesh = build_mesh(spec)
    devices = list(mesh.devices.flat)
    shares = [devices[begin : begin + 2] for begin in range(0, 8, 2)]
    # As four processes of two devices each would ask; jaxtyping's check of the argument is for real shardings.
    ask = rows_of_process.__wrapped__ if hasattr(rows_of_process, "__wrapped__") else rows_of_process
    assert [ask(OfDevices(batch_sharding(mesh, 1), share), 24) for share in shares] == expected
    assert rows_of_process(batch_sharding(mesh, 1), 24) == (0, 24)


def test_arrays_of_rows_have_the_values_and_the_sharding() -> None:
    mesh = build_mesh(MeshSpec(data=2, context=2))
    columns = {"tokens": np.arange(24, dtype=np.int32).reshape(4, 6), "row": np.arange(4, dtype=np.int32)}
    shardings = {"tokens": batch_sharding(mesh, 2), "row": batch_sharding(mesh, 1)}
    placed = put_rows(columns, shardings)
    for name, column in columns.items():
        np.testing.assert_array_equal(jax.device_get(placed[name]), column)
        assert placed[name].sharding == shardings[name]
