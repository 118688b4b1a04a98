"""Every snippet of README.md and docs/ is executed here (`nox -s docs`), and every docstring example.

`python` blocks of one page run in order in one namespace; `sh` blocks run with bash, line by line fatal. The working
directory is temporary, with `experiments` linked into it. `console` and `text` blocks show what is not to be executed;
a block of any other kind fails, so that none is left out by a misspelt name.
"""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import jaxml

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
EXECUTED, SHOWN = {"python", "sh"}, {"console", "text", "json"}
MODULES = [module.name for module in pkgutil.walk_packages(jaxml.__path__, "jaxml.")]


def blocks(page: Path) -> list[tuple[str, str]]:
    """(kind, text) of every fenced block of a page, indented ones too."""
    return [(kind.strip(), textwrap.dedent(text)) for _, kind, text in FENCE.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_of_a_page_has_a_known_kind(page: Path) -> None:
    assert {kind for kind, _ in blocks(page)} <= EXECUTED | SHOWN


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(kind in EXECUTED for kind, _ in blocks(p))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_snippets_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JAXML_CACHE", str(ROOT / ".cache" / "docs"))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for kind, text in blocks(page):
        if kind == "python":
            exec(compile(text, f"{page.name} snippet", "exec"), namespace)
        elif kind == "sh":
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_of_a_module_hold(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
