"""How many devices each mesh axis takes, as data. Reads `config.spec`; `devices.mesh` builds the mesh. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxml.config.spec import Spec


@dataclass(frozen=True)
class MeshSpec(Spec):
    """Sizes of the mesh axes; -1 (one axis at most) takes the devices that the others leave.

    `data` replicates parameters and splits the batch; `fsdp` splits both.
    """

    data: int = -1
    fsdp: int = 1
