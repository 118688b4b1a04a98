"""How a model is trained, as data. Reads `config.spec`; `train.optimizer`, `train.step` and `train.guard` read these.
No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxml.config.spec import Spec


@dataclass(frozen=True)
class AdamW(Spec):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8


@dataclass(frozen=True)
class Lion(Spec):
    """Sign momentum (Chen et al. 2023); wants a learning rate 3 to 10 times below Adam's."""

    b1: float = 0.9
    b2: float = 0.99


@dataclass(frozen=True)
class Adafactor(Spec):
    """Factored second moments (Shazeer & Stern 2018), without relative step sizes."""

    decay_rate: float = 0.8
    clipping_threshold: float = 1.0
    min_dim_to_factor: int = 128


@dataclass(frozen=True)
class Muon(Spec):
    """Orthogonalised momentum for the matrices inside the blocks, AdamW for everything else (Jordan et al. 2024).

    `adam_learning_rate_ratio` scales the schedule for the AdamW part.
    """

    beta: float = 0.95
    newton_schulz_steps: int = 5
    nesterov: bool = True
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_epsilon: float = 1e-8
    adam_learning_rate_ratio: float = 0.1


@dataclass(frozen=True)
class ScheduleSpec(Spec):
    """Learning rate over steps: linear warm-up to the peak, then `kind`, ending at `final_ratio` of the peak.

    `decay_steps`: the length of the decay for `wsd` (0: a tenth of the run); the others decay from the end of the
    warm-up to `total_steps` (0: the run's last step).
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    final_ratio: float = 0.1
    decay_steps: int = 0
    total_steps: int = 0


@dataclass(frozen=True)
class OptimizerSpec(Spec):
    """`learning_rate` is the peak. `weight_decay` touches matrices only (chosen by logical axes). `clip_norm` 0 and
    `ema_decay` 0 are off; with an EMA, evaluation and the exported weights are the averaged ones."""

    rule: AdamW | Lion | Adafactor | Muon = AdamW()
    learning_rate: float = 3e-4
    schedule: ScheduleSpec = ScheduleSpec()
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    ema_decay: float = 0.0


@dataclass(frozen=True)
class TrainSpec(Spec):
    """`batch_size` counts rows over all devices; `accumulate` splits it into that many microbatches.

    `eval_every` 0 evaluates at the end only; `eval_batches` 0 evaluates the whole held-out split.
    `digests`: each step's metrics have 64-bit digests of its batch, its gradients and its new parameters, by which
    `jaxml diverge` compares two runs that should be equal.
    """

    steps: int
    batch_size: int
    accumulate: int = 1
    eval_every: int = 0
    eval_batches: int = 0
    eval_batch_size: int = 0
    seed: int = 0
    digests: bool = False


@dataclass(frozen=True)
class GuardSpec(Spec):
    """What to do about a step that went wrong.

    `on_nonfinite`: stop, skip the update and go on, or rewind to the last good checkpoint and leave the step's records
    out.
    `spike_threshold`: robust standard deviations (median and MAD over the last `spike_window` losses) above which a
    loss is a spike that rewinds (0: off). After `max_rewinds`, or `max_skips` skipped updates in a row, the run stops;
    `max_skips` holds for the overflows of float16 too, whatever `on_nonfinite` says.
    """

    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    spike_threshold: float = 0.0
    spike_window: int = 50
    max_rewinds: int = 3
    max_skips: int = 10
