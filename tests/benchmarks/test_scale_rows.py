"""Laws of the rows about scale: what is read from a compiled program, what is the least, which rows follow from samples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import scale_rows
from benchmarks.collectives import Moved, group_size, moved, sent_bytes, smallest
from benchmarks.plan import Plan
from benchmarks.run import parse
from benchmarks.scale_rows import moved_rows
from benchmarks.scale_step import axis, model
from benchmarks.verbs import SCALE_AIMS, VERBS

LOOP = """\
HloModule jit_f

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %gathered = f32[32]{0} all-gather(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %y)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[] {
  %loop = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %total = f32[] all-reduce(%s), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_a_loop_counts_as_often_as_it_turns():
    assert moved(LOOP) == {"all-gather": Moved(6, 6 * 3 / 4 * 128), "all-reduce": Moved(1, 2 * 3 / 4 * 4)}


def test_a_collective_in_a_loop_of_unknown_length_is_not_guessed():
    with pytest.raises(ValueError, match="unknown length"):
        moved(LOOP.replace('"known_trip_count":{"n":"6"}', ""))


def test_each_kind_sends_its_share_round_the_ring():
    groups = "replica_groups=[2,4]<=[8]"
    assert sent_bytes(f"%x = f32[16] all-gather(%y), {groups}", "f32[16]{0}", "all-gather") == 48
    assert sent_bytes(f"%x = bf16[16] all-reduce(%y), {groups}", "bf16[16]{0}", "all-reduce") == 48
    assert sent_bytes(f"%x = f32[4] reduce-scatter(%y), {groups}", "f32[4]{0}", "reduce-scatter") == 48
    assert (
        sent_bytes("%x = f32[4] collective-permute(%y), source_target_pairs={{0,1}}", "f32[4]", "collective-permute")
        == 16
    )
    both = "(f32[4]{0}, s32[2]{0})"
    assert sent_bytes(f"%x = {both} all-reduce(%y, %z), {groups}", both, "all-reduce") == 2 * 3 / 4 * 24


def test_an_asynchronous_collective_is_counted_once_by_its_result():
    shape = "(f32[4]{0}, f32[16]{0})"
    line = f"%x = {shape} all-gather-start(%y), replica_groups=[2,4]<=[8]"
    assert sent_bytes(line, shape, "all-gather") == 48
    text = f"ENTRY %main (a: f32[4]) -> f32[16] {{\n  {line}\n  %z = f32[16] all-gather-done(%x)\n}}"
    assert moved(text) == {"all-gather": Moved(1, 48.0)}


def test_groups_are_read_in_every_form():
    assert group_size("replica_groups=[4,2]<=[2,4]T(1,0)") == 2
    assert group_size("replica_groups=mesh['a'=2,'b'=4,'c'=1] {'a','b'}, use_global_device_ids=true") == 8


def test_a_real_program_with_a_scan_is_read():
    """Four devices; a sum over all of them in each of five turns."""
    mesh = Mesh(jax.devices()[:4], ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))

    def turn(total, _):
        return total + jnp.sin(total) * jnp.sum(total), None

    compiled = jax.jit(lambda x: jax.lax.scan(turn, x, length=5)[0], in_shardings=split, out_shardings=split)
    text = compiled.lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile().as_text()
    assert moved(text) == {"all-reduce": Moved(5, 5 * 2 * 3 / 4 * 4)}


def test_the_least_grows_with_what_each_axis_has_to_send():
    spec = model(layers=4, width=128, context=256)
    assert smallest(spec, 8, {"data": 1}) == 0
    data, fsdp, tensor, context = (smallest(spec, 8, {name: 4}) for name in scale_rows.AXES)
    assert data == fsdp
    assert smallest(spec, 16, {"data": 4}) == data, "gradients do not grow with the batch"
    assert smallest(spec, 16, {"tensor": 4}) == 2 * tensor, "activations do"
    assert smallest(spec, 16, {"context": 4}) - data == 2 * (context - data)
    with pytest.raises(ValueError, match="one axis"):
        smallest(spec, 8, {"data": 2, "fsdp": 2})


def test_rows_name_kinds_that_matter_and_their_sum_over_the_least():
    sample = {"moved_bytes": {"all-reduce": 3e6, "all-gather": 1e6, "all-to-all": 10.0}, "smallest_bytes": 2e6}
    rows = {row.name: row.value for row in moved_rows("data=4", sample)}
    assert rows == {
        "sent by all-gather, data=4": 1.0,
        "sent by all-reduce, data=4": 3.0,
        "sent, data=4": pytest.approx(4.00001),
        "sent / least, data=4": pytest.approx(2.000005),
    }


def test_overheads_are_taken_round_by_round_and_every_aim_and_bar_has_its_row(tmp_path, monkeypatch):
    samples = {
        "step_s": 0.2,
        "compile_s": 3.0,
        "ratio": 1.01,
        "moved_bytes": {"all-reduce": 1e6},
        "smallest_bytes": 1e6,
    }
    monkeypatch.setattr(scale_rows, "script", lambda *_: lambda: samples)
    monkeypatch.setattr(scale_rows.importlib.util, "find_spec", lambda name: object())
    plan = Plan(tmp_path, repeats=2, is_quick=False)
    rows = {row.name: row for section in scale_rows.SECTIONS.values() for row in section(plan)}
    assert rows["time / one device, fsdp=4"].values == (1.0, 1.0)
    assert rows["digests, share of the step"].value == pytest.approx(0.01)
    assert set(SCALE_AIMS) <= set(rows)
    assert {name for names in VERBS["scale"].panels.values() for name in names} <= set(rows)
    assert len(VERBS["scale"].panels) == 4


def test_float8_is_left_out_with_the_reason_where_its_package_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(scale_rows, "script", lambda *_: lambda: {"ratio": 1.0})
    monkeypatch.setattr(scale_rows.importlib.util, "find_spec", lambda name: None)
    plan = Plan(tmp_path, repeats=1, is_quick=True)
    assert "step in float8 / float32" not in {row.name for row in scale_rows.precision(plan)}
    assert "Qwix" in plan.skipped["step in float8 / float32"]


def test_sections_and_axes_are_checked_when_they_are_named():
    assert parse(["scale", "--only", "digests,overhead"]).only == ["overhead", "digests"]
    assert axis("fsdp=4") == ("fsdp", 4)
    with pytest.raises(Exception, match="no axis of the mesh"):
        axis("pipeline=2")
