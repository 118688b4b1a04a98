"""How many devices each mesh axis takes, as data. Reads `config.spec`; `devices.mesh` builds the mesh. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxml.config.spec import Spec


@dataclass(frozen=True)
class MeshSpec(Spec):
    """Sizes of the mesh axes; -1 (one axis at most) takes the devices that the others leave.

    `data` replicates parameters and splits the rows of the batch; `fsdp` splits both. `context` splits the tokens of
    each row (attention then goes round a ring), `tensor` the heads, the hidden width of the MLP and the vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
