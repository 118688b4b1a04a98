"""Builds the device mesh that parameters and batches are laid out on.

Reads `devices.spec` and `errors`; `devices.sharding` maps arrays to its axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxml.devices.spec import MeshSpec
from jaxml.errors import DeviceError, Faults


def build_mesh(spec: MeshSpec, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a spec over `devices` (None: all of them), with Auto axes in the order of the spec's fields.

    A mesh with fixed sizes may be smaller than `devices`; it then takes the first ones. Raises DeviceError with every
    fault: sizes that are not positive, several -1, a product that does not fit the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = resolve_sizes(spec, len(devices))
    chosen = np.asarray(devices[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(chosen, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def resolve_sizes(spec: MeshSpec, num_devices: int) -> dict[str, int]:
    """Mesh axis to size, with -1 filled in.

    >>> resolve_sizes(MeshSpec(data=-1, fsdp=4), 8)
    {'data': 2, 'fsdp': 4, 'context': 1, 'tensor': 1}
    """
    sizes = dataclasses.asdict(spec)
    faults = Faults(DeviceError)
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            faults.add(f"mesh.{axis}", expected="a positive size, or -1", got=str(size), todo=f"set --mesh.{axis} 1")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        faults.add(
            "mesh",
            expected="-1 for one axis at most",
            got=f"-1 for {' and '.join(free)}",
            todo="give sizes to the others",
        )
    faults.raise_if_any()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if fixed > num_devices:
        faults.add(
            "mesh",
            expected=f"at most {num_devices} devices, which is what JAX sees here",
            got=f"{shape}, {fixed} devices",
            todo="lower the sizes, or start where there are more devices",
        )
    elif free and num_devices % fixed:
        faults.add(
            "mesh",
            expected=f"fixed sizes that divide the {num_devices} devices",
            got=shape,
            todo=f"choose a divisor of {num_devices}, or set {free[0]} yourself to use fewer devices",
        )
    faults.raise_if_any()
    return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}
