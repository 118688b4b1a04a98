"""A manifest survives JSON, and its seal breaks with any change."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.checkpoint import manifest as manifest_module
from jaxml.checkpoint.manifest import Manifest, leaf_faults, verify
from jaxml.errors import CheckpointError
from tests.checkpoint.tiny import manifest_of, parts_of

NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def stored(manifest: Manifest) -> Any:
    return json.loads(json.dumps(manifest.to_json()))


@settings(max_examples=40, deadline=None)
@given(
    metrics=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    experiment=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    skipped=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
    labels=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    lineage=st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=2), max_size=2).map(tuple),
)
def test_a_manifest_read_from_its_json_is_the_manifest_that_was_written(
    metrics: dict, experiment: dict, skipped: tuple, labels: tuple, lineage: tuple
) -> None:
    written = manifest_of(
        5, parts_of(), metrics=metrics, experiment=experiment, skipped_steps=skipped, labels=labels, lineage=lineage
    )
    read = Manifest.from_json(stored(written))
    assert read == written
    assert read.seal == written.seal == stored(written)["seal"]


def test_metrics_and_probes_may_be_nan_or_infinite() -> None:
    metrics = {"loss": math.nan, "perplexity": math.inf, "accuracy": 0.5}
    read = Manifest.from_json(stored(manifest_of(1, parts_of(), metrics=metrics, probe={"top": [[-math.inf]]})))
    assert math.isnan(read.metrics.pop("loss"))
    assert read.metrics == {"perplexity": math.inf, "accuracy": 0.5}
    assert read.probe == {"top": [[-math.inf]]}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Manifest) if field.name != "format"])
def test_a_change_of_any_field_breaks_the_seal(name: str) -> None:
    value = stored(manifest_of(1, parts_of(), metrics={"loss": 1.0}))
    assert verify(value) == []
    value[name] = "changed"
    assert [fault.failed for fault in verify(value)] == ["seal of manifest"]


def test_missing_and_unknown_fields_of_a_sealed_manifest_are_named_together() -> None:
    body = {name: item for name, item in stored(manifest_of(1, parts_of())).items() if name not in ("seal", "seed")}
    body["colour"] = "red"
    with pytest.raises(CheckpointError, match=r"(?s)2 faults.*seed of manifest.*colour of manifest"):
        Manifest.from_json({**body, "seal": manifest_module._seal(body)})


def test_an_older_format_is_upgraded_after_its_own_seal_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {name: item for name, item in stored(manifest_of(4, parts_of())).items() if name != "seal"}
    old = {**body, "format": 0, "global_step": body["step"]}
    del old["step"]
    sealed = {**old, "seal": manifest_module._seal(old)}
    with pytest.raises(CheckpointError, match="one of 1"):
        Manifest.from_json(sealed)

    def upgrade(value: dict[str, Any]) -> dict[str, Any]:
        return {**{k: v for k, v in value.items() if k != "global_step"}, "format": 1, "step": value["global_step"]}

    monkeypatch.setitem(manifest_module.UPGRADES, 0, upgrade)
    assert Manifest.from_json(sealed) == manifest_of(4, parts_of())
    with pytest.raises(CheckpointError, match="seal"):
        Manifest.from_json({**sealed, "global_step": 9})


def test_leaf_faults_name_both_sides_of_every_difference() -> None:
    expected, got = {"a": [[2], "float32"], "b": [[], "int32"]}, {"a": [[2], "bfloat16"], "c": [[1, 2], "int32"]}
    assert [(f.failed, f.expected, f.got) for f in leaf_faults("params", expected, got)] == [
        ("leaf params.a", "float32[2]", "bfloat16[2]"),
        ("leaf params.b", "int32[]", "no such leaf"),
        ("leaf params.c", "no such leaf", "int32[1,2]"),
    ]
    assert leaf_faults("params", expected, {"a": [(2,), "float32"], "b": [(), "int32"]}) == []
