"""The only verbs: `nox -l` lists them, `.ci/run` runs them. Environments are made with uv where it starts, else pip."""

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
EXTRAS = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
TEST_NEEDS = ("-e", ".[test,data,track,experiments]")
# One process a core; a file's tests stay together, so that what they compile is compiled once.
SUITE = ("-m", "pytest", "-m", "not slow", "-n", "2", "--dist", "loadfile")
# Fake devices print SPMD notes, and an accelerator that happens to be there would change what is tested.
QUIET = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
# The suite compiles without optimisations (tests/conftest.py); the long sessions compile as users do.
OPTIMIZED = {**QUIET, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train on Tiny Shakespeare, kill, resume, compare, evaluate, serve, ask: the README's first command."""
    session.install(".[serve,client]")
    session.run("python", "experiments/quickstart.py", *session.posargs, env=QUIET)


@nox.session
def tests(session: nox.Session) -> None:
    """The suite: under ten minutes on two cores, no network, no accelerator."""
    session.install(*TEST_NEEDS)
    session.run("python", *SUITE, *session.posargs, env=QUIET)


@nox.session(venv_backend="none")
def tests_matrix(session: nox.Session) -> None:
    """The suite under every interpreter that is found; says which are not."""
    found = {version: find_interpreter(version) for version in MATRIX}
    has_uv = starts(["uv", "--version"]) is not None
    failed = []
    for version, interpreter in found.items():
        if interpreter is None:
            continue
        place = ROOT / ".nox" / f"tests_matrix-{version.replace('.', '-')}"
        python = str(place / "bin" / "python")
        install = ["uv", "pip", "install", "--python", python] if has_uv else [python, "-m", "pip", "install"]
        session.log(f"Python {version}: {interpreter}")
        try:
            session.run(interpreter, "-m", "venv", "--clear", str(place), external=True)
            session.run(*install, "-q", *TEST_NEEDS, external=True)
            session.run(python, *SUITE, *session.posargs, env=QUIET, external=True)
        except nox.command.CommandFailed:
            failed.append(version)
    missing = [version for version, interpreter in found.items() if interpreter is None]
    session.log(f"interpreters not found: {', '.join(missing) or 'none'}")
    if failed or len(missing) == len(MATRIX):
        session.error(f"failed: {', '.join(failed) or 'no interpreter to test with'}")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (format and rules) and the direction of imports. Needs the tools alone, not what jaxml imports."""
    session.install(*EXTRAS["lint"])
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Static types of the package and the experiments."""
    session.install("-e", ".[types,serve,client,data,track,experiments]")
    session.run("pyrefly", "check", "--min-severity", "error")


@nox.session
def docs(session: nox.Session) -> None:
    """A strict build of the pages; their snippets and the docstring examples are executed."""
    session.install("-e", ".[docs,test,data,track,experiments]")
    # Not -q: that would let broken links pass.
    session.run("mkdocs", "build", "--strict", "--site-dir", str(ROOT / ".nox" / "site"))
    session.run("python", "-m", "pytest", "docs/snippets.py", "-n", "2", *session.posargs, env=QUIET)


@nox.session
def chaos(session: nox.Session) -> None:
    """Random kills for minutes: the resumed run must equal the straight one bit for bit."""
    session.install(*TEST_NEEDS)
    session.run("python", "-m", "pytest", "-m", "slow", "tests/chaos", "-s", *session.posargs, env=OPTIMIZED)


@nox.session
def scale(session: nox.Session) -> None:
    """The long matrix of parallelism, precision, processes and proofs, which the suite has a small part of."""
    session.install(*TEST_NEEDS)
    slow = ("tests/prove", "tests/launch", "tests/train", "tests/numerics")
    session.run("python", "-m", "pytest", "-m", "slow", "-n", "2", *slow, *session.posargs, env=OPTIMIZED)


@nox.session
def bench(session: nox.Session) -> None:
    """`nox -s bench -- train` (or decode, serve, scale): against its rivals, interleaved; a section of docs/benchmarks.md."""
    session.install(".[bench,serve,float8]", "pip")
    # Plain torch can be a build of several GB for accelerators; this release by pip on 3.11 is known to be the CPU's.
    if sys.version_info[:2] == (3, 11):
        session.run("python", "-m", "pip", "install", "-q", "torch==2.13.0", "transformers>=5")
    else:
        session.log("the rows of PyTorch are skipped: its CPU build is installed on Python 3.11 only")
    peers = ROOT / ".nox" / "peers" / "bin" / "python"
    found = ["--peers-python", str(peers)] if "decode" in session.posargs and peers.exists() else []
    session.run("python", "benchmarks/run.py", *found, *session.posargs, env=QUIET)


@nox.session
def peers(session: nox.Session) -> None:
    """An environment of its own for llama.cpp, which is built (minutes); `nox -s bench -- decode` then finds it."""
    session.install("llama-cpp-python>=0.3.16", "gguf>=0.17")
    session.run("python", "-c", "import gguf, llama_cpp; print('llama-cpp-python', llama_cpp.__version__)")


@nox.session
def same(session: nox.Session) -> None:
    """`nox -s same -- BASE`: the seeded 20-step loss of the tiny experiment at BASE and here, bit for bit."""
    # The dependencies come with it; tests/same.py puts the code of either side in front.
    session.install("-e", ".")
    session.run("python", "tests/same.py", *session.posargs, env=QUIET)


def find_interpreter(version: str) -> str | None:
    """A Python of that version that really starts (version-manager shims on PATH may refuse to)."""
    candidates = [shutil.which(f"python{version}")]
    roots = [os.environ.get("PYENV_ROOT"), str(Path.home() / ".pyenv")]
    for root in filter(None, roots):
        candidates += sorted(str(p) for p in Path(root).glob(f"versions/{version}.*/bin/python"))
    question = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, [*candidates, sys.executable]):
        if starts([candidate, "-c", question]) == version:
            return candidate
    return None


def starts(command: list[str]) -> str | None:
    """What a command prints, or None when it is not there or refuses."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
