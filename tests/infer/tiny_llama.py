"""A tiny imported Llama with lively random weights, and its scores by the NumPy reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxml.infer.opening import Opened, open_checkpoint
from jaxml.recipes.importing import import_model
from tests.models.families.tiny import CONFIG, random_tensors, write
from tests.reference import llama

CONTEXT = 40  # no power of two: the longest padded row is cut at it
TINY = CONFIG | {"max_position_embeddings": CONTEXT}
TENSORS = random_tensors(TINY)


def open_tiny(place: Path) -> Opened:
    """The model, without a tokenizer."""
    import_model(write(place / "hf", TINY, TENSORS), place / "checkpoint")
    return open_checkpoint(place / "checkpoint")


def reference_scores(ids: list[int]) -> np.ndarray:
    """Log-probabilities of ids[1:] in float64."""
    logits = llama.logits(TINY, TENSORS, ids[:-1]) if len(ids) > 1 else np.zeros((0, TINY["vocab_size"]))
    top = logits.max(-1, keepdims=True)
    normal = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return normal[np.arange(len(ids) - 1), ids[1:]]
