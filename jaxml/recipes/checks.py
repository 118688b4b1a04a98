"""What cannot be right across the fields of an experiment: every fault at once, before anything is built. No jax.

Reads the spec files; `recipes.assemble` calls `check_experiment` first. Checks that need the data (ids beyond the
vocabulary, empty text) or the devices at hand (mesh size) are made by `data` and `devices`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxml.config.spec import suggest
from jaxml.data.spec import check_data
from jaxml.errors import ConfigError, Faults
from jaxml.models.check import decoder_of, model_faults
from jaxml.models.spec import LAYER_VALUES, ClassifierSpec
from jaxml.numerics.spec import precision_faults
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import TextClassification


def check_experiment(experiment: Experiment, mesh: Mapping[str, int]) -> None:
    """Raise ConfigError with every cross-field fault; `mesh`: the size of each mesh axis (those absent have 1)."""
    faults = Faults(ConfigError)
    _check_sizes(experiment, mesh.get("data", 1) * mesh.get("fsdp", 1), faults)
    _check_split_tokens(experiment, mesh.get("context", 1), faults)
    _check_rematerialization(experiment, faults)
    faults.found.extend(precision_faults(experiment.precision))
    faults.found.extend(model_faults(experiment.model))
    _check_task(experiment, faults)
    _check_data(experiment, faults)
    _check_schedule(experiment, faults)
    _check_saving(experiment, faults)
    faults.raise_if_any()


def _require(faults: Faults, holds: bool, field: str, expected: str, got: object, todo: str) -> None:
    if not holds:
        faults.add(field, expected=expected, got=str(got), todo=todo)


def _check_sizes(experiment: Experiment, num_devices: int, faults: Faults) -> None:
    train = experiment.train
    _require(faults, train.steps >= 1, "train.steps", "at least 1", train.steps, "pass --train.steps 100")
    _require(faults, train.batch_size >= 1, "train.batch_size", "at least 1", train.batch_size, "pass a larger one")
    _require(faults, train.accumulate >= 1, "train.accumulate", "at least 1", train.accumulate, "use 1 for none")
    if train.accumulate >= 1 and num_devices >= 1:
        parts = train.accumulate * num_devices
        nearest = max(parts, round(train.batch_size / parts) * parts)
        _require(
            faults,
            train.batch_size % parts == 0,
            "train.batch_size",
            f"a multiple of {parts} ({num_devices} devices x {train.accumulate} microbatches)",
            train.batch_size,
            f"pass --train.batch-size {nearest}, or another train.accumulate or mesh",
        )
        size = train.eval_batch_size
        _require(
            faults,
            size % num_devices == 0,
            "train.eval_batch_size",
            f"a multiple of {num_devices} devices, or 0 for the training batch size",
            size,
            f"pass --train.eval-batch-size {max(1, round(size / num_devices)) * num_devices}",
        )
    for name in ("eval_every", "eval_batches", "eval_batch_size"):
        value = getattr(train, name)
        _require(faults, value >= 0, f"train.{name}", "0 or more", value, "use 0 for the default")


def _check_split_tokens(experiment: Experiment, size: int, faults: Faults) -> None:
    if size == 1:
        return
    length, form = experiment.data.sequence_length, experiment.execution.attention
    _require(
        faults, length % size == 0, "data.sequence_length",
        f"a multiple of mesh.context = {size}, so that every device has as many tokens of a row", length,
        f"pass --data.sequence-length {max(1, round(length / size)) * size}, or another --mesh.context",
    )  # fmt: skip
    _require(
        faults, form in ("auto", "xla"), "execution.attention",
        "'auto' or 'xla' where mesh.context splits the tokens: the kernels of one device do not see the others' keys",
        repr(form), "pass --execution.attention auto",
    )  # fmt: skip


def _check_rematerialization(experiment: Experiment, faults: Faults) -> None:
    names, kind = experiment.execution.saved_names, experiment.execution.rematerialize
    _require(
        faults, bool(names) == (kind == "names"), "execution.saved_names",
        "names exactly if execution.rematerialize is 'names'", f"{names} with {kind!r}",
        "pass --execution.rematerialize names --execution.saved-names query key value, or neither",
    )  # fmt: skip
    for name in names:
        _require(
            faults, name in LAYER_VALUES, "execution.saved_names", f"some of {', '.join(LAYER_VALUES)}", repr(name),
            suggest(name, list(LAYER_VALUES)),
        )  # fmt: skip


def _check_task(experiment: Experiment, faults: Faults) -> None:
    model, task = experiment.model, experiment.task
    if isinstance(task, TextClassification) != isinstance(model, ClassifierSpec):
        faults.add(
            "task",
            expected="TextClassification with a ClassifierSpec, LanguageModeling with a DecoderSpec",
            got=f"{type(task).__name__} with a {type(model).__name__}",
            todo="choose the model that the task needs",
        )
        return
    if not isinstance(task, TextClassification) or not isinstance(model, ClassifierSpec):
        _require(
            faults,
            decoder_of(experiment.model).is_causal,
            "model.is_causal",
            "True for next-token prediction",
            False,
            "set it",
        )
        _require(faults, getattr(task, "z_loss", 0.0) >= 0, "task.z_loss", "0 or more", task, "use 1e-4, or 0 for none")
        return
    num_labels = len(task.labels)
    _require(
        faults, num_labels == model.num_classes, "model.num_classes", f"{num_labels}, one for each task.labels",
        model.num_classes, f"set num_classes to {num_labels}",
    )  # fmt: skip
    _require(
        faults,
        len(set(task.labels)) == num_labels,
        "task.labels",
        "distinct names",
        task.labels,
        "remove the repeated one",
    )
    _require(
        faults, len(task.class_weights) in (0, num_labels), "task.class_weights", f"none, or {num_labels} numbers",
        len(task.class_weights), "give one weight for each label",
    )  # fmt: skip
    if task.positive_label and task.positive_label not in task.labels:
        hint = suggest(task.positive_label, list(task.labels))
        faults.add("task.positive_label", expected="one of task.labels", got=repr(task.positive_label), todo=hint)


def _check_data(experiment: Experiment, faults: Faults) -> None:
    data, model = experiment.data, decoder_of(experiment.model)
    labels = experiment.task.labels if isinstance(experiment.task, TextClassification) else ()
    check_data(data, faults, labels)
    _require(
        faults, data.sequence_length <= model.context_length, "data.sequence_length",
        f"at most model.context_length = {model.context_length}", data.sequence_length,
        f"pass --data.sequence-length {model.context_length}",
    )  # fmt: skip
    _require(
        faults, data.held_out > 0, "data.held_out", "above 0: the run evaluates at its end", data.held_out, "use 0.1"
    )
    if not labels:
        _require(
            faults,
            data.packing != "single",
            "data.packing",
            "'concatenate' or 'best_fit' without labels",
            "'single'",
            "change it",
        )


def _check_schedule(experiment: Experiment, faults: Faults) -> None:
    optimizer, steps = experiment.optimizer, experiment.train.steps
    schedule = optimizer.schedule
    _require(
        faults, optimizer.learning_rate > 0, "optimizer.learning_rate", "above 0", optimizer.learning_rate, "use 3e-4"
    )
    _require(faults, 0 <= optimizer.ema_decay < 1, "optimizer.ema_decay", "in [0, 1)", optimizer.ema_decay, "use 0.999")
    for name in ("weight_decay", "clip_norm"):
        value = getattr(optimizer, name)
        _require(faults, value >= 0, f"optimizer.{name}", "0 or more", value, "use 0 for none")
    in_range = 0 <= schedule.final_ratio <= 1
    _require(faults, in_range, "optimizer.schedule.final_ratio", "in [0, 1]", schedule.final_ratio, "use 0.1")
    for name in ("warmup_steps", "decay_steps", "total_steps"):
        value = getattr(schedule, name)
        _require(faults, value >= 0, f"optimizer.schedule.{name}", "0 or more", value, "use 0 for the default")
    total = schedule.total_steps or steps
    _require(
        faults, schedule.warmup_steps + schedule.decay_steps <= total, "optimizer.schedule",
        f"warm-up and decay within {total} steps",
        f"warmup_steps {schedule.warmup_steps} + decay_steps {schedule.decay_steps}",
        "shorten them or lengthen the run",
    )  # fmt: skip
    _require(
        faults, total <= steps, "optimizer.schedule.total_steps",
        f"at most train.steps = {steps}: a longer schedule never reaches its end", total,
        "pass --optimizer.schedule.total-steps 0 to follow the run, or raise train.steps",
    )  # fmt: skip


def _check_saving(experiment: Experiment, faults: Faults) -> None:
    checkpoint, guard = experiment.checkpoint, experiment.guard
    _require(faults, checkpoint.every >= 1, "checkpoint.every", "at least 1 step", checkpoint.every, "use 100")
    _require(faults, checkpoint.keep_last >= 1, "checkpoint.keep_last", "at least 1", checkpoint.keep_last, "use 2")
    for name in ("keep_every", "keep_best"):
        value = getattr(checkpoint, name)
        _require(faults, value >= 0, f"checkpoint.{name}", "0 or more", value, "use 0 for none")
    if checkpoint.keep_best:
        evaluates = experiment.train.eval_every
        _require(
            faults, evaluates >= 1 and checkpoint.every % max(evaluates, 1) == 0, "checkpoint.keep_best",
            "train.eval_every to divide checkpoint.every, so that every checkpoint has its metric",
            f"eval_every {evaluates}, checkpoint.every {checkpoint.every}", f"pass --train.eval-every {checkpoint.every}",
        )  # fmt: skip
    _require(
        faults, guard.spike_threshold >= 0, "guard.spike_threshold", "0 or more", guard.spike_threshold, "0 is off"
    )
    _require(faults, guard.spike_window >= 8, "guard.spike_window", "at least 8 steps", guard.spike_window, "use 50")
    _require(faults, guard.max_rewinds >= 0, "guard.max_rewinds", "0 or more", guard.max_rewinds, "use 3")
    _require(faults, guard.max_skips >= 0, "guard.max_skips", "0 or more", guard.max_skips, "use 10")
