"""Typed overrides of a spec from command-line words: `--optimizer.learning-rate 3e-4`. The gateway to tyro. No jax.

Reads `config.spec`; `cli` calls it. An unknown or misspelt key is refused with the nearest known one.
"""

from __future__ import annotations

from typing import TypeVar

from jaxml.config.spec import Spec

S = TypeVar("S", bound=Spec)


def override(default: S, arguments: list[str], program: str = "experiment") -> S:
    """`default` with the fields that `arguments` name replaced.

    Raises SystemExit(2) after printing to stderr what was not understood and the nearest known key; SystemExit(0) after
    printing every key with its default for `--help`.

    >>> from jaxml.train.spec import OptimizerSpec
    >>> override(OptimizerSpec(), ["--learning-rate", "0.01", "--schedule.warmup-steps", "5"]).schedule.warmup_steps
    5
    """
    if not arguments:
        return default
    import tyro

    config = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    return tyro.cli(type(default), default=default, args=arguments, prog=program, config=config)
