"""Batches made ahead by threads, while the step runs: the only file that imports grain.

Reads anything with `batch(step)` (`data.batches.TrainBatches`, live data); the training loop iterates it. Because a
batch is a function of its step, seeking is slicing a range, and there is no iterator state to save.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, runtime_checkable

import grain
import numpy as np


@runtime_checkable
class HasBatches(Protocol):
    """A source of batches by global step."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step."""
        ...


class Loader:
    """Iterates (step, batch) from `first_step` on, without end, `prefetch` batches ahead (0: none, and no threads).

    `wait_s` is how long the last `next` waited for its batch. An error of `batch` is raised by the `next` of its step.
    """

    def __init__(self, batches: HasBatches, first_step: int, prefetch: int):
        def load(step: int) -> tuple[int, dict[str, np.ndarray]]:
            return int(step), batches.batch(int(step))

        options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
        steps = grain.MapDataset.range(first_step, sys.maxsize).map(load)
        self._iterator = iter(steps.to_iter_dataset(options))
        self.wait_s = 0.0

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> tuple[int, dict[str, np.ndarray]]:
        begun = time.perf_counter()
        step, batch = next(self._iterator)
        self.wait_s = time.perf_counter() - begun
        return step, batch

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of `step`, which has to be the next one: a loader is a source for a loop that goes step by step."""
        found, batch = next(self)
        if found != step:
            raise ValueError(f"the loader is at step {found}, and step {step} was asked for: open another one there")
        return batch

    def close(self) -> None:
        """Stop the threads. What was made ahead is dropped."""
        self._iterator.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
