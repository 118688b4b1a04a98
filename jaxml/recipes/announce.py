"""What a run will do, said before its first step: sizes, memory, schedule, devices, precision, start mode.

Reads `models.cost`, `train.optimizer`, `devices`, `numerics` and the assembled run; `recipes.running` prints the lines to
stderr and `recipes.reporting` puts them into report.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from jaxml.devices.chips import peak_flops_per_s
from jaxml.devices.start import describe_devices
from jaxml.models.check import decoder_of
from jaxml.models.cost import flops_per_token, num_parameters
from jaxml.numerics.precision import describe
from jaxml.numerics.spec import resolved
from jaxml.recipes.experiment import Experiment
from jaxml.train.optimizer import learning_rate

if TYPE_CHECKING:
    from jaxml.recipes.assemble import Assembly


def run_facts(assembly: Assembly, start: str) -> dict[str, str]:
    """Name -> value, in the order in which they are printed."""
    experiment = assembly.experiment
    train, data = experiment.train, experiment.data
    mesh = ", ".join(f"{axis}={size}" for axis, size in assembly.mesh.shape.items())
    memory = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in assembly.program.memory_bytes().items())
    tokens = train.batch_size * data.sequence_length
    facts = {
        "experiment": experiment.name,
        "start": start,
        "parameters": f"{num_parameters(experiment.model):,}",
        "FLOPs per token": f"{flops_per_token(experiment.model, data.sequence_length):.3g} (forward and backward)",
        "memory": memory,
        "tokens per step": f"{tokens:,} ({train.batch_size} rows x {data.sequence_length}, {train.accumulate} microbatches)",
        "data": describe_data(assembly),
        "schedule": describe_schedule(experiment),
        "devices": f"{describe_devices()}, mesh {mesh}",
        "precision": describe(assembly.program.bound.policy),
    }
    if assembly.program.notes:
        facts["sharding"] = "; ".join(assembly.program.notes)
    return facts


def describe_data(assembly: Assembly) -> str:
    """Rows of the training split, how many epochs the run makes, and the held-out rows."""
    rows = sum(assembly.prepared.num_rows("train"))
    steps, batch_size = assembly.experiment.train.steps, assembly.experiment.train.batch_size
    held_out = sum(assembly.prepared.num_rows("held_out"))
    return f"{rows:,} training rows, {steps * batch_size / max(rows, 1):.2f} epochs; {held_out:,} held-out rows"


def describe_schedule(experiment: Experiment) -> str:
    """First, peak and last learning rate as they will be, with a warning if the peak is never reached."""
    optimizer, steps = experiment.optimizer, experiment.train.steps
    rate = learning_rate(optimizer, steps)
    samples = sorted(
        {0, steps - 1, min(optimizer.schedule.warmup_steps, steps - 1), *range(0, steps, max(1, steps // 200))}
    )
    rates = {step: float(rate(step)) for step in samples}
    peak = max(rates.values())
    text = f"{optimizer.schedule.kind}: first {rates[0]:.3g}, peak {peak:.3g}, last {rates[steps - 1]:.3g} over {steps} steps"
    if peak < 0.999 * optimizer.learning_rate:
        text += f" (WARNING: the peak of {optimizer.learning_rate:.3g} is never reached)"
    return text


def model_flop_utilisation(
    experiment: Experiment, tokens_per_s: float, device_kind: str, num_devices: int
) -> float | None:
    """MFU, or None where the chip's peak is not known: a wrong peak makes a wrong number (cases: nanochat PR 147)."""
    peak = peak_flops_per_s(device_kind, resolved(experiment.precision, jax.default_backend()).compute)
    if peak is None:
        return None
    return (
        tokens_per_s
        * flops_per_token(decoder_of(experiment.model), experiment.data.sequence_length)
        / (peak * num_devices)
    )
