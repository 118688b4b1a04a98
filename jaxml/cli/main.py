"""The `jaxml` command: finds the verb, prints its result, turns errors into exit codes. Imports nothing heavy.

Reads `errors` and, once a verb is known, that verb's file in `jaxml.cli`. Exit codes: 0 done, 1 failed, 2 wrong use or
configuration, 75 interrupted after saving (a scheduler should requeue), 130 and 143 stopped at once by a second signal.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from typing import Any

from jaxml import __version__
from jaxml.errors import ConfigError, JaxmlError, RunError

# verb -> (file that defines `main(arguments) -> (result, exit code)`, what it does, an example)
VERBS = {
    "train": (
        "train",
        "train an experiment",
        "jaxml train experiments/shakespeare.py --run-dir runs/a --train.steps 200",
    ),
    "resume": ("resume", "go on with a run, bit for bit", "jaxml resume runs/a"),
    "inspect": ("inspect", "describe a checkpoint, or compare two", "jaxml inspect runs/a"),
    "data": ("data", "prepare data, show packed rows", "jaxml data show experiments/shakespeare.py --rows 2"),
    "generate": (
        "generate",
        "go on with a text",
        'jaxml generate runs/a --prompt "ROMEO:" --max-tokens 100 --temperature 0.8 --seed 1',
    ),
    "score": ("score", "log-probabilities of a text", 'jaxml score runs/a --text "To be, or not to be" --json'),
    "eval": ("eval", "loss, perplexity, bits a byte; test sets", "jaxml eval runs/a --text held-out.txt"),
    "predict": ("predict", "label texts with a classifier", 'jaxml predict runs/spam "You have won a prize"'),
    "serve": ("serve", "answer over HTTP", "jaxml serve runs/a --port 8000"),
    "keys": ("keys", "who may ask a service", "jaxml keys add keys.json --tenant alice"),
    "replay": ("replay", "compute a served answer again from its receipt", "jaxml replay answer.json runs/a"),
    "import": (
        "import_",
        "make a checkpoint of a published model",
        "jaxml import models/stories260k --out checkpoints/stories",
    ),
    "quantize": (
        "quantize",
        "make a checkpoint with int8 weights",
        "jaxml quantize runs/a --scheme int8 --out checkpoints/int8",
    ),
    "batch": ("batch", "answer a file of requests", "jaxml batch runs/a in.jsonl -o out.jsonl"),
    "launch": (
        "launch",
        "train in several processes",
        "jaxml launch local --processes 2 --devices 4 -- train experiments/shakespeare.py --run-dir runs/a",
    ),
    "prove": ("prove", "prove an experiment right on fake devices", "jaxml prove experiments/shakespeare.py"),
    "diverge": ("diverge", "where two runs that should be equal part", "jaxml diverge runs/a runs/b"),
    "blame": ("blame", "the documents of one step, worst first", "jaxml blame runs/a --step 120"),
    "seen": ("seen", "which steps and checkpoints saw a document", "jaxml seen runs/a --document 0"),
}


def entry() -> None:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def run_experiment(path: str) -> None:
    """For the last line of an experiment file: `run_experiment(__file__)` is `jaxml train FILE` with the same options."""
    sys.exit(main(["train", path, *sys.argv[1:]]))


def main(arguments: list[str]) -> int:
    """Run one verb; returns the exit code. With `--json` the last line of stdout is one JSON object."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    wants_json = "--json" in arguments
    try:
        result, exit_code = run_verb(arguments[0], [word for word in arguments[1:] if word != "--json"])
    except JaxmlError as error:
        return fail(error, wants_json)
    except OSError as error:
        told = f"{type(error).__name__}: {error}"
        return fail(RunError("reading or writing", expected="files that can be", got=told, todo="mend it"), wants_json)
    except SystemExit as left:  # argparse and tyro have printed what was wrong
        if wants_json and left.code:
            print(json.dumps({"error": "usage", "faults": []}))
        raise
    is_printed = result.pop("is_printed", False)  # by the verb, as it came
    if wants_json:
        print(json.dumps(finite(result), allow_nan=False))
    elif not is_printed:
        print_result(result)
    return exit_code


def fail(error: JaxmlError, wants_json: bool) -> int:
    """Print an error on stderr, and as JSON on stdout if that is wanted; returns its exit code."""
    print(f"jaxml: {error}", file=sys.stderr)
    if wants_json:
        print(json.dumps({"error": type(error).__name__, "faults": [vars(fault) for fault in error.faults]}))
    return error.exit_code


def finite(value: Any) -> Any:
    """`value` with NaN and infinities, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run_verb(verb: str, arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Import the verb's file and run it. Raises ConfigError for an unknown verb."""
    if verb not in VERBS:
        from jaxml.config.spec import suggest

        raise ConfigError("the verb", expected="one of " + ", ".join(VERBS), got=verb, todo=suggest(verb, list(VERBS)))
    # XLA's C++ notes about resharding are for its developers; errors still show. Read before jax is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return importlib.import_module(f"jaxml.cli.{VERBS[verb][0]}").main(arguments)


def overview() -> str:
    """The help text: verbs and an example of each."""
    lines = ["usage: jaxml VERB ... [--json]", "", "verbs:"]
    lines += [f"  {verb:8} {help_text}" for verb, (_, help_text, _) in VERBS.items()]
    lines += ["", "examples:", *[f"  {example}" for _, _, example in VERBS.values()], ""]
    lines += ["`jaxml VERB --help` says more. --json: logs on stderr, one final JSON object on stdout."]
    return "\n".join(lines)


def print_result(result: dict[str, Any]) -> None:
    """A result for people: a verb's own `text`, else `name: value` lines."""
    if "text" in result:
        print(result["text"])
        return
    for name, value in result.items():
        print(f"{name}: {value}")
