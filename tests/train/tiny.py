"""A tiny model, packed ragged batches made by hand, and float64 programs that are compiled once for all tests here."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np

from jaxml import trees
from jaxml.devices.mesh import build_mesh
from jaxml.devices.spec import MeshSpec
from jaxml.models.spec import AttentionSpec, BlockSpec, ClassifierSpec, DecoderSpec, MlpSpec, NormSpec, RopeSpec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.tasks.spec import LanguageModeling, TextClassification
from jaxml.train.spec import OptimizerSpec, ScheduleSpec, TrainSpec
from jaxml.train.step import Program, build_program

ROWS, TOKENS, VOCAB = 24, 7, 11
RARE_TOKEN, RARE_ROWS = 10, (5, 17)

BLOCK = BlockSpec(
    AttentionSpec(num_heads=2, num_kv_heads=1, head_width=4, rope=RopeSpec(), has_bias=True),
    MlpSpec(width=12),
    NormSpec("layer", 1e-5, has_bias=True),
)
DECODER = DecoderSpec(
    vocab_size=VOCAB, context_length=8, width=8, num_layers=2, blocks=(BLOCK,), tied_head=False, dropout=0.2
)
CLASSIFIER = ClassifierSpec(DECODER, num_classes=3)
LANGUAGE = LanguageModeling(z_loss=0.1)
CLASSIFICATION = TextClassification(("a", "b", "c"), class_weights=(1.0, 2.5, 0.5))
OPTIMIZER = OptimizerSpec(
    learning_rate=0.05, schedule=ScheduleSpec("linear", warmup_steps=2), clip_norm=0.05, weight_decay=0.1, ema_decay=0.9
)


def language_batch(seed: int = 0, rows: int = ROWS, num_tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """Rows of one to three packed documents with a padded tail and a ragged mask; RARE_TOKEN is in RARE_ROWS only."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((rows, num_tokens), np.int32)
    positions = np.zeros((rows, num_tokens), np.int32)
    for row in range(rows):
        start = 0
        for number in range(1, int(rng.integers(1, 4)) + 1):
            length = min(int(rng.integers(1, 5)), num_tokens - start)
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    tokens = rng.integers(0, RARE_TOKEN, (rows, num_tokens), dtype=np.int32)
    for row in RARE_ROWS:
        if row < rows:
            tokens[row, 0] = RARE_TOKEN
    return {
        "tokens": tokens,
        "targets": rng.integers(0, VOCAB, (rows, num_tokens), dtype=np.int32),
        "positions": positions,
        "segment_ids": segments,
        "loss_mask": (segments > 0) & (rng.random((rows, num_tokens)) < rng.random((rows, 1))),
        "row": np.arange(rows, dtype=np.int32),
        "record": 1000 + np.arange(rows, dtype=np.int32),
        "source": np.arange(rows, dtype=np.int32) % 2,
    }


def classification_batch(seed: int = 0, num_tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """One document a row, a fifth of the rows padding."""
    batch = language_batch(seed, num_tokens=num_tokens)
    rng = np.random.default_rng(seed + 1)
    del batch["targets"], batch["loss_mask"]
    label = rng.integers(0, 3, ROWS, dtype=np.int32)
    return batch | {"label": label, "is_valid": rng.random(ROWS) < 0.8}


@cache
def program(accumulate: int = 1, data: int = 1, fsdp: int = 1, task: Any = LANGUAGE) -> Program:
    """The tiny model's program in float64, built once for each of these; it compiles once, at its first step."""
    with jax.enable_x64(True):
        model = DECODER if task is LANGUAGE else CLASSIFIER
        train = TrainSpec(steps=10, batch_size=ROWS, accumulate=accumulate, seed=3)
        mesh, precision = build_mesh(MeshSpec(data, fsdp)), PrecisionSpec("float64", "float64")
        return build_program(model, task, OPTIMIZER, train, mesh, precision)


def state_of(built: Program) -> dict[str, Any]:
    """A state after three imagined updates, drawn by NumPy (compiling an initialisation takes longer than a step)."""
    rng = np.random.default_rng(7)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if leaf.dtype == np.int32:
            return np.full(leaf.shape, 3, np.int32)
        value = 0.3 * rng.standard_normal(leaf.shape)
        return (abs(value) if "opt_state" in trees.path_name(path) else value).astype(leaf.dtype)

    return jax.device_put(jax.tree_util.tree_map_with_path(draw, built.abstract_state), built.state_shardings)


def host(tree: Any) -> dict[str, np.ndarray]:
    """Dotted path to NumPy array."""
    return {path: np.asarray(leaf) for path, leaf in trees.flatten(tree).items()}


def assert_close(got: Any, expected: Any, bound: float = 1e-9) -> None:
    """`bound` times the larger of the leaf's largest magnitude and 1e-6 of the largest leaf's (style.md)."""
    got, expected = host(got), host(expected)
    assert list(got) == list(expected)
    largest = max(np.max(np.abs(leaf), initial=0) for leaf in expected.values())
    for path, leaf in expected.items():
        scale = max(np.max(np.abs(leaf), initial=0), 1e-6 * largest)
        difference = np.max(np.abs(got[path].astype(np.float64) - leaf.astype(np.float64)), initial=0)
        assert difference <= bound * scale, f"{path}: differs by {difference:.3g}, allowed {bound * scale:.3g}"
