"""On which meshes an experiment is proven: its own, made to fit eight devices, and the standard set. No jax.

Reads `devices.spec`; `prove.sharding` runs them, `prove.shrink` prints the own one.
"""

from __future__ import annotations

import dataclasses
import math

from jaxml.devices.spec import MeshSpec

NUM_DEVICES = 8
SIZES = (1, 2, 3, 4, 6, 8)  # of an axis: they divide the rows of the small batch
SINGLE = MeshSpec(data=1)
STANDARD = (
    MeshSpec(data=8),
    MeshSpec(data=1, fsdp=8),
    MeshSpec(data=2, fsdp=4),
    MeshSpec(data=1, tensor=2),
    MeshSpec(data=1, context=4),
    MeshSpec(data=2, fsdp=2, tensor=2),
    MeshSpec(data=2, context=2, tensor=2),
)


def own_mesh(spec: MeshSpec) -> MeshSpec:
    """The experiment's own mesh on eight devices: its largest axes are halved until they fit, and -1 takes what is left.

    >>> own_mesh(MeshSpec(data=-1, fsdp=16))
    MeshSpec(data=1, fsdp=8, context=1, tensor=1)
    >>> own_mesh(MeshSpec(data=4, fsdp=4))
    MeshSpec(data=2, fsdp=4, context=1, tensor=1)
    """
    wanted = dataclasses.asdict(spec)
    sizes = {axis: max(s for s in SIZES if s <= size) for axis, size in wanted.items() if size != -1}
    while math.prod(sizes.values()) > NUM_DEVICES:
        largest = max(sizes, key=lambda axis: sizes[axis])  # the first of equal ones
        sizes[largest] = max(1, sizes[largest] // 2)
    free = {axis: NUM_DEVICES // math.prod(sizes.values()) for axis, size in wanted.items() if size == -1}
    return MeshSpec(**{axis: (free | sizes)[axis] for axis in wanted})


def mesh_name(spec: MeshSpec) -> str:
    """The axes that split something: `data=2 fsdp=4`.

    >>> mesh_name(MeshSpec(data=2, fsdp=4)), mesh_name(SINGLE)
    ('data=2 fsdp=4', 'one device')
    """
    axes = [f"{axis}={size}" for axis, size in dataclasses.asdict(spec).items() if size > 1]
    return " ".join(axes) or "one device"
