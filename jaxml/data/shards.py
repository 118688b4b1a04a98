"""Token shards: documents are appended to a temporary file, which gets its name when it is whole and on disk.

Reads `data.layout` and `data.files`; `data.prepare` writes through `ShardWriter`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import UInt32

from jaxml.data.files import put_in_place
from jaxml.data.layout import (
    DOCUMENT,
    FileRecord,
    ShardRecord,
    record,
    shard_documents_file,
    token_type,
    tokens_file,
)

NAMES_KEPT = 100


class ShardWriter:
    """Writes one shard. Leaving the `with` block without `finish` removes the temporary file."""

    def __init__(self, folder: Path, shard: int, first_position: int, vocab_size: int):
        self.folder, self.shard = folder, shard
        self.first_position = first_position
        self.num_tokens = 0
        self.max_id = -1
        self._type = token_type(vocab_size)
        self._documents: list[tuple[int, ...]] = []
        self._dropped: dict[str, int] = {}
        self._dropped_names: list[str] = []
        self._temporary = folder / f".{tokens_file(shard)}.tmp"
        self._file = self._temporary.open("wb")
        self._digest = hashlib.sha256()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._file.closed:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def append(
        self,
        ids: UInt32[np.ndarray, " T"],
        *,
        source: int,
        split: int,
        label: int,
        file: int,
        line: int,
        text_hash: int,
    ) -> None:
        """Add a document (its place and what is recorded of it: `data.layout.DOCUMENT`)."""
        content = ids.astype(self._type).tobytes()
        self._file.write(content)
        self._digest.update(content)
        position = self.first_position + self.num_tokens
        self._documents.append((position, len(ids), source, split, label, file, line, text_hash))
        self.num_tokens += len(ids)
        self.max_id = max(self.max_id, int(ids.max(initial=0)))

    def drop(self, source: int, place: str) -> None:
        """Count a document that has too few tokens to learn from, and keep its name (the first hundred of a shard)."""
        self._dropped[str(source)] = self._dropped.get(str(source), 0) + 1
        if len(self._dropped_names) < NAMES_KEPT:
            self._dropped_names.append(place)

    @property
    def is_empty(self) -> bool:
        return not self._documents and not self._dropped

    def finish(self, next_document: tuple[int, int, int]) -> ShardRecord:
        """Sync the shard, give it its name, and write its document table."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        file = self.folder / tokens_file(self.shard)
        put_in_place(self._temporary, file)
        tokens = FileRecord(file.name, file.stat().st_size, self._digest.hexdigest())
        documents = self.folder / shard_documents_file(self.shard)
        write_array(documents, np.array(self._documents, DOCUMENT))
        return ShardRecord(
            tokens,
            record(documents),
            self.num_tokens,
            self.max_id,
            next_document,
            self._dropped,
            tuple(self._dropped_names),
        )


def write_array(file: Path, array: np.ndarray) -> None:
    """Write an .npy file atomically."""
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)
        stream.flush()
        os.fsync(stream.fileno())
    put_in_place(temporary, file)
