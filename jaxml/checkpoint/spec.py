"""When to save and what to keep, as data. Reads `config.spec`; `checkpoint.store` acts on it. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxml.config.spec import Spec


@dataclass(frozen=True)
class CheckpointSpec(Spec):
    """A checkpoint every `every` steps and at the end. Kept: the newest `keep_last`, each multiple of `keep_every`
    (0: none), and the `keep_best` best by `best_metric` (0: none; `best_mode` says which way is better)."""

    every: int = 100
    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0
    best_metric: str = "eval_loss"
    best_mode: Literal["min", "max"] = "min"
