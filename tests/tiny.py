"""The tiny experiment that the suite and `nox -s same` share: a 2x16 decoder on the first pages of Tiny Shakespeare.

Imports spec files only. It has on at once what could disturb exact numbers: packing, dropout, accumulation.
"""

from __future__ import annotations

from pathlib import Path

from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.data.spec import DataSpec, TextSource
from jaxml.devices.spec import MeshSpec
from jaxml.inputs.spec import ByteTokenizerSpec
from jaxml.models.spec import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, RopeSpec
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import LanguageModeling
from jaxml.train.spec import OptimizerSpec, ScheduleSpec, TrainSpec

TEXT = Path(__file__).resolve().parent.parent / "experiments" / "data" / "tinyshakespeare" / "input.txt"
NUM_CHARACTERS = 12_000
SEQUENCE_LENGTH = 16


def tiny_model(dropout: float = 0.1) -> DecoderSpec:
    """2 layers of width 16 over bytes: grouped-query attention with rotary positions, SwiGLU, tied head."""
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_width=8, rope=RopeSpec())
    return DecoderSpec(
        vocab_size=257,
        context_length=SEQUENCE_LENGTH,
        width=16,
        num_layers=2,
        blocks=(BlockSpec(attention, MlpSpec(width=32)),),
        dropout=dropout,
    )


def tiny_experiment(directory: str | Path) -> Experiment:
    """The experiment, with its text written to `directory` and its prepared data to go there too.

    20 steps of 4 rows of 16 tokens in 2 microbatches, on one device: rows are few, and split evenly.
    Paragraphs are documents, so that a row holds several and the prepared directory has a held-out split.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text = directory / "text.txt"
    if not text.exists():
        text.write_text(TEXT.read_text(encoding="utf-8")[:NUM_CHARACTERS], encoding="utf-8")
    return Experiment(
        name="tiny",
        model=tiny_model(),
        task=LanguageModeling(),
        data=DataSpec(
            sources=(TextSource(str(text), documents="paragraph"),),
            tokenizer=ByteTokenizerSpec(),
            prepared=str(directory / "prepared"),
            sequence_length=SEQUENCE_LENGTH,
            packing="best_fit",
        ),
        train=TrainSpec(steps=20, batch_size=4, accumulate=2, eval_batches=2),
        optimizer=OptimizerSpec(learning_rate=1e-3, schedule=ScheduleSpec("cosine", warmup_steps=2)),
        mesh=MeshSpec(data=1, fsdp=1),
        checkpoint=CheckpointSpec(every=10),
    )
