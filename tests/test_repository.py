"""Laws about the repository: no dead field, nothing of one machine, nothing heavy where start-up must be quick."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

from jaxml.cli.main import VERBS, main
from jaxml.config.spec import Spec
from jaxml.inputs.tokenizers import ByteTokenizer, encode_document
from tests.field_reads import unread_fields

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxml"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SUB_VERBS = {"data": ["prepare", "show"]}


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def spec_classes() -> dict[type[Spec], Path]:
    """Every dataclass that derives from Spec, and the file that declares it."""
    found: dict[type[Spec], Path] = {}
    for file in SOURCES:
        if file.name == "spec.py" or file == PACKAGE / "recipes" / "experiment.py":
            for value in vars(importlib.import_module(module_of(file))).values():
                if isinstance(value, type) and issubclass(value, Spec) and value.__module__ == module_of(file):
                    found[value] = file
    return found


def test_every_field_of_every_spec_is_read_by_code_that_acts_on_it():
    home = spec_classes()
    unread = unread_fields(home, SOURCES)
    assert not unread, "fields that nothing reads: " + ", ".join(sorted(f"{c.__name__}.{name}" for c, name in unread))


@dataclasses.dataclass(frozen=True)
class Inner(Spec):
    size: int = 1
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Outer(Spec):
    inner: Inner = Inner()
    parts: tuple[Inner, ...] = ()
    name: str = ""


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("Outer(inner=Inner(size=1), parts=(), name='x')", ""),
        ("class Outer:\n    name: str = ''\n    parts: tuple = ()", ""),
        ("def f(path): return path.name", ""),
        ("def f(path: Outer): path.name = 'x'", ""),
        ("def f(anything): return anything.size", "size"),
        ("def f(spec: Outer): return spec.name", "name"),
        ("def f(spec: Outer): return spec.inner.kind", "inner kind"),
        ("def f(spec: Outer):\n    for part in spec.parts:\n        print(part.kind)", "parts kind"),
        ("def f(spec: 'Outer | None'):\n    return [p.kind for i, p in enumerate(spec.parts)]", "parts kind"),
        ("class C:\n    def f(self, spec: Outer): self.s = spec\n    def g(self): return self.s.name", "name"),
        ("def check_f(spec: Outer): return spec.name", ""),
        ("def f(spec: Inner): return dataclasses.asdict(spec)", "size kind"),
        ("def f(spec: Inner): return getattr(spec, 'kind')", "kind"),
    ],
)  # fmt: skip
def test_a_read_is_told_from_a_declaration_a_keyword_a_check_and_another_object(code, read, tmp_path):
    file = tmp_path / "code.py"
    file.write_text(code)
    home = {Inner: Path("elsewhere"), Outer: Path("elsewhere")}
    unread = {name for _, name in unread_fields(home, [file])}
    assert {"inner", "parts", "name", "size", "kind"} - unread == set(read.split())


def test_shapes_and_types_of_jaxml_are_checked_in_this_suite():
    flat = np.zeros(3, np.uint32)
    assert encode_document(ByteTokenizer(), flat).shape == (4,)
    with pytest.raises(jaxtyping.TypeCheckError):
        encode_document(ByteTokenizer(), flat.reshape(1, 3))
    with pytest.raises(jaxtyping.TypeCheckError):
        encode_document(ByteTokenizer(), flat.astype(np.float32))


@pytest.mark.parametrize("words", [[v, s] for v in VERBS for s in SUB_VERBS.get(v, [])] + [[v] for v in VERBS])
def test_every_verb_answers_help_with_an_example(words, capsys):
    try:
        exit_code = main([*words, "--help"])
    except SystemExit as left:
        exit_code = left.code
    shown = capsys.readouterr().out
    assert not exit_code
    assert "usage: jaxml " + " ".join(words) in shown
    assert f"jaxml {words[0]} " in shown.partition("example")[2]


def test_the_overview_names_every_verb_with_its_example(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, (_, help_text, example) in VERBS.items():
        assert help_text in shown
        assert example in shown
        assert example.startswith(f"jaxml {verb} ")


def loaded(code: str, heavy: tuple[str, ...]) -> list[str]:
    """Runs code in a fresh interpreter; returns which of the heavy packages it ended up importing."""
    report = f"import sys; print('loaded:', *[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def test_help_imports_nothing_heavy():
    heavy = ("jax", "flax", "numpy", "tyro", "rich", "orbax", "grain", "optax", "jaxml.recipes.train")
    assert loaded("from jaxml.cli.main import main; main(['--help'])", heavy) == []


def test_specs_data_and_inputs_import_no_jax():
    quick = [file for file in SOURCES if file.name == "spec.py" or file.parent.name in ("data", "inputs", "config")]
    quick += [PACKAGE / "errors.py", PACKAGE / "telemetry.py"]
    quick += [PACKAGE / "recipes" / "experiment.py", PACKAGE / "recipes" / "checks.py"]
    quick.remove(PACKAGE / "data" / "loader.py")  # Grain imports jax
    lines = ["import sys"]
    for module in sorted(map(module_of, quick)):
        lines += [f"import {module}", f"assert 'jax' not in sys.modules, '{module} imports jax'"]
    assert loaded("\n".join(lines), ("jax", "flax", "optax", "orbax")) == []


def repository_files() -> list[Path]:
    """Files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


# In pieces, so that this file does not hold what it looks for.
HOSTS = [r"py" + r"pi\.(org|io)", "python" + "hosted", r"ana" + r"conda\.(org|com)", r"npm" + r"js\.(org|com)"]
HOSTS += [r"crates" + r"\.io", r"(docker|ghcr|quay)" + r"\.io", "arti" + "factory", r"https?://\S+/" + r"simple\b"]
PLACES = ["ro" + "ot", "wo" + "rk", "ho" + r"me/\w+", "Use" + r"rs/\w+", r"opt/(wheels|py" + "pi)"]
OF_A_MACHINE = re.compile("|".join([*HOSTS, r"(?<![\w.~/*})\]])/(" + "|".join(PLACES) + r")\b"]))


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("index-url = https://py" + "pi.org/simple", True),
        ("open('/wo" + "rk/main/x')", True),
        ("see /ho" + "me/someone/data", True),
        ("cd ~/wo" + "rk, ../wo" + "rk, https://github.com/wo" + "rk/x, a/ro" + "ot", False),
        ("/wo" + "rkers and /homeless", False),
    ],
)
def test_the_search_for_hosts_and_places_finds_what_it_should(text, is_found):
    assert bool(OF_A_MACHINE.search(text)) == is_found


def test_no_file_names_a_registry_host_or_a_place_on_one_machine():
    found = []
    for file in repository_files():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        hits = [(number, OF_A_MACHINE.search(line)) for number, line in enumerate(lines, 1)]
        found += [f"{file.relative_to(ROOT)}:{number}: {hit[0]}" for number, hit in hits if hit]
    assert not found, "\n".join(found)


def test_every_file_says_what_it_is_for_and_is_named_for_it():
    assert not [str(f) for f in SOURCES if not ast.get_docstring(ast.parse(f.read_text()))], "no file docstring"
    vague = re.compile(r"utils?|common|helpers?|manager|misc")
    assert not [str(p) for p in PACKAGE.rglob("*") if set(vague.findall(p.stem)) & set(re.split(r"_", p.stem))]


def test_no_file_grows_beyond_four_hundred_lines():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in SOURCES}
    assert not {name: length for name, length in lengths.items() if length > 400}
