"""What a family of published models is: a value with the two functions that its file defines.

Reads `models.spec` and `models.families.tensors`; each family's file makes one, `recipes.importing` lists them. No jax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxml.models.families.tensors import PublishedTensor
from jaxml.models.spec import DecoderSpec


@dataclass(frozen=True)
class Family:
    """`name` is the `model_type` of its config.json files.

    unused: names of tensors that may be in a file and are not read. tied: tensors that a file with a tied head may hold a
    second time, and what they must be equal to.
    """

    name: str
    spec_from_config: Callable[[dict[str, Any]], DecoderSpec]
    tensors: Callable[[DecoderSpec], tuple[PublishedTensor, ...]]
    unused: re.Pattern[str]
    tied: Mapping[str, str]
