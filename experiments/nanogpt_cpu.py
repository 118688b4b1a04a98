"""Question: how soon does nanoGPT's CPU model reach a mean loss of 1.88 over the whole validation split?

Command: python experiments/nanogpt_cpu.py
Hardware: two CPU cores, no accelerator.
Result: validation loss 1.848, 1.848 and 1.868 with seeds 1 to 3, from process start to that evaluation 37.8 s (nothing
  compiled before), 33.2 and 35.3 s; beside it in the same minutes the recipe in PyTorch: 1.900 in 84.5 s. Measured by
  `python benchmarks/run.py train --only nanogpt`; docs/benchmarks.md has the whole run, of before Muon became faster.

The model is that of nanoGPT's recipe for a laptop: 4 layers, 4 heads, width 128, context 64, characters. What differs is
the optimizer: Muon on the matrices inside the blocks, a higher rate that falls linearly, and a quarter of the steps.
"""

from pathlib import Path

from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.cli.main import run_experiment
from jaxml.data.spec import DataSpec, TextSource
from jaxml.inputs.spec import CharTokenizerSpec
from jaxml.models.presets import nanogpt_cpu
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import LanguageModeling
from jaxml.train.spec import Muon, OptimizerSpec, ScheduleSpec, TrainSpec

TEXT = Path(__file__).parent / "data" / "tinyshakespeare" / "input.txt"


def config() -> Experiment:
    """The last tenth of the characters is the validation split, as in nanoGPT; every one of its positions is evaluated."""
    model = nanogpt_cpu()
    return Experiment(
        name="nanogpt_cpu",
        model=model,
        task=LanguageModeling(),
        data=DataSpec(
            sources=(TextSource(str(TEXT)),),
            tokenizer=CharTokenizerSpec(),
            prepared=str(TEXT.parent / "prepared" / f"char-{model.context_length}"),
            sequence_length=model.context_length,
        ),
        train=TrainSpec(steps=500, batch_size=12, eval_batch_size=84),
        optimizer=OptimizerSpec(
            rule=Muon(adam_b2=0.99, adam_learning_rate_ratio=0.4),
            learning_rate=3e-2,
            schedule=ScheduleSpec("linear", warmup_steps=20, final_ratio=0.0),
        ),
        checkpoint=CheckpointSpec(every=1000),
    )


if __name__ == "__main__":
    run_experiment(__file__)
