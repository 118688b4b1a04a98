"""Laws of the store: what is saved comes back bit for bit, on any mesh; what is not complete is never chosen."""

from __future__ import annotations

import ast
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxml import trees
from jaxml.checkpoint import store as store_module
from jaxml.checkpoint.params import load_params
from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.checkpoint.store import CheckpointStore
from jaxml.config.spec import from_json
from jaxml.errors import CheckpointError
from tests.checkpoint import tiny
from tests.checkpoint.tiny import abstract, manifest_of, parts_of

DTYPES = (np.float32, ml_dtypes.bfloat16, np.int32, np.float64, np.bool_, np.uint8)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def store(directory: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(directory) as opened:
        yield opened


def save(store: CheckpointStore, step: int, parts: dict[str, Any] | None = None, **fields: Any) -> None:
    parts = parts_of(step) if parts is None else parts
    store.save(step, parts, manifest_of(step, parts, **fields))
    store.wait()


def mesh_of(rows: int, columns: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: rows * columns]
    return jax.make_mesh((rows, columns), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)


@st.composite
def arrays(draw: Any) -> np.ndarray:
    """Any bits: NaN payloads, infinities, subnormals and negative zeros too."""
    dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return (raw % 2).astype(bool).reshape(shape) if dtype.kind == "b" else raw.view(dtype).reshape(shape)


@settings(max_examples=8, deadline=None)
@given(leaves=st.lists(arrays(), min_size=1, max_size=12))
def test_save_then_restore_is_the_identity_for_any_bits(leaves: list[np.ndarray]) -> None:
    parts = {"params": {f"block{i % 3}": {} for i in range(len(leaves))}, "opt_state": (leaves[0], [leaves[-1]])}
    for i, leaf in enumerate(leaves):
        parts["params"][f"block{i % 3}"][f"kernel{i}"] = leaf
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
        whole = NamedSharding(mesh_of(2, 2), PartitionSpec())
        placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), parts)
        with CheckpointStore(folder) as store:
            save(store, 1, jax.tree.map(jnp.asarray, parts))
            for target in (abstract(parts), placed):
                restored = store.restore(1, target)
                assert jax.tree.structure(restored) == jax.tree.structure(parts)
                assert trees.compare(parts, restored) == []
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


@pytest.mark.parametrize("is_one_process", [True, False])
def test_donating_the_arrays_right_after_save_does_not_change_what_is_saved(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, is_one_process: bool
) -> None:
    monkeypatch.setattr(store_module, "_is_one_process", lambda: is_one_process)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    one = jnp.arange(1 << 18, dtype=jnp.float32)
    rows = jax.device_put(one.reshape(8, -1), NamedSharding(mesh_of(2, 4), PartitionSpec(("data", "fsdp"))))
    expected = {"params": {"one": np.array(one), "rows": np.array(rows)}}
    parts = {"params": {"one": one, "rows": rows}}
    jax.block_until_ready((overwrite(jnp.copy(one)), overwrite(jnp.copy(rows))))
    store.save(1, parts, manifest_of(1, parts))
    for _ in range(3):
        one, rows = overwrite(one), overwrite(rows)
    jax.block_until_ready((one, rows))
    store.wait()
    is_donated = all(leaf.is_deleted() for leaf in jax.tree.leaves(parts))
    assert is_donated or not is_one_process, "a view that is held makes XLA copy instead of donate"
    assert trees.compare(expected, store.restore(1, abstract(expected))) == []


def test_a_checkpoint_written_on_eight_devices_opens_on_one_on_another_mesh_and_without_devices(
    store: CheckpointStore, directory: Path
) -> None:
    table = np.arange(64, dtype=np.float32).reshape(8, 8)
    written = {"params": {"w": jax.device_put(table, NamedSharding(mesh_of(2, 4), PartitionSpec("data", "fsdp")))}}
    save(store, 1, written)
    other = NamedSharding(mesh_of(4, 1), PartitionSpec(None, "data"))
    for sharding in (jax.sharding.SingleDeviceSharding(jax.devices()[3]), other):
        target = {"params": {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)}}
        restored = store.restore(1, target)["params"]["w"]
        assert restored.sharding == sharding
        np.testing.assert_array_equal(restored, table)
    params, _ = load_params(directory)
    assert isinstance(params["w"], np.ndarray)
    np.testing.assert_array_equal(params["w"], table)
    params, _ = load_params(directory, mesh_of(1, 8), logical_axes={"w": ("embed", "mlp")})
    assert params["w"].sharding.spec == PartitionSpec("fsdp")
    np.testing.assert_array_equal(params["w"], table)


