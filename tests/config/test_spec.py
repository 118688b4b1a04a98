"""Specs survive JSON, and nothing but a frozen Spec under jaxml is ever built from JSON.

The laws run over every spec class that jaxml has: instances are drawn from the type hints of the fields.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import sys
import types
import typing
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxml
from jaxml.config import spec as spec_module
from jaxml.config.spec import Spec, canonical_json, diff, digest, from_json, leaves, suggest, to_json
from jaxml.data.spec import DataSpec, JsonlSource, TextSource
from jaxml.errors import ConfigError
from jaxml.models.spec import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, NormSpec, RopeSpec
from jaxml.recipes.experiment import Experiment
from jaxml.tasks.spec import LanguageModeling, TextClassification
from jaxml.train.spec import AdamW, Lion, OptimizerSpec, ScheduleSpec, TrainSpec

for module in pkgutil.iter_modules(jaxml.__path__):
    if module.ispkg and importlib.util.find_spec(f"jaxml.{module.name}.spec"):
        importlib.import_module(f"jaxml.{module.name}.spec")


def subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


SPECS = sorted(
    (cls for cls in subclasses(Spec) if cls.__module__.startswith("jaxml.")), key=lambda cls: cls.__qualname__
)


@dataclass(frozen=True)
class Draft:
    """A spec to be: beartype checks constructors with `random`, which Hypothesis forbids while it draws."""

    cls: type[Spec]
    fields: dict


def built(value):
    if isinstance(value, Draft):
        return value.cls(**{name: built(field) for name, field in value.fields.items()})
    return tuple(map(built, value)) if isinstance(value, tuple) else value


def drawn_from(hint):
    """A strategy for what a field with this type hint may hold, specs as drafts."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([drawn_from(option) for option in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(drawn_from(arguments[0]), max_size=2).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Spec):
        hints = typing.get_type_hints(hint)
        fields = {field.name: drawn_from(hints[field.name]) for field in dataclasses.fields(hint)}
        return st.fixed_dictionaries(fields).map(lambda values: Draft(hint, values))
    simple = {
        int: st.integers(),
        float: st.floats(allow_nan=False, allow_infinity=False).map(lambda x: x + 0.0),
        bool: st.booleans(),
        str: st.text(max_size=4),
        type(None): st.none(),
    }
    return simple[hint]


any_spec = st.sampled_from([cls for cls in SPECS if cls is not Experiment]).flatmap(drawn_from)
law = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def refusals(value):
    with pytest.raises(ConfigError) as caught:
        from_json(value)
    return {fault.failed: fault for fault in caught.value.faults}


# Laws


@law
@given(any_spec)
def test_from_json_is_the_inverse_of_to_json_through_text(draft):
    spec = built(draft)
    read = from_json(json.loads(json.dumps(to_json(spec))))
    assert read == spec
    assert type(read) is type(spec)
    assert digest(read) == digest(spec)


def test_a_whole_experiment_survives_json():
    data = DataSpec(sources=(TextSource("a.txt"), JsonlSource("b.jsonl")), prepared="prepared", sequence_length=32)
    experiment = Experiment("tiny", decoder(), LanguageModeling(), data, TrainSpec(5, 2), OptimizerSpec(Lion()))
    assert from_json(json.loads(canonical_json(to_json(experiment)))) == experiment


@pytest.mark.parametrize("cls", SPECS, ids=lambda cls: cls.__qualname__)
def test_every_spec_class_is_a_frozen_dataclass_whose_hints_the_loader_knows(cls):
    assert "__dataclass_params__" in vars(cls)
    assert vars(cls)["__dataclass_params__"].frozen
    for hint in typing.get_type_hints(cls).values():
        drawn_from(hint)


@law
@given(any_spec, any_spec)
def test_diff_is_empty_exactly_for_equal_specs_and_swaps_its_sides(left, right):
    left, right = built(left), built(right)
    assert diff(left, left) == []
    assert (diff(left, right) == []) == (left == right)
    swapped = {(d.path, d.got, d.expected) for d in diff(right, left)}
    assert {(d.path, d.expected, d.got) for d in diff(left, right)} == swapped


@law
@given(any_spec)
def test_leaves_have_one_path_each_and_no_spec_or_tuple_among_them(draft):
    spec = built(draft)
    paths = [path for path, _ in leaves(spec)]
    assert len(paths) == len(set(paths))
    assert not any(isinstance(value, Spec | tuple) for _, value in leaves(spec))


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_canonical_json_does_not_depend_on_the_order_of_keys(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))
    assert json.loads(canonical_json(value)) == value


# Examples of the format


