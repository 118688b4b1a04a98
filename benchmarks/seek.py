"""How long the batch of step 1,000,000 takes on prepared data, as a run does that resumes there.

`benchmarks/train_rows.py` starts it as a process of its own; it prints one JSON object.

    python benchmarks/seek.py experiments/shakespeare.py
"""

from __future__ import annotations

import json
import sys
import time

from jaxml.cli.experiment_file import load_experiment
from jaxml.data.batches import TrainBatches
from jaxml.data.prepared import open_prepared

STEP = 1_000_000


def main(path: str) -> None:
    experiment = load_experiment(path, [])
    batches = TrainBatches(open_prepared(experiment.data), experiment.train.batch_size)
    begun = time.perf_counter()
    batch = batches.batch(STEP)
    seek_ms = 1e3 * (time.perf_counter() - begun)
    print(json.dumps({"seek_ms": seek_ms, "tokens": batch["tokens"].size}))


if __name__ == "__main__":
    main(sys.argv[1])
