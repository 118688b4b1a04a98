"""`jaxml resume RUN_DIR`: go on with a run from its last complete checkpoint. Reads `recipes.train`."""

from __future__ import annotations

from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.cli.train import add_shared, find_membership, outcome
from jaxml.config.overrides import override
from jaxml.recipes.interruption import Interruption

DESCRIPTION = """Go on with the run in RUN_DIR: same experiment, same numbers, from its last complete checkpoint.

Without a complete checkpoint it starts at step 0 and says so. Fields that change no number of the steps taken can be
overridden: --train.steps 400 --mesh.fsdp 2 --checkpoint.every 50."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, resume, and return the result of the run."""
    options = parser("resume", DESCRIPTION)
    options.add_argument("run_dir", help="the run directory")
    add_shared(options)
    given, overrides = options.parse_known_args(arguments)
    membership = find_membership(given)
    # Listening begins before the imports below, which take seconds.
    with Interruption() as interruption:
        from jaxml.recipes.train import resume

        return outcome(
            resume(
                given.run_dir,
                lambda experiment: override(experiment, overrides, program=f"jaxml resume {given.run_dir}"),
                source="resume",
                cache_dir=cache_directory(),
                tensorboard=given.tensorboard,
                samples=tuple(given.sample),
                owns_process=True,
                interruption=interruption,
                membership=membership,
            )
        )
