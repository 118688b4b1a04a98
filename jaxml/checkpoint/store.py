"""Saves and restores sealed checkpoints: the gateway to Orbax, and the only file that imports it.

Reads `checkpoint.folders`, `checkpoint.leaves`, `checkpoint.manifest`, `checkpoint.spec`, `trees`; recipes,
`checkpoint.compare` and `checkpoint.params` read it.

A store is a directory, local or an object-store URL, of one folder a step; Orbax writes each under a temporary name and
renames it (on object stores: marks it) when complete. `save` copies the state to host memory and returns: the caller
may donate its arrays at once, while one worker thread writes. Old checkpoints are renamed into a trash folder before
they are removed, so a kill never leaves half a checkpoint under a step's name. A folder that is not a complete
checkpoint is renamed when a writer begins, so that retention, which Orbax does, counts complete ones only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import multihost_utils

from jaxml import trees
from jaxml.checkpoint.folders import (
    MANIFEST,
    TOKENIZER,
    UNFINISHED,
    complete_steps,
    damage,
    find_checkpoint,
    read_manifest,
    resolve,
    set_aside,
    step_folders,
)
from jaxml.checkpoint.leaves import describe_leaves, restore_target, to_host
from jaxml.checkpoint.manifest import Manifest, leaf_faults
from jaxml.checkpoint.spec import CheckpointSpec
from jaxml.errors import CheckpointError, Fault, Faults

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

__all__ = ["CheckpointStore", "describe_leaves", "find_checkpoint"]

TRASH = "deleted"
# Larger leaves are written in pieces, so that a device that holds a shard does not read the whole leaf.
CHUNK_BYTES = 64 * 2**20
# What Orbax and TensorStore raise on damaged, missing or unwritable files.
STORAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class CheckpointStore:
    """The checkpoints of one run. One writer at a time; any number of readers. Not for several threads.

    `directory`: a local path or a URL that Orbax accepts (gs://, s3://). Nothing is created before the first save.
    """

    def __init__(self, directory: str | os.PathLike[str], spec: CheckpointSpec = CheckpointSpec()):
        self.directory = resolve(directory)
        self.spec = spec
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxml-checkpoint")
        self._pending: tuple[int, Future[None]] | None = None
        self._manager: ocp.CheckpointManager | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self, step: int, parts: dict[str, Any], manifest: Manifest, tokenizer: Mapping[str, bytes] | None = None
    ) -> float:
        """Start saving; returns the seconds for which the caller was blocked.

        parts: name to pytree of arrays (no typed keys), copied before this returns, so they may be donated. tokenizer:
        its files (`Tokenizer.files()`), UTF-8 texts, so that a step's folder is all that serving needs. A step that is
        complete already, with the same data position, is left as it is. Raises CheckpointError when the save before
        failed (this one is then not begun), when the manifest does not describe the parts, or when the step
        exists from another course of the run (see `discard_after`).
        """
        begun = time.perf_counter()
        self.wait()
        self._check_parts(step, parts, manifest)
        if (self.directory / str(step)).exists() and step in self.steps():
            self._refuse_other_course(step, manifest)
            return time.perf_counter() - begun
        if _is_one_process():
            write = self._worker.submit(self._write, step, to_host(parts), manifest, tokenizer)
        else:  # No process can copy all of a state; Orbax copies each process's shards before its own save returns.
            write = self._write_together(step, parts, manifest, tokenizer)
        self._pending = (step, write)
        return time.perf_counter() - begun

    def check(self) -> None:
        """Raise CheckpointError if the save in the background failed; returns at once when it still runs."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Block until the save in the background is complete. Raises CheckpointError if it failed."""
        if self._pending is None:
            return
        step, write = self._pending
        error = write.exception()
        self._pending = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"saving the checkpoint of step {step} to {self.directory}",
                expected="a write that succeeds",
                got=f"{type(error).__name__}: {str(error).strip()[:400]}",
                todo="free or mend the disk, then resume: earlier checkpoints are as they were",
            ) from error

    def close(self) -> None:
        """Wait for the save in the background and free the worker. Raises CheckpointError if that save failed."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            if self._manager is not None:
                self._manager.close()
                self._manager = None

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints of later steps: a run that goes back must not meet them again. Returns those steps.

        Of those that are not complete, none is removed: they are renamed.
        """
        self.wait()
        later = [found for found in step_folders(self.directory) if found > step]
        _synchronise("jaxml-discard")
        if later:
            manager = self._open_manager()
            self._set_aside([found for found in later if found in manager.all_steps()])
            manager.reload()
            for found in manager.all_steps():
                if found > step:
                    manager.delete(found)
        self._sweep()
        return later

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, ascending. Others are left out (see `damaged`).

        Raises CheckpointError where none is complete and one cannot be read, which may be whole.
        """
        return complete_steps(self.directory)

    def damaged(self) -> dict[int, Fault]:
        """Folders that are named like a checkpoint and are not a complete one, with what is wrong."""
        found = {step: damage(self.directory, step) for step in step_folders(self.directory)}
        return {step: faults[0] for step, faults in found.items() if faults}

    def latest_step(self) -> int | None:
        """The newest complete step, or None where a run may begin at step 0. Raises CheckpointError like `steps`."""
        return max(self.steps(), default=None)

    def manifest(self, step: int) -> Manifest:
        """The sealed manifest of a complete step. Raises CheckpointError that says what is wrong with any other."""
        return read_manifest(self.directory, step)

    def restore(self, step: int, abstract_parts: dict[str, Any]) -> dict[str, Any]:
        """The named parts of a checkpoint, in the structure of the trees given; any subset of the parts, on any mesh.

        abstract_parts: name to tree of ShapeDtypeStruct. A leaf with a sharding becomes a jax.Array laid out so, one
        without becomes a NumPy array. Raises CheckpointError naming every leaf that differs from the stored ones in
        path, shape or dtype, before any array is read.
        """
        manifest = self.manifest(step)
        faults: list[Fault] = []
        for part, tree in abstract_parts.items():
            if part not in manifest.leaves:
                stored = f"one of {', '.join(manifest.leaves)}"
                faults.append(Fault(f"part of step {step}", stored, f"{part}, not stored", "ask for a stored one"))
            else:
                faults += leaf_faults(part, describe_leaves(tree), manifest.leaves[part])
        if faults:
            raise CheckpointError.from_faults(faults)
        folder = self.directory / str(step)
        try:
            return _read_parts(folder, abstract_parts)
        except STORAGE_ERRORS as error:
            raise CheckpointError(
                f"reading {', '.join(abstract_parts)} of {folder}",
                expected="the arrays that its manifest lists",
                got=f"{type(error).__name__}: {str(error).strip()[:400]}",
                todo=f"remove or move {folder} and take an earlier step ({self._others(step)})",
            ) from error

    def _others(self, step: int) -> str:
        return ", ".join(str(found) for found in self.steps() if found != step) or "there is none"

    def _check_parts(self, step: int, parts: dict[str, Any], manifest: Manifest) -> None:
        faults = Faults(CheckpointError)
        leaves = {part: describe_leaves(tree) for part, tree in parts.items()}
        todo = "make the manifest from the state that is saved"
        if manifest.step != step:
            faults.add("step of the manifest", expected=str(step), got=str(manifest.step), todo=todo)
        if sorted(manifest.leaves) != sorted(leaves) or {MANIFEST, TOKENIZER, "metrics"} & set(leaves):
            expected, got = (", ".join(sorted(names)) for names in (leaves, manifest.leaves))
            faults.add("parts of the manifest", expected=expected, got=got, todo=todo)
        for part in set(leaves) & set(manifest.leaves):
            faults.found += leaf_faults(part, leaves[part], manifest.leaves[part])
        faults.raise_if_any()

    def _refuse_other_course(self, step: int, manifest: Manifest) -> None:
        names = ("seed", "batch_size", "skipped_steps", "data_fingerprint", "tokenizer_fingerprint", "leaves")
        stored, wanted = self.manifest(step).to_json(), manifest.to_json()
        different = [name for name in names if stored[name] != wanted[name]]
        if different:
            raise CheckpointError(
                f"saving the checkpoint of step {step} to {self.directory}",
                expected="no checkpoint of that step yet, or one of the same course of the run",
                got=f"one with another {', '.join(different)}",
                todo=f"discard_after({step - 1}) when a run goes back, or save to another directory",
            )

    def _write(self, *save: Any) -> None:
        """All of a save, in the worker thread. A failure drops the manager: the next one cleans up what is left."""
        self._begin(*save)
        self._finish()

    def _write_together(self, *save: Any) -> Future[None]:
        try:
            self._begin(*save)
        except STORAGE_ERRORS as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        return self._worker.submit(self._finish)

    def _begin(
        self, step: int, parts: dict[str, Any], manifest: Manifest, tokenizer: Mapping[str, bytes] | None
    ) -> None:
        ocp = _orbax()
        items = {
            name: ocp.args.StandardSave(tree, save_args=_save_args(tree))
            for name, tree in ((name, trees.unflatten(trees.flatten(part))) for name, part in parts.items())
            if tree
        }
        metrics = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
        with self._dropped_on_failure() as manager:
            if step in manager.all_steps():  # It became damaged after the writer began: a complete one is not saved.
                self._set_aside([step])
                manager.reload()
            items[MANIFEST] = ocp.args.JsonSave(manifest.to_json())
            if tokenizer:
                items[TOKENIZER] = ocp.args.JsonSave({name: content.decode() for name, content in tokenizer.items()})
            manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def _finish(self) -> None:
        with self._dropped_on_failure() as manager:
            manager.wait_until_finished()
            self._sweep()

    @contextlib.contextmanager
    def _dropped_on_failure(self) -> Any:
        """The writing manager, forgotten on any way out but the good one (an interrupt too): what it remembers of the
        folders may then be wrong, and the next save makes a new one. The exception goes on."""
        manager = self._open_manager()
        self._manager = None
        yield manager
        self._manager = manager

    def _open_manager(self) -> ocp.CheckpointManager:
        """The writing manager. Making it removes unfinished folders and renames damaged ones, so readers never make one.

        Raises CheckpointError where `steps` does: nothing is written beside checkpoints that could not be read.
        """
        if self._manager is not None:
            return self._manager
        ocp = _orbax()
        keep, spec = ocp.checkpoint_managers, self.spec
        policies: list[Any] = [keep.LatestN(spec.keep_last)]
        if spec.keep_every:
            policies.append(keep.EveryNSteps(spec.keep_every))
        if spec.keep_best:
            best = keep.BestN(get_metric_fn=self._quality, n=spec.keep_best, keep_checkpoints_without_metrics=False)
            policies.append(best)
        complete = self.steps()
        self._sweep(unfinished=True)
        self._set_aside([step for step in step_folders(self.directory) if step not in complete])
        manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep.AnyPreservationPolicy(policies),
                best_fn=self._quality if spec.keep_best else None,  # Only with it does Orbax write metrics.
                best_mode="max",
                cleanup_tmp_directories=True,  # Where `_sweep` cannot tell by the name: gs://.
                todelete_subdir=TRASH,
                save_root_metadata=False,
                enable_async_checkpointing=not _is_one_process(),
            ),
        )
        self._manager = manager
        return manager

    def _set_aside(self, steps: list[int]) -> None:
        """Give the folders of these steps, where they are not complete, names that Orbax does not take for steps."""
        _synchronise("jaxml-set-aside")
        if jax.process_index() == 0:
            for step in steps:
                set_aside(self.directory, step)
        _synchronise("jaxml-was-set-aside")

    def _sweep(self, *, unfinished: bool = False) -> None:
        """Remove the trash, and on demand what saves that did not finish have left."""
        if jax.process_index() == 0 and self.directory.is_dir():
            for entry in self.directory.iterdir():
                if entry.name == TRASH or (unfinished and UNFINISHED in entry.name):
                    _remove(entry)

    def _quality(self, metrics: Any) -> float:
        """Higher is better; -inf for a checkpoint without the metric or with one that is not finite."""
        value = float(metrics.get(self.spec.best_metric, math.nan))
        if not math.isfinite(value):
            return -math.inf
        return value if self.spec.best_mode == "max" else -value


def _read_parts(folder: Any, abstract_parts: dict[str, Any]) -> dict[str, Any]:
    ocp = _orbax()
    targets = {
        part: {path: restore_target(leaf) for path, leaf in trees.flatten(tree).items()}
        for part, tree in abstract_parts.items()
    }
    items = {part: ocp.args.StandardRestore(trees.unflatten(flat)) for part, flat in targets.items() if flat}
    restored = {}
    if items:
        checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
        restored = dict(checkpointer.restore(folder, args=ocp.args.Composite(**items)).items())
        checkpointer.close()
    result = {}
    for part, tree in abstract_parts.items():
        flat = trees.flatten(restored.get(part, {}))
        result[part] = jax.tree.unflatten(jax.tree.structure(tree), [flat[path] for path in targets[part]])
    return result


def _remove(folder: Any) -> None:
    """Remove a folder; again when TensorStore's threads, which outlive a save that failed, still write into it."""
    for wait_s in (0.05, 0.2, 1.0):
        with contextlib.suppress(OSError):
            folder.rmtree()
            return
        time.sleep(wait_s)
    folder.rmtree()


def _save_args(tree: Any) -> Any:
    ocp = _orbax()
    return jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)


def _synchronise(name: str) -> None:
    """Wait until every process is here (`name` must be the same in all)."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _is_one_process() -> bool:
    return jax.process_count() == 1


def _orbax() -> ModuleType:
    """Orbax, imported at first use (0.3 s); its progress messages are dropped, its errors are not."""
    import orbax.checkpoint

    logger = logging.getLogger("absl")
    if _is_worth_saying not in logger.filters:
        logger.addFilter(_is_worth_saying)
    return orbax.checkpoint


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname
