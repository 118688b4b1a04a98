"""Directories that Hugging Face's tools write: config.json and safetensors, one file or shards with an index.

Reads `models.families.tensors` and `errors`; the gateway to safetensors. `checkpoint.hf_tokenizer` reads the tokenizer of
the same directory, `recipes.importing` both. Nothing is executed: pickles are refused, and an index can name files of its
own directory only.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import safetensors

from jaxml.errors import CheckpointError, Fault, Faults
from jaxml.models.families.tensors import PublishedTensor

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of one tensor. `dtype` is its NumPy name, or the file's own name of another kind."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class PublishedWeights:
    """The tensors of a directory: `headers` of all of them at once, values when they are asked for.

    A context manager, because it keeps the files mapped. Of a single file and an index the single file is taken, as
    transformers does. Raises CheckpointError with every fault: no weights, pickles only, a shard that is missing, damaged
    or outside the directory, a tensor that is not in the shard the index names.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.headers: dict[str, Header] = {}
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> PublishedWeights:
        with self._open:  # what was opened is closed again, unless all of it could be
            self._read_headers()
            self._open = self._open.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.clear()
        self._open.close()

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor, a copy in its own dtype. Raises CheckpointError when they cannot be read."""
        file = self.headers[name].file
        try:
            return self._files[file].get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError.from_faults([_unreadable(self.directory / file, error)]) from error

    def _read_headers(self) -> None:
        if (self.directory / SINGLE_FILE).exists():
            self._open_file(SINGLE_FILE)
            return
        faults = Faults(CheckpointError)
        index = self._read_index()
        for file in sorted(set(index.values())):
            try:
                self._open_file(file)
            except CheckpointError as error:
                faults.found.extend(error.faults)
        faults.raise_if_any()
        for name in sorted(set(index) | set(self.headers)):
            held = self.headers[name].file if name in self.headers else "in no shard"
            if index.get(name) != held:
                expected = f"in {index[name]}, as {INDEX_FILE} says" if name in index else f"a place in {INDEX_FILE}"
                faults.add(f"tensor {name}", expected=expected, got=held, todo="download the directory again, whole")
        faults.raise_if_any()

    def _read_index(self) -> dict[str, str]:
        """Tensor name to file name, each a plain name in this directory."""
        if not (self.directory / INDEX_FILE).exists():
            raise CheckpointError.from_faults([_no_weights(self.directory)])
        index = read_json_object(self.directory / INDEX_FILE).get("weight_map")
        if not isinstance(index, dict) or not index:
            got = "nothing" if index is None else repr(index)[:60]
            todo = "download the directory again"
            raise CheckpointError(f"{INDEX_FILE}: weight_map", expected="tensor to file name", got=got, todo=todo)
        faults = Faults(CheckpointError)
        for file in sorted({str(file) for file in index.values()}):
            if not SHARD_NAME.fullmatch(file):
                faults.add(
                    f"{INDEX_FILE}: weight_map",
                    expected="names of .safetensors files in the same directory",
                    got=repr(file)[:80],
                    todo="do not use this directory: its index points out of it, or at another kind of file",
                )
            elif not (self.directory / file).is_file():
                got = "a missing file"
                faults.add(f"shard {file}", expected=f"the file that {INDEX_FILE} names", got=got, todo="download it")
        faults.raise_if_any()
        return {str(name): str(file) for name, file in index.items()}

    def _open_file(self, name: str) -> None:
        try:
            file = self._open.enter_context(safetensors.safe_open(self.directory / name, framework="numpy"))
            for tensor in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(tensor)
                dtype = part.get_dtype()
                self.headers[tensor] = Header(name, tuple(part.get_shape()), DTYPES.get(dtype, dtype))
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError.from_faults([_unreadable(self.directory / name, error)]) from error
        self._files[name] = file


def read_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of a directory. Raises CheckpointError when there is none, or it is no JSON object."""
    folder = Path(directory)
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        todo = "name the directory that holds config.json and the .safetensors files"
        raise CheckpointError(f"model directory {directory}", expected="a directory", got=got, todo=todo)
    return read_json_object(folder / CONFIG_FILE)


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError that names the file."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"[:200]
        todo = "download the directory again, whole"
        raise CheckpointError(str(file), expected="a JSON file", got=got, todo=todo) from error
    if not isinstance(value, dict):
        todo = "download the directory again, whole"
        raise CheckpointError(str(file), expected="a JSON object", got=repr(value)[:60], todo=todo)
    return value


def check_tensors(
    headers: Mapping[str, Header],
    expected: Sequence[PublishedTensor],
    unused: re.Pattern[str],
    tied: Mapping[str, str],
) -> tuple[str, ...]:
    """The names of tensors that are there and not needed: those that match `unused`, and second copies (`tied`).

    Reads no values. Raises CheckpointError naming every tensor that is missing, unexpected, or has another shape or a
    dtype that is not float32, float16 or bfloat16.
    """
    faults = Faults(CheckpointError)
    todo = "take the directory of a model that its config.json describes"
    for tensor in expected:
        header = headers.get(tensor.name)
        if header is None:
            faults.add(f"tensor {tensor.name}", expected=str(list(tensor.shape)), got="no such tensor", todo=todo)
        elif header.shape != tensor.shape:
            shapes = {"expected": str(list(tensor.shape)), "got": str(list(header.shape))}
            faults.add(f"shape of tensor {tensor.name}", **shapes, todo=todo)
    needed = {tensor.name for tensor in expected}
    spare = []
    for name in sorted(set(headers) - needed):
        if unused.fullmatch(name) or (tied.get(name) in needed):
            spare.append(name)
        else:
            got = f"{headers[name].dtype}{list(headers[name].shape)} in {headers[name].file}"
            faults.add(f"tensor {name}", expected="no such tensor in this model", got=got, todo=todo)
    for name in sorted(needed & set(headers)):
        if headers[name].dtype not in DTYPES.values():
            todo = "take the unquantised model"
            wanted = " or ".join(DTYPES.values())
            faults.add(f"dtype of tensor {name}", expected=wanted, got=headers[name].dtype, todo=todo)
    faults.raise_if_any()
    return tuple(spare)


def _no_weights(directory: Path) -> Fault:
    names = sorted(entry.name for entry in directory.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        todo = "convert them to safetensors with the tool that wrote them, in a place where running their code is safe"
        return Fault(f"weights in {directory}", ".safetensors files", f"pickles, which are code: {pickles}", todo)
    got = f"other files: {', '.join(names[:6])}"
    todo = "name the directory that holds the .safetensors files"
    return Fault(f"weights in {directory}", f"{SINGLE_FILE}, or {INDEX_FILE} and its shards", got, todo)


def _unreadable(file: Path, error: Exception) -> Fault:
    got = f"{type(error).__name__}: {error}"[:200]
    return Fault(str(file), "a whole safetensors file", got, "download it again")
