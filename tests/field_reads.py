"""Which fields of which specs the code reads, found in its syntax trees without running it.

`tests/test_repository.py` reads this. A name alone says little (`path.name` is no read of `Experiment.name`), so the
receiver of every attribute is typed as far as annotations and assignments go: parameters, fields and returns annotated
with a spec class, `x = spec.attention`, loops and comprehensions over tuples of specs, `self.x = spec`.
A read whose receiver stays unknown counts for a field only when no other kind of object is likely to have its name.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from jaxml.config.spec import Spec

Classes = frozenset[type[Spec]]
Read = tuple[type[Spec], str]
NOTHING: Classes = frozenset()
# Attributes that paths, files, arrays, devices, regular expressions or modules have as well.
COMMON = {"name", "path", "text", "kind", "label", "weight", "data", "params", "base", "width", "model", "task"}
# Calls whose result holds what their arguments hold.
TRANSPARENT = {"enumerate", "zip", "tuple", "list", "sorted", "reversed", "replace", "iter", "next", "partial"}
# Calls that read every field of a spec.
WHOLE = {"asdict", "astuple", "fields"}
CHECK = re.compile(r"_?check(_|$)|.*_faults$")


def unread_fields(home: dict[type[Spec], Path], files: Iterable[Path]) -> set[Read]:
    """The (class, field) pairs that no file reads; `home` has the spec classes and the file that declares each.

    Functions that only refuse values (`check_...`, `..._faults`) do not count, nor do guesses in the declaring file.
    """
    trees = {file: ast.parse(file.read_text()) for file in files}
    known = _Known(list(home))
    for _ in range(3):  # what one pass learns of attributes and returns types more receivers in the next
        for tree in trees.values():
            _Reader(known).visit(tree)
    fields = {(cls, field.name) for cls in home for field in dataclasses.fields(cls)}
    for file, tree in trees.items():
        reader = _Reader(known)
        reader.visit(tree)
        guessed = reader.untyped - COMMON
        fields -= reader.typed
        fields = {(cls, name) for cls, name in fields if name not in guessed or home[cls] == file}
    return fields


class _Known:
    """Facts about the whole package: spec classes and aliases by name, and spec-typed attributes and returns."""

    def __init__(self, classes: list[type[Spec]]):
        self.by_name: dict[str, Classes] = {cls.__name__: frozenset([cls]) for cls in classes}
        self.fields: dict[Read, Classes] = {}
        self.attributes: dict[str, Classes] = defaultdict(frozenset)
        self.returns: dict[str, Classes] = defaultdict(frozenset)
        for cls in classes:
            for name, hint in typing.get_type_hints(cls).items():
                self.fields[cls, name] = _specs_in(hint)

    def annotated(self, annotation: ast.expr | None) -> Classes:
        """The spec classes that an annotation names."""
        if annotation is None:
            return NOTHING
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
        return frozenset().union(*(self.by_name.get(name, NOTHING) for name in names))


def _specs_in(hint: object) -> Classes:
    if isinstance(hint, type) and issubclass(hint, Spec):
        return frozenset([hint])
    return frozenset().union(*(_specs_in(part) for part in typing.get_args(hint)))


class _Reader(ast.NodeVisitor):
    """Walks one file; collects reads by type, and the names read from receivers of unknown type."""

    def __init__(self, known: _Known):
        self.known = known
        self.names: dict[str, Classes] = {}
        self.typed: set[Read] = set()
        self.untyped: set[str] = set()

    def type_of(self, node: ast.expr) -> Classes:
        """The spec classes that an expression may be (or hold)."""
        known = self.known
        match node:
            case ast.Name(id=name):
                return self.names.get(name, NOTHING)
            case ast.Attribute(value=value, attr=attr):
                owners = self.type_of(value)
                found = [known.fields[cls, attr] for cls in owners if (cls, attr) in known.fields]
                return frozenset().union(*found) if owners else known.attributes[attr]
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
                return self.type_of(value)
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.BoolOp(values=items):
                return frozenset().union(*map(self.type_of, items))
            case ast.IfExp(body=body, orelse=orelse):
                return self.type_of(body) | self.type_of(orelse)
            case ast.GeneratorExp(elt=item) | ast.ListComp(elt=item):
                return self.type_of(item)
            case ast.Call(func=function, args=arguments):
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if name in TRANSPARENT:
                    return frozenset().union(*map(self.type_of, arguments))
                return known.returns[name] | known.by_name.get(name, NOTHING)
        return NOTHING

    def bind(self, target: ast.expr, value: ast.expr | None, classes: Classes) -> None:
        """Remember what a name or a `self.x` holds after an assignment, a loop or a `with`."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for left, right in zip(target.elts, value.elts, strict=True):
                self.bind(left, right, self.type_of(right))
        elif isinstance(target, ast.Tuple):
            for left in target.elts:
                self.bind(left, None, classes)
        elif isinstance(target, ast.Name):
            self.names[target.id] = classes
        elif isinstance(target, ast.Attribute) and classes:
            self.known.attributes[target.attr] |= classes

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if CHECK.match(node.name):
            return
        outer = dict(self.names)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self.names[argument.arg] = self.known.annotated(argument.annotation)
        self.known.returns[node.name] |= self.known.annotated(node.returns)
        is_property = any(getattr(d, "id", getattr(d, "attr", "")).endswith("property") for d in node.decorator_list)
        if is_property:
            self.known.attributes[node.name] |= self.known.annotated(node.returns)
        self.generic_visit(node)
        self.names = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                classes = self.known.annotated(line.annotation)
                if node.name not in self.known.by_name and classes:
                    self.known.attributes[line.target.id] |= classes
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self.bind(target, node.value, self.type_of(node.value))
            # X = A | B of spec classes is an alias that annotations may name.
            if isinstance(target, ast.Name) and isinstance(node.value, ast.BinOp):
                classes = self.known.annotated(node.value)
                if classes:
                    self.known.by_name[target.id] = classes

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self.bind(node.target, node.value, self.known.annotated(node.annotation))

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, None, self.type_of(node.iter))
        self.generic_visit(node)

    def _comprehension(self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp) -> None:
        for generator in node.generators:
            self.bind(generator.target, None, self.type_of(generator.iter))
        self.generic_visit(node)

    visit_GeneratorExp = visit_ListComp = visit_SetComp = visit_DictComp = _comprehension

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return
        owners = self.type_of(node.value)
        if not owners:
            self.untyped.add(node.attr)
        self.typed |= {(cls, node.attr) for cls in owners if (cls, node.attr) in self.known.fields}

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in WHOLE and node.args:
            owners = self.type_of(node.args[0])
            self.typed |= {read for read in self.known.fields if read[0] in owners}
        elif name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            attr = str(node.args[1].value)
            self.typed |= {(cls, attr) for cls in self.type_of(node.args[0]) if (cls, attr) in self.known.fields}
