"""`jaxml train FILE`: train an experiment in a run directory.

Reads `cli.experiment_file`, `launch` (which of several processes this is) and `recipes.train`; `cli.resume` shares its flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

from jaxml.cli.experiment_file import cache_directory, load_experiment, parser
from jaxml.devices.membership import JOIN_TIMEOUT_S, Membership
from jaxml.errors import ConfigError
from jaxml.launch.cluster import own_membership, scheduled_membership
from jaxml.launch.local import end_with_launcher
from jaxml.recipes.interruption import Interruption
from jaxml.recipes.run_directory import ORIGIN_PARTS

if TYPE_CHECKING:
    from jaxml.recipes.train import TrainResult

DESCRIPTION = """Train the experiment that FILE's config() returns.

Any field can be overridden: --optimizer.learning-rate 3e-4 --train.steps 200 --checkpoint.every 20
(`jaxml train FILE --fields` lists them all)."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, train, and return the result of the run."""
    options = parser("train", DESCRIPTION)
    options.add_argument("file", help="experiment file with config()")
    options.add_argument("--run-dir", help="where the run lives (default: runs/NAME-TIME)")
    options.add_argument(
        "--start",
        default=None,
        choices=["fresh", "resume", "must-resume", "initialise-from"],
        help="fresh refuses a directory with a run (default); resume goes on, or starts at step 0; must-resume never starts",
    )
    options.add_argument("--from", dest="initialise_from", help="checkpoint whose parameters the run starts from")
    options.add_argument(
        "--parts",
        nargs="+",
        default=["params"],
        choices=ORIGIN_PARTS,
        help="what to take from it: params (default), opt_state, step (with the schedule and the position in the data)",
    )
    add_shared(options)
    options.add_argument("--fields", action="store_true", help="list the fields that can be overridden, and leave")
    given, overrides = options.parse_known_args(arguments)
    membership = find_membership(given)
    experiment = load_experiment(given.file, ["--help"] if given.fields else overrides)
    start = given.start or ("initialise-from" if given.initialise_from else "fresh")
    if (start == "initialise-from") != (given.initialise_from is not None):
        raise ConfigError(
            "--start and --from",
            expected="--from CHECKPOINT together with --start initialise-from, or neither",
            got=f"--start {start}, --from {given.initialise_from}",
            todo="name the checkpoint to take parameters from, or choose another start mode",
        )
    if membership is not None and given.run_dir is None:
        raise ConfigError(
            "--run-dir",
            expected="the run's directory, the same for all processes",
            got="none, and the default has the time in its name",
            todo="pass --run-dir runs/NAME, on a disk that all processes share",
        )
    # Listening begins before the imports below, which take seconds.
    with Interruption() as interruption:
        from jaxml.recipes.train import TrainOptions, train

        run_dir = given.run_dir or f"runs/{experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        chosen = TrainOptions(
            start,
            given.initialise_from,
            tuple(dict.fromkeys(given.parts)),
            source=given.file,
            cache_dir=cache_directory(),
            tensorboard=given.tensorboard,
            samples=tuple(given.sample),
            owns_process=True,
            interruption=interruption,
            membership=membership,
        )
        return outcome(train(experiment, run_dir, chosen))


def outcome(result: TrainResult) -> tuple[dict[str, Any], int]:
    """The result of a run as one flat JSON object, and the exit code."""
    fields = dataclasses.asdict(result)
    exit_code = fields.pop("exit_code")
    metrics = fields.pop("metrics")
    return {**fields, **metrics}, exit_code


def find_membership(given: argparse.Namespace) -> Membership | None:
    """Which of several processes this one is, by flags and environment; None: it is the only one."""
    end_with_launcher(os.environ)
    membership = own_membership(os.environ)
    if membership is None and given.distributed:
        membership = scheduled_membership(os.environ)
    return membership and dataclasses.replace(membership, join_timeout_s=given.join_timeout)


def add_shared(options: argparse.ArgumentParser) -> None:
    """The flags that train and resume share: which processes there are, and what is shown of a run beside its numbers."""
    options.add_argument(
        "--distributed",
        action="store_true",
        help="this is one of the processes that Slurm, mpirun or Kubernetes started",
    )
    options.add_argument(
        "--join-timeout",
        type=float,
        default=JOIN_TIMEOUT_S,
        metavar="S",
        help="seconds to wait for the other processes",
    )
    options.add_argument("--sample", action="append", default=[], help="a prompt to answer in report.html (repeatable)")
    options.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events (extra `track`)")
