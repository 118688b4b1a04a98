"""The held-out metrics of a set of parameters, each record counted once, and what each record scored.

Reads `recipes.assemble`; `recipes.running` calls `evaluate` at its evaluation steps, experiments call `evaluate_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxml.recipes.assemble import Assembly

Columns = dict[str, np.ndarray]


def evaluate(
    assembly: Assembly, params: Any, should_stop: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Metrics `eval_*` of `params` over the held-out split (its first `train.eval_batches` batches, if that is not 0).

    Sums are exact, and divided once by the task's `summarize`.
    Returns None when `should_stop` asked to leave between two batches.
    """
    measured = evaluate_rows(assembly, params, should_stop)
    if measured is None:
        return None
    metrics = assembly.program.task.summarize(*measured)
    return {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}


def evaluate_rows(
    assembly: Assembly, params: Any, should_stop: Callable[[], bool] = lambda: False
) -> tuple[Columns, Columns] | None:
    """(sums, rows) of the task over the same batches: the sums added on the host in float64 or int64, the outputs of
    each row joined in the order of the held-out split, with the padding rows of the last batch at the end.

    Returns None when `should_stop` asked to leave between two batches.
    """
    batches = assembly.eval_batches()
    num_batches = assembly.experiment.train.eval_batches or len(batches)
    sums: Columns = {}
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
    return sums, {name: np.concatenate(parts) for name, parts in rows.items()}
