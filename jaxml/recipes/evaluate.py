"""The held-out metrics of a set of parameters, each record counted once.

Reads `recipes.assemble`; `recipes.train` calls it at its evaluation steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxml.recipes.assemble import Assembly


def evaluate(
    assembly: Assembly, params: Any, should_stop: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Metrics `eval_*` of `params` over the held-out split (its first `train.eval_batches` batches, if that is not 0).

    Sums are exact: they are added on the host in float64 or int64, and divided once by the task's `summarize`.
    Returns None when `should_stop` asked to leave between two batches.
    """
    batches = assembly.eval_batches()
    num_batches = assembly.experiment.train.eval_batches or len(batches)
    sums: dict[str, np.ndarray] = {}
    rows: dict[str, list[np.ndarray]] = {}
    for index in range(min(num_batches, len(batches))):
        if should_stop():
            return None
        batch_sums, batch_rows = jax.device_get(assembly.program.eval_step(params, batches.batch(index)))
        for name, value in batch_sums.items():
            wide = np.asarray(value, np.int64 if np.issubdtype(value.dtype, np.integer) else np.float64)
            sums[name] = np.add(sums.get(name, np.zeros_like(wide)), wide, out=np.empty_like(wide))
        for name, value in batch_rows.items():
            rows.setdefault(name, []).append(value)
    joined = {name: np.concatenate(parts) for name, parts in rows.items()}
    metrics = assembly.program.task.summarize(sums, joined)
    return {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}
