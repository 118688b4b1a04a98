"""The loader yields what the batches are, from any step, and says how long it made one wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxml.data.batches import TrainBatches
from jaxml.data.loader import Loader
from jaxml.data.prepared import Prepared
from jaxml.errors import DataError


class Slow:
    """Batches that take time, and remember who made them."""

    def __init__(self, seconds: float = 0.0, fails_at: int | None = None):
        self.seconds, self.fails_at = seconds, fails_at
        self.threads: set[int] = set()

    def batch(self, step: int) -> dict[str, np.ndarray]:
        time.sleep(self.seconds)
        self.threads.add(threading.get_ident())
        if step == self.fails_at:
            raise DataError("step", expected="a batch", got=str(step), todo="nothing")
        return {"step": np.array([step])}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("first_step", [0, 7, 1_000_000])
def test_it_yields_the_batches_in_order_from_any_step(mixed: Prepared, prefetch: int, first_step: int) -> None:
    batches = TrainBatches(mixed, 4)
    with Loader(batches, first_step, prefetch) as loader:
        for expected, (step, batch) in zip(range(first_step, first_step + 5), loader, strict=False):
            assert step == expected
            assert all(np.array_equal(batch[name], array) for name, array in batches.batch(step).items())


def test_seeking_a_million_steps_takes_no_time(mixed: Prepared) -> None:
    begun = time.perf_counter()
    with Loader(TrainBatches(mixed, 4), 1_000_000, 2) as loader:
        assert next(loader)[0] == 1_000_000
    assert time.perf_counter() - begun < 1.0


def test_without_prefetch_there_are_no_threads_and_with_it_there_are() -> None:
    for prefetch in (0, 2):
        batches = Slow()
        with Loader(batches, 0, prefetch) as loader:
            next(loader)
            next(loader)
        assert (batches.threads == {threading.get_ident()}) == (prefetch == 0)


def test_a_slow_source_is_hidden_at_every_step_and_its_wait_is_told() -> None:
    with Loader(Slow(0.02), 0, 0) as loader:
        next(loader)
        assert loader.wait_s >= 0.02
    waits = []
    with Loader(Slow(0.02), 0, 4) as loader:
        for _ in range(13):  # three windows of the buffer: no window border may wait
            next(loader)
            waits.append(loader.wait_s)
            time.sleep(0.03)
    assert np.median(waits[1:]) < 0.01
    assert sum(wait >= 0.018 for wait in waits[1:]) <= 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_comes_with_the_step_that_it_belongs_to(prefetch: int) -> None:
    with Loader(Slow(fails_at=3), 1, prefetch) as loader:
        assert [next(loader)[0], next(loader)[0]] == [1, 2]
        with pytest.raises(DataError, match="step"):
            next(loader)


def test_data_is_prepared_and_batched_without_jax_or_grain() -> None:
    code = (
        "import sys, jaxml.data.prepare, jaxml.data.batches, jaxml.inputs.tokenizers;"
        "sys.exit(str([m for m in ('jax', 'grain', 'optax', 'pyarrow') if m in sys.modules] or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