def test_parts_are_restored_alone_and_averaged_parameters_are_preferred(
    store: CheckpointStore, directory: Path
) -> None:
    parts = {**parts_of(3), "ema": parts_of(4)["params"]}
    save(store, 3, parts)
    for name in parts:
        assert trees.compare({name: parts[name]}, store.restore(3, abstract({name: parts[name]}))) == []
    assert trees.compare(parts["ema"], load_params(directory)[0]) == []
    assert trees.compare(parts["params"], load_params(directory, part="params")[0]) == []


def test_optimizer_states_keep_their_structure_and_may_hold_no_array(store: CheckpointStore) -> None:
    params = parts_of()["params"]
    rules = {"adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), "sgd": optax.sgd(0.1)}
    for step, rule in enumerate(rules.values(), 1):
        parts = {"params": params, "opt_state": rule.init(params)}
        save(store, step, parts)
        restored = store.restore(step, abstract(parts))
        assert jax.tree.structure(restored) == jax.tree.structure(parts)
        assert trees.compare(parts, restored) == []


def test_the_newest_every_nth_and_the_best_are_kept_across_a_restart(directory: Path) -> None:
    spec = CheckpointSpec(keep_last=2, keep_every=4, keep_best=1, best_metric="eval_loss")
    losses = {1: 5.0, 2: 0.5, 3: 4.0, 4: float("nan"), 5: 3.0, 6: 2.0, 7: 0.9}
    for step in (1, 2, 3):
        with CheckpointStore(directory, spec) as store:
            save(store, step, metrics={"eval_loss": losses[step]})
    with CheckpointStore(directory, spec) as store:
        for step in (4, 5, 6, 7):
            save(store, step, metrics={"eval_loss": losses[step]})
        assert store.steps() == [2, 4, 6, 7]
        assert store.latest_step() == 7
        assert np.isnan(store.manifest(4).metrics["eval_loss"])


@pytest.mark.parametrize(
    ("metric", "mode", "kept"), [("eval_loss", "min", [2, 4]), ("eval_loss", "max", [1, 4]), ("accuracy", "min", [4])]
)
def test_the_best_by_its_metric_is_kept_and_nothing_is_best_without_one(
    directory: Path, metric: str, mode: Any, kept: list[int]
) -> None:
    spec = CheckpointSpec(keep_last=1, keep_best=1, best_metric=metric, best_mode=mode)
    with CheckpointStore(directory, spec) as store:
        for step, loss in ((1, 5.0), (2, 0.5), (3, float("inf")), (4, 4.0)):
            save(store, step, metrics={"eval_loss": loss})
        assert store.steps() == kept


@pytest.mark.parametrize("is_one_process", [True, False])
def test_a_full_disk_is_raised_at_the_next_check_and_the_previous_checkpoint_stays(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, is_one_process: bool
) -> None:
    monkeypatch.setattr(store_module, "_is_one_process", lambda: is_one_process)
    resource = pytest.importorskip("resource", reason="file size limits exist on POSIX only")
    save(store, 1)
    noise = {"params": {"w": np.random.default_rng(0).normal(size=1 << 17).astype(np.float32)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for surface in (store.check, store.wait, lambda: save(store, 3)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            store.save(2, noise, manifest_of(2, noise))
            store._pending[1].exception()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.steps() == [1]
        with pytest.raises(CheckpointError, match=r"checkpoint of step 2(?s:.)*to do: .* resume"):
            surface()
        store.check()
        assert store.steps() == [1]
    assert trees.compare(parts_of(1), store.restore(1, abstract(parts_of(1)))) == []
    save(store, 2, noise)
    assert store.steps() == [1, 2]
    assert sorted(entry.name for entry in store.directory.iterdir()) == ["1", "2"]


def test_check_neither_waits_for_a_save_nor_forgets_its_failure(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def write(*_: object) -> None:
        go_on.wait(10)
        raise OSError("no space left")

    monkeypatch.setattr(store, "_write", write)
    store.save(1, parts_of(), manifest_of(1, parts_of()))
    store.check()
    go_on.set()
    store._pending[1].exception()
    with pytest.raises(CheckpointError, match="no space left"):
        store.check()
    store.check()


def test_an_unfinished_save_is_never_chosen_and_the_next_save_removes_it(
    store: CheckpointStore, directory: Path
) -> None:
    save(store, 1)
    shutil.copytree(directory / "1", directory / "5.orbax-checkpoint-tmp")
    with CheckpointStore(directory) as reader:
        assert reader.steps() == [1]
        assert (directory / "5.orbax-checkpoint-tmp").exists(), "a reader must not disturb a writer"
    with CheckpointStore(directory) as writer:
        save(writer, 2)
    assert sorted(entry.name for entry in directory.iterdir()) == ["1", "2"]


def test_a_damaged_folder_is_replaced_when_its_step_is_saved_again(directory: Path) -> None:
    with CheckpointStore(directory) as store:
        save(store, 1)
        (directory / "2").mkdir()
        assert store.steps() == [1]
        assert list(store.damaged()) == [2]
    with CheckpointStore(directory) as store:
        save(store, 2)
        assert store.steps() == [1, 2]
        shutil.rmtree(directory / "2" / "params")
        save(store, 2)
        assert store.steps() == [1, 2]
    assert sorted(entry.name for entry in directory.iterdir()) == ["1", "2", "damaged-2", "damaged-2.2"]


def no_rights(step: Path) -> None:
    """A manifest that gives an OSError other than that it is not there; root may read any file, so it is a folder."""
    (step / "manifest" / "metadata").unlink()
    (step / "manifest" / "metadata").mkdir()


def newer_format(step: Path) -> None:
    file = step / "manifest" / "metadata"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))


def wrong_seal(step: Path) -> None:
    file = step / "manifest" / "metadata"
    file.write_text(file.read_text().replace('"seed": 7', '"seed": 8'))


UNREADABLE = pytest.mark.parametrize("hide", [no_rights, newer_format, wrong_seal])


@UNREADABLE
def test_a_run_is_not_begun_anew_over_a_checkpoint_that_cannot_be_read(
    store: CheckpointStore, directory: Path, hide: Callable[[Path], None]
) -> None:
    save(store, 2)
    hide(directory / "2")
    (directory / "1").mkdir()
    for read in (store.latest_step, store.steps):
        with pytest.raises(CheckpointError, match=r"only unreadable ones, of step 2(?s:.)*to do: "):
            read()
    assert list(store.damaged()) == [1, 2]
    before = {file: file.read_bytes() for file in (directory / "2").rglob("*") if file.is_file()}
    for step in (1, 2, 3):
        with CheckpointStore(directory) as writer, pytest.raises(CheckpointError, match="only unreadable ones"):
            save(writer, step)
    assert {file: file.read_bytes() for file in (directory / "2").rglob("*") if file.is_file()} == before
    assert sorted(entry.name for entry in directory.iterdir()) == ["1", "2"]


@UNREADABLE
@pytest.mark.parametrize("discards", [False, True])
def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_never_removed(
    directory: Path, hide: Callable[[Path], None], discards: bool
) -> None:
    spec = CheckpointSpec(keep_last=2)
    with CheckpointStore(directory, spec) as store:
        save(store, 1)
        save(store, 2)
    hide(directory / "2")
    before = {file.name: file.read_bytes() for file in (directory / "2").rglob("*") if file.is_file()}
    with CheckpointStore(directory, spec) as store:
        assert store.latest_step() == 1
        if discards:
            assert store.discard_after(1) == [2]
        save(store, 2)
        save(store, 3)
        assert store.steps() == [2, 3]
    kept = directory / "unreadable-2"
    assert {file.name: file.read_bytes() for file in kept.rglob("*") if file.is_file()} == before


def test_one_that_cannot_be_read_any_more_is_not_discarded(directory: Path) -> None:
    with CheckpointStore(directory, CheckpointSpec(keep_last=3)) as store:
        for step in (1, 2, 3):
            save(store, step)
        newer_format(directory / "2")
        assert store.discard_after(1) == [2, 3]
    assert sorted(entry.name for entry in directory.iterdir()) == ["1", "unreadable-2"]


def test_retention_counts_complete_checkpoints_only(directory: Path) -> None:
    with CheckpointStore(directory, CheckpointSpec(keep_last=3)) as store:
        for step in (10, 20, 60):
            save(store, step)
    shutil.rmtree(directory / "60" / "params")
    (directory / "50").mkdir()
    with CheckpointStore(directory, CheckpointSpec(keep_last=2)) as store:
        save(store, 30)
        assert store.steps() == [20, 30]
        assert not store.damaged()
    assert sorted(entry.name for entry in directory.iterdir()) == ["20", "30", "damaged-50", "damaged-60"]


def test_truncated_arrays_are_refused_with_the_folder_and_what_to_take_instead(
    store: CheckpointStore, directory: Path
) -> None:
    save(store, 1)
    save(store, 2)
    for file in (directory / "2" / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:8])
    with pytest.raises(CheckpointError, match=r"reading params of .*/2(?s:.)*earlier step \(1\)"):
        store.restore(2, abstract({"params": parts_of(2)["params"]}))


def test_every_leaf_that_differs_is_named_before_any_array_is_read(store: CheckpointStore, directory: Path) -> None:
    save(store, 1)
    shutil.rmtree(directory / "1" / "params" / "d")
    struct = jax.ShapeDtypeStruct
    wrong = {"params": {"embed": {"table": struct((4, 2), np.float32)}, "head": struct((2,), np.int32)}}
    wrong["opt_state"] = (struct((), np.float32), {"mu": struct((2,), np.float32)})
    with pytest.raises(CheckpointError) as caught:
        store.restore(1, {**wrong, "ema": {}})
    assert [(f.failed, f.expected, f.got) for f in caught.value.faults] == [
        ("leaf params.embed.table", "float32[4,2]", "float32[3,2]"),
        ("leaf params.head", "int32[2]", "no such leaf"),
        ("leaf opt_state.0", "float32[]", "int32[]"),
        ("part of step 1", "one of params, opt_state", "ema, not stored"),
    ]


def test_a_manifest_that_does_not_describe_the_parts_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="4 faults"):
        store.save(1, parts_of(), manifest_of(2, {"params": {"embed": np.zeros(3)}}))
    with pytest.raises(CheckpointError, match="key"):
        store.save(1, {"params": {"key": jax.random.key(0)}}, manifest_of(1, {}))
    assert not store.directory.exists()


def test_a_step_is_saved_once_and_another_course_of_the_run_must_discard_first(store: CheckpointStore) -> None:
    for step in (1, 2):
        save(store, step)
    save(store, 2, lineage=({"started": "again"},))
    assert store.manifest(2).lineage == ()
    with pytest.raises(CheckpointError, match="another skipped_steps"):
        save(store, 2, skipped_steps=(1,))
    assert store.discard_after(1) == [2]
    save(store, 2, skipped_steps=(1,))
    assert store.steps() == [1, 2]
    assert store.manifest(2).skipped_steps == (1,)


def test_saving_says_nothing_and_errors_of_orbax_are_still_heard(
    store: CheckpointStore, capfd: pytest.CaptureFixture[str]
) -> None:
    save(store, 1)
    store.restore(1, abstract(parts_of(1)))
    assert capfd.readouterr() == ("", "")
    record = logging.LogRecord("absl", logging.ERROR, "/orbax/checkpoint/x.py", 1, "lost", None, None)
    assert logging.getLogger("absl").filter(record)


def test_the_checkpoint_of_format_1_opens() -> None:
    folder = Path(__file__).parent / "format_1"
    params, manifest = load_params(folder)
    assert manifest.format == 1
    assert from_json(manifest.experiment) == tiny.format_1_experiment()
    assert manifest.skipped_steps == (2,)
    assert trees.compare(tiny.format_1_parts()["ema"], params) == []
    parts = tiny.format_1_parts()
    with CheckpointStore(folder) as store:
        assert trees.compare(parts, store.restore(3, abstract(parts))) == []


def test_manifests_probes_and_an_unused_store_import_no_orbax() -> None:
    program = "import sys, jaxml.checkpoint.manifest; assert not {'jax', 'orbax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    for file in Path(store_module.__file__).parent.glob("*.py"):
        at_import = {name.partition(".")[0] for name in module_level_imports(ast.parse(file.read_text()))}
        assert not {"orbax", "flax", "optax", "grain"} & at_import, file.name
        assert ("import orbax" in file.read_text()) == (file.name == "store.py")


def module_level_imports(tree: ast.Module) -> Iterator[str]:
    """What a module imports when it is imported; names under `if TYPE_CHECKING` and in functions are not."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