def test_the_json_of_a_spec_is_tagged_with_its_qualified_name():
    assert to_json(Lion()) == {"type": "jaxml.train.spec.Lion", "b1": 0.9, "b2": 0.99}


def test_fields_with_a_default_may_be_absent_so_old_files_open():
    assert from_json({"type": "jaxml.train.spec.TrainSpec", "steps": 5, "batch_size": 2}) == TrainSpec(5, 2)


def test_a_whole_number_is_accepted_for_a_float():
    read = from_json({"type": "jaxml.train.spec.OptimizerSpec", "learning_rate": 1})
    assert type(read.learning_rate) is float


def decoder(**changes):
    block = BlockSpec(AttentionSpec(4, 2, 8), MlpSpec(64))
    return DecoderSpec(
        **{"vocab_size": 65, "context_length": 32, "width": 32, "num_layers": 2, "blocks": (block,)} | changes
    )


def test_diff_names_the_leaf_with_both_values():
    wide = BlockSpec(AttentionSpec(4, 2, 8), MlpSpec(128))
    assert [str(d) for d in diff(decoder(), decoder(blocks=(wide,)))] == ["blocks.0.mlp.width: expected 64, got 128"]


def test_diff_names_a_piece_that_only_one_side_has():
    roped = BlockSpec(AttentionSpec(4, 2, 8, rope=RopeSpec()), MlpSpec(64))
    paths = {d.path: d for d in diff(decoder(), decoder(blocks=(roped,)))}
    assert set(paths) == {"blocks.0.attention.rope", "blocks.0.attention.rope.type", "blocks.0.attention.rope.base"}
    assert paths["blocks.0.attention.rope.base"].expected == "'(absent)'"


def test_diff_tells_two_classes_with_the_same_fields_apart():
    assert "rule.type: expected 'AdamW', got 'Lion'" in map(str, diff(OptimizerSpec(AdamW()), OptimizerSpec(Lion())))


def test_suggest_finds_the_nearest_name_or_lists_all():
    assert suggest("learnin_rate", ["learning_rate", "rule"]) == "did you mean 'learning_rate'?"
    assert suggest("zzz", ["b", "a"]) == "known here: a, b"


# Refusals


def test_an_unknown_field_is_refused_with_the_nearest_name():
    faults = refusals({"type": "jaxml.train.spec.TrainSpec", "steps": 5, "batch_size": 2, "acumulate": 1})
    assert faults["acumulate"].todo == "did you mean 'accumulate'?"


def test_all_faults_come_at_once_with_their_paths():
    value = to_json(decoder())
    value["widht"] = value.pop("width")
    value["blocks"][0]["mlp"]["activation"] = "tanh"
    value["blocks"][0]["attention"]["num_heads"] = "4"
    del value["blocks"][0]["attention"]["head_width"]
    assert set(refusals(value)) == {
        "widht",
        "width",
        "blocks.0.mlp.activation",
        "blocks.0.attention.num_heads",
        "blocks.0.attention.head_width",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", "5"),
        ("steps", 5.0),
        ("steps", True),
        ("steps", None),
        ("steps", [5]),
        ("steps", {"type": "jaxml.train.spec.Lion"}),
    ],
)
def test_a_wrong_type_is_refused_for_an_integer(field, value):
    fault = refusals({"type": "jaxml.train.spec.TrainSpec", "steps": 5, "batch_size": 2} | {field: value})[field]
    assert "int" in fault.expected
    assert fault.got == repr(value)


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        ("train.spec.OptimizerSpec", "learning_rate", "fast"),
        ("train.spec.OptimizerSpec", "learning_rate", True),
        ("train.spec.OptimizerSpec", "rule", {"type": "jaxml.train.spec.ScheduleSpec"}),
        ("train.spec.OptimizerSpec", "rule", "AdamW"),
        ("train.spec.OptimizerSpec", "rule", None),
        ("train.spec.OptimizerSpec", "schedule", {"type": "jaxml.train.spec.Lion"}),
        ("train.spec.OptimizerSpec", "schedule", None),
        ("train.spec.ScheduleSpec", "kind", "exponential"),
        ("train.spec.ScheduleSpec", "kind", ["cosine"]),
        ("models.spec.NormSpec", "has_bias", 1),
        ("data.spec.TextSource", "path", 5),
    ],
)
def test_a_wrong_type_is_refused_for_other_fields(cls, field, value):
    assert field in refusals({"type": f"jaxml.{cls}", field: value})


