"""Load an experiment file (Python, with `config()`), apply overrides, and the arguments that several verbs share.

Reads `config.overrides` and `recipes.experiment`; the verbs read it. The file is the user's own, named by the user on the
command line: it is run, as `python FILE` would.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import traceback
from pathlib import Path

from jaxml.config.overrides import override
from jaxml.config.spec import from_json
from jaxml.errors import ConfigError, JaxmlError
from jaxml.recipes.experiment import Experiment
from jaxml.recipes.run_directory import RunDirectory, require_record


def parser(verb: str, description: str) -> argparse.ArgumentParser:
    """A parser with the example of the verb and without abbreviations (they would swallow overrides)."""
    from jaxml.cli.main import VERBS

    return argparse.ArgumentParser(
        prog=f"jaxml {verb}",
        description=description,
        epilog=f"example: {VERBS[verb.split()[0]][2]}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def load_experiment(path: str, overrides: list[str]) -> Experiment:
    """The experiment of FILE, or of a run directory, with `--field value` overrides applied.

    Raises ConfigError when the file is not there or its `config()` does not return an Experiment.
    """
    if Path(path).is_dir():
        record = require_record(RunDirectory(Path(path)))
        return override(from_json(record.experiment), overrides, program=path)
    return override(_config_of(path), overrides, program=path)


def _config_of(path: str) -> Experiment:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            "the experiment file",
            expected="a Python file with config()",
            got=f"{path} (no such file)",
            todo="check the path",
        )
    spec = importlib.util.spec_from_file_location(f"experiment_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError("the experiment file", expected="a name that ends in .py", got=path, todo="rename the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent.resolve()))  # modules beside the file, as `python FILE` has them
    try:
        spec.loader.exec_module(module)
        config = getattr(module, "config", None)
        experiment = config() if callable(config) else None
    except JaxmlError:
        raise
    except Exception as error:  # the user's own code may raise anything
        traceback.print_exc()
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"running {path}", expected="config() to return", got=told, todo="see the traceback"
        ) from error
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"config() in {path}",
            expected="a function that returns a jaxml.recipes.experiment.Experiment",
            got="no config()" if config is None else type(experiment).__name__,
            todo="see experiments/shakespeare.py",
        )
    return experiment


def cache_directory() -> str:
    """Where compiled programs are kept between runs: $JAXML_CACHE, else $XDG_CACHE_HOME/jaxml, else ~/.cache/jaxml."""
    own = os.environ.get("JAXML_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(own) if own else Path(home) / "jaxml") + "/compiled"
