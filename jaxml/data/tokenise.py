"""Documents to token shards, as a stream: split, hashed, labelled, encoded in batches, checked, written.

Reads `data.sources`, `data.shards` and `inputs.tokenizers`; `data.prepare` drives it. Memory holds one batch of
documents.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from jaxml.config.spec import suggest
from jaxml.data.files import FileRef, sha256_of
from jaxml.data.layout import SPLITS, ShardRecord, State
from jaxml.data.shards import ShardWriter
from jaxml.data.sources import Document, place, read_documents
from jaxml.data.spec import DataSpec, source_names
from jaxml.errors import DataError
from jaxml.inputs.spec import CharTokenizerSpec
from jaxml.inputs.tokenizers import Tokenizer, encode_document

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
REPORT_TEXTS = 1000
TRAIN, HELD_OUT = (SPLITS.index(name) for name in ("train", "held_out"))


@dataclass(frozen=True)
class Progress:
    """Where `data prepare` is. `name`: the file, source or tokenizer, in `wait` the process that prepares there now; the
    counts are of this run (shards kept from before are not in them).
    """

    stage: Literal["wait", "hash", "tokenizer", "tokenise", "plan", "verify"]
    name: str
    documents: int = 0
    tokens: int = 0
    shards: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A document, or one side of the split of a lone one, ready to be encoded. `is_last`: nothing of its document
    follows.
    """

    document: Document
    text: str
    split: int
    text_hash: int
    is_last: bool


@dataclass(frozen=True)
class Work:
    """What is to be done: a checked spec, the files of each source, the class names, the tokenizer."""

    spec: DataSpec
    files: list[list[FileRef]]
    labels: tuple[str, ...]
    tokenizer: Tokenizer

    def place(self, source: int, part: Part) -> str:
        """How messages name a document."""
        document = part.document
        return place(self.spec.sources[source], self.files[source][document.file].name, document.line)


def minimum_tokens(labels: tuple[str, ...]) -> int:
    """A labelled document needs a token; in language modelling one needs an input and a target."""
    return 1 if labels else 2


def tokenizer_texts(
    spec: DataSpec, files: list[list[FileRef]], has_labels: bool, report: Callable[[Progress], None]
) -> Iterator[str]:
    """What a tokenizer is made from: the training texts; for characters the held-out ones too, which it must spell.

    What `report`, called for every thousandth, raises ends the training.
    """
    name = type(spec.tokenizer).__name__
    wants_all = isinstance(spec.tokenizer, CharTokenizerSpec)
    parts = (part for source, own in enumerate(files) for part in _parts(spec, source, own, has_labels, (0, 0, 0)))
    for number, part in enumerate(parts):
        if number % REPORT_TEXTS == 0:
            report(Progress("tokenizer", name, number))
        if wants_all or part.split == TRAIN:
            yield part.text


def hash_text(text: str, seed: int) -> int:
    """64 bits of the text, keyed with the seed (BLAKE2b): decides the held-out split and finds a document again."""
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=key).digest(), "little")


def is_held_out(text_hash: int, fraction: float) -> bool:
    return text_hash < int(fraction * 2.0**64)


def write_shards(
    work: Work,
    folder: Path,
    state: State,
    report: Callable[[Progress], None],
) -> Iterator[State]:
    """Write the shards that `state` does not have yet; yields the state after each one, to be recorded.

    A document is never cut, so a shard ends with the first document that fills it. Raises DataError: an unknown
    character or label, an id outside the tokenizer's vocabulary, a document too long for `single`.
    """
    shards = _intact(folder, state.shards)
    next_document = shards[-1].next_document if shards else (0, 0, 0)
    documents = tokens = 0
    encoded = _encoded_parts(work, next_document)
    is_done = False
    while not is_done:
        first = sum(shard.num_tokens for shard in shards)
        with ShardWriter(folder, len(shards), first, work.tokenizer.vocab_size) as writer:
            is_done = True
            for source, part, ids in encoded:
                _append(writer, work, source, part, ids)
                documents += part.is_last
                tokens += len(ids)
                if documents % BATCH_DOCUMENTS == 0:
                    report(Progress("tokenise", source_names(work.spec)[source], documents, tokens, len(shards)))
                if part.is_last:
                    next_document = (source, part.document.file, part.document.number + 1)
                    if writer.num_tokens >= work.spec.shard_tokens:
                        is_done = False
                        break
            if not writer.is_empty:
                shards = (*shards, writer.finish(next_document))
                state = dataclasses.replace(state, shards=shards)
                yield state
                name = source_names(work.spec)[next_document[0]]
                report(Progress("tokenise", name, documents, tokens, len(shards)))


