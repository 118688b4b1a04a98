"""Where two runs part: the first value, in program order, that is not the same, and the file that made it.

Reads `prove.named_values` and `prove.subject`; the claims about steps name it when they fail. A step makes its named
values, then the loss, the gradients from the last layer to the first, the moments, and the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxml.models.check import decoder_of
from jaxml.models.spec import LAYER_VALUES, DecoderSpec
from jaxml.prove.claims import BOUND, PARTED, Parting, Picture, distances, undecided, worst
from jaxml.prove.named_values import NamedValue, named_values
from jaxml.prove.subject import ProgramKey, Subject, Taken

MAKERS = {
    "loss": "jaxml/train/gradients.py",
    "gradient": "the backward pass of jaxml/models",
    "norm": "jaxml/train/step.py",
    "opt_state": "jaxml/train/optimizer.py",
    "params": "jaxml/train/step.py",
    "ema": "jaxml/train/step.py",
}


@dataclass(frozen=True)
class Step:
    """One value of a step by the name that people know it by, such as `query, layer 3`."""

    name: str
    made_by: str
    value: np.ndarray


def apart(got: Sequence[Taken], expected: Sequence[Taken]) -> tuple[float, int]:
    """(the largest error over all steps and kinds, how many elements were left out because their gradient is rounding)."""
    errors, num_left_out = [0.0], 0
    for one, other in zip(got, expected, strict=True):
        masks = undecided(one.values["gradient"], other.values["gradient"])
        num_left_out += sum(int(mask.sum()) for mask in masks.values())
        for kind, leaves in other.values.items():
            ignored = masks if kind in ("params", "ema") else None
            errors.append(worst(distances(one.values.get(kind, {}), leaves, ignored)))
    return max(errors), num_left_out


def part(
    subject: Subject, keys: tuple[ProgramKey, ProgramKey], got: Sequence[Taken], expected: Sequence[Taken]
) -> tuple[Parting | None, Picture]:
    """(the first value in which two runs of the same steps part, a picture of the errors on the way there). `keys`: the
    program that is asked about, and the one on one device. Both take the logits in one piece, so that they compare whatever
    the chunks of the loss are."""
    number = next((n for n in range(len(got)) if not apart(got[n : n + 1], expected[n : n + 1])[0] <= BOUND), 0)
    rows, decoder = subject.experiment.train.batch_size, decoder_of(subject.experiment.model)
    one, other = (
        in_layers(_merged(_values_of(subject, key, expected[number].before, number), key[1], rows), decoder)
        for key in keys
    )
    errors = _errors(one, other)
    picture = Picture(
        f"where step {number + 1} parts",
        "error, as a share of the value's scale",
        (("error", tuple((float(index), max(error, 1e-17)) for index, (_, error) in enumerate(errors))),),
        x_name="named value, in program order",
    )
    found = next((Parting(s.name, s.made_by, error) for s, error in errors if not error <= PARTED * BOUND), None)
    return found or _of_step(got[number], expected[number]), picture


def _values_of(subject: Subject, key: ProgramKey, state: object, number: int) -> list[NamedValue]:
    program = subject.named_program(key)
    arguments = (jax.device_put(state, program.state_shardings), program.put(subject.batch(number)))
    return named_values(program.train_step.function, arguments, program.mesh)


def _merged(run: list[NamedValue], microbatches: int, num_rows: int) -> list[NamedValue]:
    """The values of a run by microbatches as those of the whole batch: microbatch j of A has the rows j, A + j, ... What is
    not of that shape stays as it is."""
    return run if microbatches == 1 else [_whole(value, microbatches, num_rows) for value in run]


def _whole(value: NamedValue, microbatches: int, num_rows: int) -> NamedValue:
    parts = value.value
    rows = next((dim for dim in range(1, parts.ndim) if parts.shape[dim] * microbatches == num_rows), None)
    if not value.scans or rows is None or parts.shape[0] != microbatches:
        return value
    moved = np.moveaxis(parts, 0, rows)  # [..., rows / A, A, ...]
    whole = moved.reshape(*moved.shape[: rows - 1], num_rows, *moved.shape[rows + 1 :])
    return NamedValue(value.name, value.made_by, value.scans[1:], whole)


def in_layers(run: list[NamedValue], spec: DecoderSpec) -> list[Step]:
    """One entry for each value of each layer, in program order, whether layers were scanned or not."""
    seen: Counter[str] = Counter()
    steps = []
    for name, made_by, value in _unrolled(run):
        label = name
        if name in LAYER_VALUES:
            again, layer = divmod(seen[name], spec.num_layers)
            label = f"{name}, layer {layer if not again else spec.num_layers - 1 - layer}"
            label += ", computed again" if again else ""
        seen[name] += 1
        steps.append(Step(label, made_by, value))
    return steps


def _unrolled(run: list[NamedValue]) -> Iterator[tuple[str, str, np.ndarray]]:
    """The values of one scan, iteration by iteration."""
    index = 0
    while index < len(run):
        scans = run[index].scans
        if not scans:
            yield run[index].name, run[index].made_by, run[index].value
            index += 1
            continue
        end = index
        while end < len(run) and run[end].scans[:1] == scans[:1]:
            end += 1
        for iteration in range(len(run[index].value)):
            inside = [NamedValue(v.name, v.made_by, v.scans[1:], v.value[iteration]) for v in run[index:end]]
            yield from _unrolled(inside)
        index = end


def _errors(got: list[Step], expected: list[Step]) -> list[tuple[Step, float]]:
    numbered = [{str(n): step.value for n, step in enumerate(run)} for run in (got, expected)]
    errors = distances(*numbered)
    return [(step, errors[str(n)]) for n, step in enumerate(expected)]


def _of_step(got: Taken, expected: Taken) -> Parting | None:
    """The first of what a step makes after its named values."""
    masks = undecided(got.values["gradient"], expected.values["gradient"])
    for kind, leaves in expected.values.items():
        errors = distances(got.values.get(kind, {}), leaves, masks if kind in ("params", "ema") else None)
        paths = in_backward_order(errors) if kind == "gradient" else list(errors)
        path = next((path for path in paths if not errors[path] <= BOUND), None)
        if path is not None:
            name = path if kind in ("loss", "norm") else f"{kind} of {path}"
            return Parting(name, MAKERS[kind.split(".")[0]], errors[path])
    return None


def in_backward_order(paths: Iterable[str]) -> list[str]:
    """Parameters in the order in which the backward pass meets them: head, final norm, blocks, positions, embedding.

    >>> in_backward_order(["embed.table", "blocks.0.mlp.up.kernel", "head.kernel"])
    ['head.kernel', 'blocks.0.mlp.up.kernel', 'embed.table']
    """
    rooms = ("head", "final_norm", "blocks", "positions", "embed")

    def place(path: str) -> int:
        return next((n for n, room in enumerate(rooms) if room in path.split(".")), len(rooms))

    return sorted(paths, key=place)
