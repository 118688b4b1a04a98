"""What is learned, as data. Reads `config.spec`; `tasks.language` and `tasks.classification` are the functions. No
jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxml.config.spec import Spec


@dataclass(frozen=True)
class LanguageModeling(Spec):
    """Predict the next token. `z_loss` weighs mean(logsumexp(logits)^2) (PaLM, section 5; usually 1e-4, 0 is off)."""

    z_loss: float = 0.0


@dataclass(frozen=True)
class TextClassification(Spec):
    """One label a record. `labels` are the names in class order; `class_weights` (empty: all 1) weigh the loss by true
    class.

    `positive_label` names the class for which precision, recall and area under the curve are reported (two classes).
    """

    labels: tuple[str, ...]
    class_weights: tuple[float, ...] = ()
    positive_label: str = ""


TaskSpec = LanguageModeling | TextClassification