def test_a_wrong_item_of_a_tuple_is_named_by_its_index():
    value = to_json(TextClassification(labels=("ham", "spam"), class_weights=(1.0, 2.0)))
    value["class_weights"][1] = "two"
    value["labels"] = "ham"
    assert set(refusals(value)) == {"class_weights.1", "labels"}


def test_a_missing_field_without_a_default_is_named():
    assert set(refusals({"type": "jaxml.train.spec.TrainSpec"})) == {"steps", "batch_size"}


@pytest.fixture
def foreign(monkeypatch):
    """Plants modules with classes that must not be built, one inside jaxml's name space; lists what was built."""
    made = []

    class Mutable:
        def __init__(self, **_):
            made.append("Mutable")

    @dataclass(frozen=True)
    class FrozenButNoSpec:
        def __post_init__(self):
            made.append("FrozenButNoSpec")

    @dataclass(frozen=True)
    class OutsideSpec(Spec):
        def __post_init__(self):
            made.append("OutsideSpec")

    inside, outside = types.ModuleType("jaxml.planted"), types.ModuleType("planted")
    vars(inside).update(Mutable=Mutable, FrozenButNoSpec=FrozenButNoSpec, function=lambda **_: made.append("function"))
    vars(outside).update(OutsideSpec=OutsideSpec)
    monkeypatch.setitem(sys.modules, "jaxml.planted", inside)
    monkeypatch.setitem(sys.modules, "planted", outside)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "jaxml.planted.Mutable",
        "jaxml.planted.FrozenButNoSpec",
        "jaxml.planted.function",
        "jaxml.planted.Absent",
        "planted.OutsideSpec",
        "jaxmlx.planted.OutsideSpec",
        "os.system",
        "builtins.eval",
        "jaxml.errors.JaxmlError",
        "jaxml.errors.Fault",
        "jaxml.config.spec.Difference",
        "jaxml.config.spec.importlib",
        "jaxml.config.spec.diff",
        "jaxml.no.such.Module",
        "jaxml..Spec",
        "jaxml.train.spec.",
        "jaxml",
        "Spec",
        "",
        None,
        7,
        ["jaxml.train.spec.Lion"],
    ],
)
def test_only_a_frozen_spec_under_jaxml_is_built(foreign, name):
    fault = refusals({"type": name})["spec"]
    assert "a frozen Spec under jaxml" in fault.expected
    assert foreign == []


@pytest.mark.parametrize("value", [{}, {"b1": 0.9}])
def test_an_object_without_a_type_is_refused(value):
    assert "spec" in refusals(value)


@pytest.mark.parametrize("value", [5, "jaxml.models.spec.MlpSpec", [], {}, None, True])
def test_what_is_not_a_tagged_object_is_refused_in_the_place_of_a_spec(value):
    whole = to_json(decoder())
    whole["blocks"][0]["mlp"] = value
    assert set(refusals(whole)) == {"blocks.0.mlp"}


def test_a_nested_class_outside_jaxml_is_refused_where_it_stands(foreign):
    value = to_json(OptimizerSpec())
    value["rule"]["type"] = "planted.OutsideSpec"
    assert set(refusals(value)) == {"rule"}
    assert foreign == []


# Aliases


def test_a_moved_class_opens_under_its_old_name_and_is_written_under_the_new_one(monkeypatch):
    monkeypatch.setitem(spec_module.ALIASES, "jaxml.old.place.Sign", "jaxml.train.spec.Lion")
    read = from_json({"type": "jaxml.old.place.Sign", "b1": 0.5})
    assert read == Lion(b1=0.5)
    assert to_json(read)["type"] == "jaxml.train.spec.Lion"


def test_an_alias_cannot_point_outside_jaxml(monkeypatch, foreign):
    monkeypatch.setitem(spec_module.ALIASES, "jaxml.old.place.Sign", "planted.OutsideSpec")
    refusals({"type": "jaxml.old.place.Sign"})
    assert foreign == []


def test_every_alias_opens():
    for old, new in spec_module.ALIASES.items():
        assert old != new
        assert issubclass(spec_module._resolve(old), Spec)


# Known not to hold yet


def test_equal_specs_have_equal_digests_also_when_a_float_was_given_as_an_int():
    assert digest(ScheduleSpec(final_ratio=0)) == digest(ScheduleSpec(final_ratio=0.0))


def test_a_subclass_of_a_spec_that_is_not_a_frozen_dataclass_itself_is_refused(monkeypatch):
    class Undecorated(NormSpec):
        pass

    planted = types.ModuleType("jaxml.planted")
    vars(planted).update(Undecorated=Undecorated)
    monkeypatch.setitem(sys.modules, "jaxml.planted", planted)
    refusals({"type": "jaxml.planted.Undecorated"})
