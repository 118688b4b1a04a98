"""Reference pages from docstrings, one a room: an MkDocs hook (`hooks` in mkdocs.yml) that adds them to each build.

Reads the package as text, so that nothing is imported. What has no underscore in front and a docstring is public. The
pages are made and not committed.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PACKAGE = Path(__file__).resolve().parent.parent / "jaxml"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The hook."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """Room to Markdown; the files beside the rooms are the room `core`."""
    rooms = {folder.name: sorted(folder.rglob("*.py")) for folder in sorted(PACKAGE.iterdir()) if folder.is_dir()}
    rooms["core"] = sorted(PACKAGE.glob("*.py"))
    return {name: page(name, files) for name, files in rooms.items() if files}


def page(room: str, files: list[Path]) -> str:
    """Every module of a room."""
    parts = [
        f"# {'jaxml' if room == 'core' else f'jaxml.{room}'}",
        "Written from the docstrings when the site is built.",
    ]
    for file in files:
        tree = ast.parse(file.read_text())
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        if file.name != "__init__.py":
            parts += [f"## {name}", prose(ast.get_docstring(tree, clean=False))]
            parts += [part for found in public(tree.body) for part in described(found, "###")]
        elif text := ast.get_docstring(tree, clean=False):
            parts.insert(1, prose(text))
    return "\n\n".join(parts) + "\n"


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    """Classes and functions that are meant for others."""
    for found in body:
        if isinstance(found, Definition) and not found.name.startswith("_") and ast.get_docstring(found):
            yield found


def described(found: Definition, heading: str, owner: str = "") -> Iterator[str]:
    """Heading, signature and docstring; of a class its fields and methods too."""
    yield f"{heading} {owner}{found.name}"
    yield "```python\n" + signature(found) + "\n```"
    yield prose(ast.get_docstring(found, clean=False))
    if isinstance(found, ast.ClassDef):
        for method in public(found.body):
            yield from described(method, "####", f"{found.name}.")


def signature(found: Definition) -> str:
    """As it stands in the source, without bodies; a class with its annotated fields."""
    marks = [f"@{ast.unparse(mark)}" for mark in found.decorator_list]
    if not isinstance(found, ast.ClassDef):
        kind = "async def" if isinstance(found, ast.AsyncFunctionDef) else "def"
        result = f" -> {ast.unparse(found.returns)}" if found.returns else ""
        line = f"{kind} {found.name}({ast.unparse(found.args)}){result}"
        if len(line) > 100:
            arguments = re.sub(r"((?:[^,\[\](){}]|\[.*?\]|\(.*?\))+),? ?", r"    \1,\n", ast.unparse(found.args))
            line = f"{kind} {found.name}(\n{arguments}){result}"
        return "\n".join([*marks, line])
    bases = ", ".join(map(ast.unparse, found.bases))
    fields = [
        f"    {ast.unparse(line)}"
        for line in found.body
        if isinstance(line, ast.AnnAssign) and not ast.unparse(line.target).startswith("_")
    ]
    starts = [line for line in found.body if isinstance(line, ast.FunctionDef) and line.name == "__init__"]
    fields += [f"    {signature(line)}" for line in starts]
    return "\n".join([*marks, f"class {found.name}" + (f"({bases}):" if bases else ":"), *fields])


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: examples and tables as code, and no character that Markdown would take for its own."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(map(_paragraph, paragraphs))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if text.startswith(">>>") or all(line.startswith("  ") for line in lines):
        return "```text\n" + text + "\n```"
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([*_<\[\]])", r"\\\1", piece) for piece in pieces)
