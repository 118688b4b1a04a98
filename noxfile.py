"""The only verbs: `nox -l` lists them; `.ci/run` runs the same. Environments are made with uv where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["tests", "lint", "types", "docs"]
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")

ROOT = Path(__file__).parent
MATRIX = ("3.11", "3.12", "3.13")
TEST_NEEDS = (".[test,data,track,experiments]", "pip")
# Fake devices print SPMD notes, and an accelerator that happens to be there would change what is tested.
QUIET = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small language model on Tiny Shakespeare, kill it, resume it, compare: the README's first command."""
    session.install(".")
    session.run("python", "experiments/quickstart.py", *session.posargs, env=QUIET)


@nox.session
def tests(session: nox.Session) -> None:
    """The suite: under ten minutes on two cores, no network, no accelerator."""
    session.install(*TEST_NEEDS)
    session.run("python", "-m", "pytest", "-m", "not slow", *session.posargs, env=QUIET)


@nox.session(venv_backend="none")
def tests_matrix(session: nox.Session) -> None:
    """The suite under every interpreter that is found; says which are not."""
    missing = []
    for version in MATRIX:
        interpreter = find_interpreter(version)
        if interpreter is None:
            missing.append(version)
            continue
        place = ROOT / ".nox" / f"tests_matrix-{version}"
        session.run(interpreter, "-m", "venv", "--clear", str(place), external=True)
        python = str(place / "bin" / "python")
        session.run(python, "-m", "pip", "install", "-q", *TEST_NEEDS, external=True)
        session.log(f"Python {version}: {interpreter}")
        session.run(python, "-m", "pytest", "-m", "not slow", *session.posargs, env=QUIET, external=True)
    session.log(f"interpreters not found: {', '.join(missing) or 'none'}")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (format and rules) and the direction of imports."""
    session.install(".[lint]")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Static types of the package and the experiments."""
    session.install(".[types,data,track,experiments]")
    session.run("pyright", env={"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})


@nox.session
def docs(session: nox.Session) -> None:
    """A strict build of the pages; their snippets and the docstring examples are executed."""
    session.install(".[docs,test,data,track,experiments]")
    # Not -q: that would let broken links pass.
    session.run("mkdocs", "build", "--strict", "--site-dir", str(ROOT / ".nox" / "site"))
    session.run("python", "-m", "pytest", "-q", "docs/snippets.py", env=QUIET)


@nox.session
def chaos(session: nox.Session) -> None:
    """Random kills for minutes: the resumed run must equal the straight one bit for bit."""
    session.install(*TEST_NEEDS)
    session.run("python", "-m", "pytest", "-m", "slow", "tests/chaos", "-s", *session.posargs, env=QUIET)


@nox.session
def bench(session: nox.Session) -> None:
    """`nox -s bench -- train`: A/B/A against PyTorch, interleaved; writes docs/benchmarks.md, a JSON file and a plot."""
    session.install(".[bench]", "pip")
    session.run("python", "benchmarks/run.py", *session.posargs, env=QUIET)


@nox.session
def same(session: nox.Session) -> None:
    """`nox -s same -- BASE`: the seeded 20-step loss of the tiny experiment at BASE and here, bit for bit."""
    session.install(".")
    session.run("python", "tests/same.py", *session.posargs, env=QUIET)


def find_interpreter(version: str) -> str | None:
    """A Python of that version that really starts (version-manager shims on PATH may refuse to)."""
    candidates = [shutil.which(f"python{version}")]
    roots = [os.environ.get("PYENV_ROOT"), str(Path.home() / ".pyenv")]
    for root in filter(None, roots):
        candidates += sorted(str(p) for p in Path(root).glob(f"versions/{version}.*/bin/python"))
    for candidate in filter(None, candidates):
        question = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        answer = subprocess.run([candidate, "-c", question], capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    return sys.executable if sys.version.startswith(version + ".") else None
