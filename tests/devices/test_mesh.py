"""Meshes from specs over eight fake devices."""

from __future__ import annotations

import math

import jax
import pytest
from jax.sharding import AxisType

from jaxml.devices.mesh import build_mesh, resolve_sizes
from jaxml.devices.spec import MeshSpec
from jaxml.errors import DeviceError


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (MeshSpec(), (8, 1, 1, 1)),
        (MeshSpec(data=2, fsdp=-1), (2, 4, 1, 1)),
        (MeshSpec(data=1, fsdp=8), (1, 8, 1, 1)),
        (MeshSpec(data=1, context=-1, tensor=2), (1, 1, 4, 2)),
        (MeshSpec(data=1, fsdp=2), (1, 2, 1, 1)),
    ],
)
def test_minus_one_takes_what_is_left_and_fixed_sizes_may_use_fewer_devices(spec, sizes):
    mesh = build_mesh(spec)
    assert mesh.axis_names == ("data", "fsdp", "context", "tensor")
    assert mesh.devices.shape == sizes
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == jax.devices()[: math.prod(sizes)]


def test_given_devices_are_used_in_their_order():
    devices = jax.devices()[:4:-1]
    assert list(build_mesh(MeshSpec(), devices).devices.flat) == devices


def test_all_faults_of_the_sizes_come_at_once():
    with pytest.raises(DeviceError) as raised:
        resolve_sizes(MeshSpec(data=0, fsdp=-2), 8)
    assert [fault.failed for fault in raised.value.faults] == ["mesh.data", "mesh.fsdp"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (MeshSpec(data=4, fsdp=4), "at most 8 devices"),
        (MeshSpec(data=-1, fsdp=3), "divide the 8 devices"),
        (MeshSpec(data=-1, fsdp=16), "at most 8 devices"),
        (MeshSpec(data=-1, fsdp=-1), "-1 for one axis at most"),
    ],
)
def test_a_mesh_that_does_not_fit_says_why(spec, message):
    with pytest.raises(DeviceError, match=message):
        resolve_sizes(spec, 8)
