"""`jaxml launch local ... -- VERB ...`: train in several processes on this machine. Reads `launch.local`. No jax."""

from __future__ import annotations

import os
from typing import Any

from jaxml.cli.experiment_file import parser
from jaxml.errors import ConfigError, Faults
from jaxml.launch.local import run

VERBS = ("train", "resume")
DESCRIPTION = """Start several processes that train one model together, over a mesh of all their devices.

local: on this machine, each process with --devices devices made of its CPU. Lines of a process begin with its number.
One that dies ends the others within 15 s. On a cluster its scheduler starts the processes:
srun jaxml train FILE --run-dir DIR --distributed."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, start the processes, and return the result of process 0."""
    border = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[border + 1 :]
    options = parser("launch", DESCRIPTION)
    options.add_argument("where", choices=["local"], help="local: on this machine")
    options.add_argument("--processes", type=int, default=2, help="how many (2)")
    options.add_argument("--devices", type=int, default=1, help="devices of each process (1)")
    options.usage = "jaxml launch local [--processes N] [--devices N] -- train FILE --run-dir DIR ..."
    given = options.parse_args(arguments[:border])
    faults = Faults(ConfigError)
    for name in ("processes", "devices"):
        if getattr(given, name) < 1:
            faults.add(f"--{name}", expected="1 or more", got=str(getattr(given, name)), todo=f"pass --{name} 2")
    if not command or command[0] not in VERBS:
        faults.add(
            "what to launch", expected=f"-- and one of {', '.join(VERBS)}", got=" ".join(command[:1]) or "nothing",
            todo="jaxml launch local --processes 2 --devices 4 -- train FILE --run-dir DIR",
        )  # fmt: skip
    faults.raise_if_any()
    return run(command, given.processes, given.devices, os.environ)
