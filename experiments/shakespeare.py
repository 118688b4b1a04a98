"""Question: how well does a small decoder write Shakespeare after two minutes on a laptop CPU?

Command: python experiments/shakespeare.py   (or: jaxml train experiments/shakespeare.py --run-dir runs/shakespeare)
Hardware: two CPU cores, no accelerator.
Result: see docs/benchmarks.md, which the bench session writes.
"""

from pathlib import Path

from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.cli.main import run_experiment
from jaxml.data.spec import DataSpec, TextSource
from jaxml.inputs.spec import CharTokenizerSpec
from jaxml.models.presets import shakespeare
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import LanguageModeling
from jaxml.train.spec import OptimizerSpec, ScheduleSpec, TrainSpec

TEXT = Path(__file__).parent / "data" / "tinyshakespeare" / "input.txt"


def config() -> Experiment:
    """Character-level language modelling of 1.1 MB of text; the last tenth of the characters is held out, as in nanoGPT."""
    model = shakespeare()
    return Experiment(
        name="shakespeare",
        model=model,
        task=LanguageModeling(),
        data=DataSpec(
            sources=(TextSource(str(TEXT)),),
            tokenizer=CharTokenizerSpec(),
            prepared=str(TEXT.parent / "prepared" / f"char-{model.context_length}"),
            sequence_length=model.context_length,
        ),
        train=TrainSpec(steps=1000, batch_size=16, eval_every=250),
        optimizer=OptimizerSpec(learning_rate=2e-3, schedule=ScheduleSpec("cosine", warmup_steps=20)),
        checkpoint=CheckpointSpec(every=100),
    )


if __name__ == "__main__":
    run_experiment(__file__)
