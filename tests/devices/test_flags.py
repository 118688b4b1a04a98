"""Flags that are shown must be known: XLA ends a process at the first one that it does not know."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from jaxml.cli.main import main
from jaxml.devices.flags import PRESETS

START = "import jax; print(jax.device_count())"


def start(variable: str, flags: str) -> subprocess.CompletedProcess[str]:
    """A process that asks for devices with these flags."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", variable: flags}
    return subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=120)


def test_this_jaxlib_knows_every_flag_of_gpus_and_cpus():
    """The build for CPUs has the flags of both."""
    flags = [str(flag) for backend in ("gpu", "cpu") for flag in PRESETS[backend].flags]
    assert {PRESETS[backend].variable for backend in ("gpu", "cpu")} == {"XLA_FLAGS"}
    done = start("XLA_FLAGS", " ".join(flags))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]


def test_an_unknown_flag_would_be_noticed():
    assert start("XLA_FLAGS", "--xla_gpu_no_such_flag=true").returncode != 0


def test_every_backend_has_flags_with_reasons_in_a_line_that_a_shell_reads():
    assert set(PRESETS) == {"gpu", "tpu", "cpu"}
    for preset in PRESETS.values():
        assert all(flag.reason and "\n" not in flag.reason for flag in preset.flags)
        assert len({flag.name for flag in preset.flags}) == len(preset.flags)
        export, assignment = shlex.split(preset.line)
        assert export == "export"
        assert assignment == f"{preset.variable}={' '.join(map(str, preset.flags))}"
    assert PRESETS["tpu"].checked.startswith("not run")


def test_the_command_shows_them_and_needs_no_checkpoint(capsys):
    assert main(["inspect", "--flags", "--backend", "gpu"]) == 0
    assert PRESETS["gpu"].line in capsys.readouterr().out.splitlines()
    assert main(["inspect", "--flags", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["flags"]) == set(PRESETS)


def test_a_checkpoint_or_flags_not_neither_nor_both(capsys):
    for words in ([], ["somewhere", "--flags"]):
        with pytest.raises(SystemExit):
            main(["inspect", *words])
