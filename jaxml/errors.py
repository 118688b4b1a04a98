"""Every error that jaxml raises on purpose, in four parts: what failed, expected, got, what to do.

Reads no other jaxml file; every room raises these. Checks at an edge collect all their faults and raise once
(`Faults`), so that a user mends a configuration in one round.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `failed` names the field, leaf or file; `todo` says what to do about it."""

    failed: str
    expected: str
    got: str
    todo: str

    def __str__(self) -> str:
        return f"{self.failed}\n  expected: {self.expected}\n  got:      {self.got}\n  to do:    {self.todo}"


class JaxmlError(Exception):
    """An error that a user can act on. `exit_code` is what the command line leaves with.

    >>> print(ConfigError("train.steps", expected="at least 1", got="0", todo="pass --train.steps 100"))
    train.steps
      expected: at least 1
      got:      0
      to do:    pass --train.steps 100
    """

    exit_code = 1

    def __init__(self, failed: str, *, expected: str, got: str, todo: str):
        self.faults: tuple[Fault, ...] = (Fault(failed, expected, got, todo),)
        super().__init__(str(self.faults[0]))

    def __reduce__(self):
        """Errors cross process borders whole."""
        return type(self).from_faults, (self.faults,)

    @classmethod
    def from_faults(cls, faults: list[Fault] | tuple[Fault, ...]) -> JaxmlError:
        """One error out of several faults (at least one)."""
        first = faults[0]
        error = cls(first.failed, expected=first.expected, got=first.got, todo=first.todo)
        error.faults = tuple(faults)
        if len(faults) > 1:
            error.args = (f"{len(faults)} faults\n" + "\n".join(f"{i + 1}. {f}" for i, f in enumerate(faults)),)
        return error


class ConfigError(JaxmlError):
    """A field of the experiment, or several together, cannot be right."""

    exit_code = 2


class DataError(JaxmlError):
    """A source, a tokenizer or a prepared data directory is not usable."""


class CheckpointError(JaxmlError):
    """A checkpoint is missing, damaged, foreign, or belongs to another spec."""


class RunError(JaxmlError):
    """A run directory does not fit the start mode asked for."""


class DeviceError(JaxmlError):
    """The mesh asked for does not fit the devices at hand."""


class NonFiniteError(JaxmlError):
    """A loss or gradient became infinite or NaN and the guard was told to stop."""


class SpikeError(JaxmlError):
    """A loss spiked, and the guard has no rewind left or nothing to go back to."""


class RequestError(JaxmlError):
    """What was asked of a model cannot be right, or does not fit."""

    exit_code = 2


class QueueFullError(JaxmlError):
    """More requests wait than the engine takes; try again later."""


class RecompileError(JaxmlError):
    """A function that is lowered once per run was about to be lowered again."""


class MissingExtraError(JaxmlError):
    """An optional dependency is not installed."""


class Faults:
    """Collects faults at an edge and raises them together.

    >>> faults = Faults(ConfigError)
    >>> faults.add("train.batch_size", expected="a multiple of 8 devices", got="12", todo="use 16")
    >>> len(faults.found)
    1
    """

    def __init__(self, error: type[JaxmlError]):
        self.error = error
        self.found: list[Fault] = []

    def add(self, failed: str, *, expected: str, got: str, todo: str) -> None:
        self.found.append(Fault(failed, expected, got, todo))

    def raise_if_any(self) -> None:
        if self.found:
            raise self.error.from_faults(self.found)


def require_extra(module: str, extra: str) -> ModuleType:
    """Import an optional module, or raise MissingExtraError that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise MissingExtraError(
            f"import of {module}",
            expected=f"the extra {extra!r} to be installed",
            got=str(missing),
            todo=f"python -m pip install 'jaxml[{extra}]'",
        ) from missing
