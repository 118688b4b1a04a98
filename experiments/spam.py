"""Question: does a small transformer, trained from nothing, tell spam from ham as well as a TF-IDF linear SVM?

Command: python experiments/spam.py   (trains, scores both, compares; `jaxml train experiments/spam.py` only trains)
Hardware: two CPU cores, no accelerator; under three minutes from start to verdict.
Result: PENDING
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.cli.experiment_file import cache_directory
from jaxml.config.overrides import override
from jaxml.data.spec import DataSpec, TableSource
from jaxml.errors import JaxmlError, require_extra
from jaxml.inputs.spec import ByteTokenizerSpec, BpeTokenizerSpec
from jaxml.models.spec import AttentionSpec, BlockSpec, ClassifierSpec, DecoderSpec, MlpSpec, NormSpec, RopeSpec
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.ranking import log_odds
from jaxml.tasks.spec import TextClassification
from jaxml.train.spec import OptimizerSpec, ScheduleSpec, TrainSpec

MESSAGES = Path(__file__).parent / "data" / "sms-spam" / "SMSSpamCollection.tsv"
LABELS = ("ham", "spam")


def config() -> Experiment:
    """Three bidirectional layers over bytes, mean pooling, twelve epochs of seven tenths of the messages."""
    context = 160
    attention = AttentionSpec(num_heads=4, num_kv_heads=4, head_width=24, rope=RopeSpec(), qk_norm=NormSpec())
    decoder = DecoderSpec(
        vocab_size=257,
        context_length=context,
        width=96,
        num_layers=3,
        blocks=(BlockSpec(attention, MlpSpec(width=192)),),
        is_causal=False,
        dropout=0.2,
    )
    return Experiment(
        name="spam",
        model=ClassifierSpec(decoder, num_classes=len(LABELS)),
        task=TextClassification(labels=LABELS, positive_label="spam"),
        data=DataSpec(
            sources=(TableSource(str(MESSAGES), text="text", label="label", columns=("label", "text")),),
            tokenizer=ByteTokenizerSpec(),
            prepared=str(MESSAGES.parent / "prepared" / f"byte-{context}"),
            sequence_length=context,
            packing="single",
            held_out=0.3,
            too_long="truncate",
        ),
        train=TrainSpec(steps=1400, batch_size=32, eval_batch_size=128),
        optimizer=OptimizerSpec(
            learning_rate=1.5e-3, schedule=ScheduleSpec("cosine", warmup_steps=100), ema_decay=0.99
        ),
        checkpoint=CheckpointSpec(every=500),
    )
