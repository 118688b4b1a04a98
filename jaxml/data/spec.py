"""Where records come from and how rows are made of them, as data.

Reads `config.spec` and `inputs.spec`; `data.prepare` tokenises and plans, `data.order` puts rows in order. No jax.

The `path` of a source is a file, a glob or an fsspec URL (or URL glob), or a tuple of these; a name that ends in a
known compression suffix (`.gz`) is decompressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxml.config.spec import Spec
from jaxml.errors import Faults
from jaxml.inputs.spec import ByteTokenizerSpec, TokenizerSpec

MAX_WEIGHT = 10**6


@dataclass(frozen=True)
class TextSource(Spec):
    """Plain UTF-8 text. A document is a whole file, a line that is not blank, or a paragraph (lines up to a blank one).

    `weight`: rows of this source for each round of the mix (an integer, relative to the other sources).
    """

    path: str | tuple[str, ...]
    documents: Literal["file", "line", "paragraph"] = "file"
    name: str = ""
    weight: int = 1


@dataclass(frozen=True)
class JsonlSource(Spec):
    """One JSON object a line; `text` names the field with the text, `label` the one with the class name ("": none)."""

    path: str | tuple[str, ...]
    text: str = "text"
    label: str = ""
    name: str = ""
    weight: int = 1


@dataclass(frozen=True)
class TableSource(Spec):
    """Delimited text (CSV, TSV). `columns` names the columns of a file without a header (empty: it has one).

    `quoted`: fields may stand in double quotes (CSV as RFC 4180 has it); otherwise a quote is a character like others.
    """

    path: str | tuple[str, ...]
    text: str = "text"
    label: str = ""
    delimiter: str = "\t"
    columns: tuple[str, ...] = ()
    quoted: bool = False
    name: str = ""
    weight: int = 1


@dataclass(frozen=True)
class ParquetSource(Spec):
    """Parquet files (extra `data`); `text` and `label` name columns."""

    path: str | tuple[str, ...]
    text: str = "text"
    label: str = ""
    name: str = ""
    weight: int = 1


@dataclass(frozen=True)
class ArrayRecordSource(Spec):
    """ArrayRecord files (extra `data`) whose records are UTF-8 text, or JSON objects when `text` names a field."""

    path: str | tuple[str, ...]
    text: str = ""
    label: str = ""
    name: str = ""
    weight: int = 1


SourceSpec = TextSource | JsonlSource | TableSource | ParquetSource | ArrayRecordSource


@dataclass(frozen=True)
class DataSpec(Spec):
    """The data of an experiment.

    `prepared`: the directory that `data prepare` writes and training reads.
    `sequence_length`: tokens a row (T).
    `packing`: `concatenate` cuts the stream of documents every T tokens; `best_fit` keeps documents whole if they fit;
    `single` gives each document a row of its own (classification).
    `held_out`: the fraction of documents kept for evaluation, by hash of the document (equal documents stay together);
    of a source with one document and no labels, its last fraction of characters.
    `too_long`: with `single` packing, a document longer than T is refused or truncated.
    `shard_tokens`: tokens a shard file of the prepared directory; a document is never cut, so a shard may be longer.
    `prefetch`: batches made ahead by threads (0: none are made ahead, and there are no threads).
    `seed`: keys the permutation of rows and the held-out hash.
    """

    sources: tuple[SourceSpec, ...]
    prepared: str
    sequence_length: int
    tokenizer: TokenizerSpec = ByteTokenizerSpec()
    packing: Literal["concatenate", "best_fit", "single"] = "concatenate"
    held_out: float = 0.1
    too_long: Literal["refuse", "truncate"] = "refuse"
    shard_tokens: int = 2**26
    prefetch: int = 2
    seed: int = 0


def source_names(spec: DataSpec) -> tuple[str, ...]:
    """The name of each source: its own, or its place in the mix (`source0`)."""
    return tuple(source.name or f"source{index}" for index, source in enumerate(spec.sources))


def check_data(spec: DataSpec, faults: Faults, labels: tuple[str, ...] = ()) -> None:
    """Add every fault that the spec alone shows. `labels`: the class names of a classification task (empty: none)."""
    names = source_names(spec)
    held_out, seed = spec.held_out, spec.seed
    rules = [  # field, whether it is right, expected, got, what to do
        ("sources", bool(spec.sources), "at least one source", "none", "add a TextSource"),
        ("sources", len(set(names)) == len(names), "names that differ", names, "name the sources apart"),
        ("prepared", bool(spec.prepared), "a directory", "''", "name the directory that data prepare writes"),
        ("sequence_length", spec.sequence_length >= 1, "at least 1", spec.sequence_length, "give the tokens of a row"),
        ("held_out", 0.0 <= held_out < 1.0, "a fraction, at least 0 and below 1", held_out, "try 0.1"),
        ("shard_tokens", spec.shard_tokens >= 1, "at least 1", spec.shard_tokens, "leave the default"),
        ("prefetch", spec.prefetch >= 0, "0 or more", spec.prefetch, "use 0 for none, 2 as a start"),
        ("seed", 0 <= seed < 2**63, "0 to 2^63 - 1", seed, "choose another seed"),
        (
            "packing",
            not labels or spec.packing == "single",
            "'single' for classification",
            spec.packing,
            "set 'single'",
        ),
    ]
    for index, source in enumerate(spec.sources):
        here = f"sources.{index}"
        weight, is_weight = source.weight, 1 <= source.weight <= MAX_WEIGHT
        rules += [
            (f"{here}.path", bool(source.path), "a file, glob or URL", repr(source.path), "name the input"),
            (f"{here}.weight", is_weight, f"an integer from 1 to {MAX_WEIGHT}", weight, "or leave the source out"),
        ]
        if isinstance(source, TableSource):
            delimiter = source.delimiter
            rules.append((f"{here}.delimiter", len(delimiter) == 1, "one character", repr(delimiter), "correct it"))
        if labels:
            has_label = not isinstance(source, TextSource) and bool(source.label)
            todo = "use JSONL or a table" if isinstance(source, TextSource) else "name the field with the class"
            rules.append((f"{here}.label", has_label, f"the field with one of {labels}", "none", todo))
    for field, is_right, expected, got, todo in rules:
        if not is_right:
            faults.add(f"data.{field}", expected=expected, got=str(got), todo=todo)