def _intact(folder: Path, shards: tuple[ShardRecord, ...]) -> tuple[ShardRecord, ...]:
    """The finished shards up to the first that is not as it was written."""
    for index, shard in enumerate(shards):
        for file in (shard.tokens, shard.documents):
            path = folder / file.file
            if not path.exists() or path.stat().st_size != file.num_bytes or sha256_of(path) != file.sha256:
                return shards[:index]
    return shards


def _encoded_parts(work: Work, next_document: tuple[int, int, int]) -> Iterator[tuple[int, Part, np.ndarray]]:
    for source in range(next_document[0], len(work.spec.sources)):
        for parts in _batches(_parts(work.spec, source, work.files[source], bool(work.labels), next_document)):
            try:
                encoded = work.tokenizer.encode_many([part.text for part in parts])
            except DataError:
                for part in parts:
                    _encode_alone(work.tokenizer, part.text, work.place(source, part))
                raise
            for part, ids in zip(parts, encoded, strict=True):
                yield source, part, encode_document(work.tokenizer, ids)


def _parts(
    spec: DataSpec, source: int, files: list[FileRef], has_labels: bool, next_document: tuple[int, int, int]
) -> Iterator[Part]:
    file, number = next_document[1:] if source == next_document[0] else (0, 0)
    every = read_documents(spec.sources[source], files)
    is_alone = not has_labels and sum(1 for _ in islice((document for document in every if document.text), 2)) == 1
    for document in read_documents(spec.sources[source], files, file, number):
        text = document.text
        cut = int(len(text) * (1 - spec.held_out)) if is_alone else len(text)
        if 0 < cut < len(text):
            yield Part(document, text[:cut], TRAIN, hash_text(text[:cut], spec.seed), False)
            yield Part(document, text[cut:], HELD_OUT, hash_text(text[cut:], spec.seed), True)
        else:
            text_hash = hash_text(text, spec.seed)
            yield Part(document, text, HELD_OUT if is_held_out(text_hash, spec.held_out) else TRAIN, text_hash, True)


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part.text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_alone(tokenizer: Tokenizer, text: str, where: str) -> None:
    try:
        tokenizer.encode_array(text)
    except DataError as error:
        fault = error.faults[0]
        raise DataError(f"{where}: {fault.failed}", expected=fault.expected, got=fault.got, todo=fault.todo) from error


def _append(writer: ShardWriter, work: Work, source: int, part: Part, ids: np.ndarray) -> None:
    spec, labels, tokenizer = work.spec, work.labels, work.tokenizer
    where = partial(work.place, source, part)
    label = _label(part.document.label, labels, where) if labels else -1
    if not part.text or len(ids) < minimum_tokens(labels):
        writer.drop(source, where())
        return
    if int(ids.max()) >= tokenizer.vocab_size:
        raise DataError(
            where(),
            expected=f"ids below the tokenizer's vocabulary of {tokenizer.vocab_size}",
            got=str(int(ids.max())),
            todo="give the tokenizer.json that belongs to this text",
        )
    num_positions = len(ids) - (0 if labels else 1)
    if spec.packing == "single" and spec.too_long == "refuse" and num_positions > spec.sequence_length:
        raise DataError(
            where(),
            expected=f"at most {spec.sequence_length} positions (data.sequence_length)",
            got=str(num_positions),
            todo="raise sequence_length, or set too_long to 'truncate'",
        )
    writer.append(
        ids,
        source=source,
        split=part.split,
        label=label,
        file=part.document.file,
        line=part.document.line,
        text_hash=part.text_hash,
    )


def _label(label: str | None, labels: Sequence[str], where: Callable[[], str]) -> int:
    if label in labels:
        return labels.index(label)
    raise DataError(
        where(),
        expected="one of the labels " + ", ".join(repr(name) for name in labels),
        got=repr(label),
        todo=suggest(str(label), list(labels)),
    )
