"""What a run's records say in a few numbers: throughput, waiting for data, seconds spent compiling.

Reads the records of `observe.metrics_log` and the seconds of `telemetry.WallClock.summary`; the recipe prints it and
`observe.report` shows it. No jax.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A run that spends more than this share of its step time waiting would be noticeably faster with faster input.
INPUT_BOUND_SHARE = 0.1


@dataclass(frozen=True)
class RunSummary:
    """`tokens_per_s` is the median over steps; `data_wait_share` the fraction of step time spent waiting for a batch.

    Both are None when no record has the times they need.
    """

    num_steps: int
    tokens_per_s: float | None
    data_wait_share: float | None
    compile_s: float
    wall_s: float

    @property
    def is_input_bound(self) -> bool:
        return self.data_wait_share is not None and self.data_wait_share > INPUT_BOUND_SHARE

    @property
    def verdict(self) -> str:
        """Whether the run was input-bound, as a sentence."""
        if self.data_wait_share is None:
            return "waiting for data was not measured"
        word = "input-bound" if self.is_input_bound else "not input-bound"
        return f"{word}: {self.data_wait_share:.1%} of the step time was spent waiting for data"


def summarize(records: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]) -> RunSummary:
    """The summary of a run.

    Arguments:
      records: those of `metrics.jsonl`. The first one counts towards no time when there are others: it waits for a
        prefetch buffer that is still empty, which says nothing about the rest.
      seconds: the wall-clock account, seconds by kind.

    >>> summarize([{"step": s, "tokens_per_s": 100.0, "step_s": 0.5, "data_wait_s": 0.5} for s in (1, 2)], {}).verdict
    'input-bound: 50.0% of the step time was spent waiting for data'
    """
    steady = records[1:] if len(records) > 1 else records
    rates = [float(record["tokens_per_s"]) for record in steady if record.get("tokens_per_s") is not None]
    timed = [r for r in steady if r.get("step_s") is not None and r.get("data_wait_s") is not None]
    wait_s = math.fsum(record["data_wait_s"] for record in timed)
    whole_s = math.fsum(record["step_s"] for record in timed) + wait_s
    return RunSummary(
        num_steps=len(records),
        tokens_per_s=statistics.median(rates) if rates else None,
        data_wait_share=wait_s / whole_s if whole_s > 0 else None,
        compile_s=seconds.get("compile", 0.0),
        wall_s=math.fsum(seconds.values()),
    )
