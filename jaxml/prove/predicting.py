"""Claim 5 for a classifier: what it predicts for a text is what it was trained to say, alone and among others.

Reads `infer.predict` and `prove.subject`; `prove.prove` runs it on the straight run's last checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from jaxml.infer.opening import Opened
from jaxml.infer.predict import TextClassifier
from jaxml.prove.claims import BOUND, Claim, distances, exact
from jaxml.prove.meshes import SINGLE
from jaxml.prove.subject import Subject
from jaxml.recipes.evaluate import evaluate_rows

GROUP = "predictions are those of training"
ROWS = 24


def held_out_ids(subject: Subject) -> list[np.ndarray]:
    """The ids of the first held-out records, each as its row has them."""
    prepared, found = subject.prepared, []
    for source, count in enumerate(prepared.num_rows("held_out")):
        for row in range(count):
            document, start, length = prepared.segments("held_out", source, row).tolist()[0]
            found.append(np.asarray(prepared.tokens(document, start, length)))
    return found[:ROWS]


def alone(subject: Subject, classifier: TextClassifier) -> Claim:
    """The same bits for a text alone as among others."""
    rows = held_out_ids(subject)
    together = classifier.predict_encoded(rows)
    faults = [
        f"record {number}: {answer.probabilities} among others, {single.probabilities} alone"
        for number, (row, answer) in enumerate(zip(rows, together, strict=True))
        if (single := classifier.predict_encoded([row])[0]) != answer
    ]
    return exact(GROUP, "batched is single", faults, f"{len(rows)} held-out records")


def as_trained(subject: Subject, opened: Opened, classifier: TextClassifier) -> Claim:
    """The probabilities of the evaluation step for the same records."""
    assembly = subject.assembly(SINGLE)
    train = replace(assembly.experiment.train, eval_batches=1, eval_batch_size=ROWS)
    assembly = replace(assembly, experiment=replace(assembly.experiment, train=train))
    params = jax.device_put(opened.params, assembly.program.eval_params(assembly.program.state_shardings))
    measured = evaluate_rows(assembly, params)
    assert measured is not None, "nobody asked it to stop"
    rows = held_out_ids(subject)
    expected = np.exp(measured[1]["log_probs"][: len(rows)])
    predictions = classifier.predict_encoded(rows)
    got = np.array([[p.probabilities[label] for label in classifier.labels] for p in predictions])
    error = distances({"probabilities": got}, {"probabilities": expected})["probabilities"]
    return Claim(GROUP, "as evaluated", error, BOUND, f"{len(rows)} held-out records")
