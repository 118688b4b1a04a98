"""Every snippet of README.md and docs/ is executed here (`nox -s docs`), and every docstring example.

`python` blocks of one page run in order in one namespace; `sh` blocks run with bash, line by line fatal. The working
directory is temporary, with `experiments` linked into it. `console` and `text` blocks show what is not to be executed;
a block of any other kind fails, so that none is left out by a misspelt name. A server that a block starts runs on for the
blocks after it; one that the page does not stop is ended, and the page fails.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import pkgutil
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxml

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
EXECUTED, SHOWN = {"python", "sh"}, {"console", "text", "json"}
MODULES = [module.name for module in pkgutil.walk_packages(jaxml.__path__, "jaxml.")]


class Shell:
    """Runs `sh` blocks, each in a process group of its own, so that what one leaves running is found."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def run(self, text: str) -> None:
        # To a file and not to a pipe: whoever reads a pipe waits for a server that holds its other end.
        with Path("output.log").open("w+") as output:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text], stdout=output, stderr=output, start_new_session=True
            )
            self.groups.append(process.pid)
            code = process.wait(timeout=300)
            output.seek(0)
            assert code == 0, f"{text}\n{output.read()}"

    def end(self) -> list[str]:
        """Kills what is still there a moment after the page; returns it. Who has ended and waits to be buried is not."""
        deadline = time.monotonic() + 5
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for group in {int(line.split()[0]) for line in left}:
            os.killpg(group, signal.SIGKILL)
        return left

    def _left(self) -> list[str]:
        listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
        rows = [line for line in listed.splitlines() if int(line.split()[0]) in self.groups]
        return [row for row in rows if not row.split()[1].startswith("Z")]


@pytest.fixture
def shell() -> Iterator[Shell]:
    shell = Shell()
    yield shell
    assert shell.end() == [], "the page leaves a process running"


def blocks(page: Path) -> list[tuple[str, str]]:
    """(kind, text) of every fenced block of a page, indented ones too."""
    return [(kind.strip(), textwrap.dedent(text)) for _, kind, text in FENCE.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_of_a_page_has_a_known_kind(page: Path) -> None:
    assert {kind for kind, _ in blocks(page)} <= EXECUTED | SHOWN


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(kind in EXECUTED for kind, _ in blocks(p))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_snippets_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JAXML_CACHE", str(ROOT / ".cache" / "docs"))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for kind, text in blocks(page):
        if kind == "python":
            exec(compile(text, f"{page.name} snippet", "exec"), namespace)
        elif kind == "sh":
            shell.run(text)


def test_the_reference_has_every_module() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    text = "\n".join(reference.pages().values())
    modules = [name for name in MODULES if not hasattr(importlib.import_module(name), "__path__")]
    assert [name for name in modules if f"\n## {name.removeprefix('jaxml.')}\n" not in text] == []


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_of_a_module_hold(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
