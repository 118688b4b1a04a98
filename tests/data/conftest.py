"""Small corpora, written and prepared on demand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxml.data.prepare import prepare
from jaxml.data.prepared import Prepared
from jaxml.data.spec import DataSpec, JsonlSource, TextSource

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box")


def sentence(number: int) -> str:
    """A text that no other number has: of 1 to 10 words, every tenth of 40."""
    num_words = 40 if number % 10 == 0 else 1 + number * 7 % 10
    return f"{number}: " + " ".join(WORDS[number * k % len(WORDS)] for k in range(1, 1 + num_words))


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., str]:
    """Write texts as lines of a file; gives its path."""

    def write(name: str, texts: list[str]) -> str:
        file = tmp_path / name
        file.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        return str(file)

    return write


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Two sources of 97 and 41 documents mixed 3 to 1, packed best-fit into rows of 64, held out 20 %."""
    return _mixed(tmp_path_factory.mktemp("mixed"), "best_fit")


@pytest.fixture(scope="module")
def concatenated(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The corpus of `mixed`, concatenated and split."""
    return _mixed(tmp_path_factory.mktemp("concatenated"), "concatenate")


def _mixed(folder: Path, packing: str) -> Prepared:
    (folder / "a.txt").write_text("\n".join(sentence(n) for n in range(97)))
    (folder / "b.txt").write_text("\n".join(sentence(n) for n in range(100, 141)))
    sources = (
        TextSource(str(folder / "a.txt"), "line", name="a", weight=3),
        TextSource(str(folder / "b.txt"), "line", name="b", weight=1),
    )
    spec = DataSpec(
        sources,
        str(folder / "prepared"),
        64,
        packing=packing,
        held_out=0.2,
        shard_tokens=1000,
        seed=5,  # type: ignore[arg-type]
    )
    return prepare(spec)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """53 documents with labels, a row each."""
    folder = tmp_path_factory.mktemp("labelled")
    lines = [f'{{"text": "{sentence(n)}", "label": "{("even", "odd")[n % 2]}"}}\n' for n in range(53)]
    (folder / "c.jsonl").write_text("".join(lines))
    source = JsonlSource(str(folder / "c.jsonl"), label="label")
    spec = DataSpec((source,), str(folder / "prepared"), 64, packing="single", too_long="truncate", held_out=0.25)
    return prepare(spec, has_labels=("even", "odd"))
