"""Claim 3, the second part: record ids are equal, whichever processes share the batches. No jax.

Reads `data.batches`, `data.order` and `prove.subject`; `prove.prove` runs it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from jaxml.data.batches import TrainBatches
from jaxml.data.order import Order
from jaxml.prove.claims import Claim, exact
from jaxml.prove.subject import Subject

GROUP = "resume equals the straight run"
PROCESSES = (1, 2, 3, 4, 8)
SKIPPED = (2, 5)  # data steps that a rewind left out


def ordered(subject: Subject) -> Claim:
    """The shares of 1, 2, 3, 4 and 8 processes, joined, are the batch; also where steps were left out, in any order of
    asking, beyond the first epoch, and for a mix of three sources by weights."""
    size, steps = subject.experiment.train.batch_size, subject.experiment.train.steps
    faults = []
    for skipped in ((), SKIPPED):
        whole = TrainBatches(subject.prepared, size, skipped)
        for processes in PROCESSES:
            borders = [size * process // processes for process in range(processes + 1)]
            shares = [TrainBatches(subject.prepared, size, skipped, lo, hi) for lo, hi in pairwise(borders)]
            for step in reversed(range(0, steps, 3)):
                parts = [share.batch(step) for share in shares]
                for name, column in whole.batch(step).items():
                    if not np.array_equal(np.concatenate([part[name] for part in parts]), column):
                        faults.append(f"step {step}, {processes} processes: other values in {name!r}")
    mix = Order((size, 3 * size, 7), (3, 2, 1), subject.experiment.data.seed, SKIPPED)
    for step in range(0, steps, 3):
        every = np.stack(mix.slots(step, size))
        halves = [np.stack(mix.slots(step, size, lo, lo + size // 2)) for lo in (0, size // 2)]
        if not np.array_equal(np.concatenate(halves, axis=1), every):
            faults.append(f"step {step} of a mix of three sources: other records in two halves")
    detail = f"{steps} steps of {size} rows, shared by {', '.join(map(str, PROCESSES))} processes"
    return exact(GROUP, "record ids", faults, detail)
