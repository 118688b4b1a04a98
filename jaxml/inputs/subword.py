"""Tokenizers of the tokenizers library: a `tokenizer.json` from outside, and the byte-level BPE that we train.

Reads `inputs.spec`; `inputs.tokenizers` calls `read`, `train` and `load`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import fsspec
import numpy as np
import tokenizers
from jaxtyping import UInt32

from jaxml.config.spec import suggest
from jaxml.errors import DataError
from jaxml.inputs.spec import BpeTokenizerSpec, HuggingFaceTokenizerSpec
from jaxml.inputs.tokenizers import SPEC_FILE, Tokenizer, checked_ids, spec_content, to_utf8

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library. `content` is the whole `tokenizer.json`.

    Truncation and padding that the file asks for are switched off, and special tokens that a text spells out stay text.
    `vocab_size` is one more than the largest id: files exist whose ids have holes.
    """

    def __init__(self, spec: HuggingFaceTokenizerSpec | BpeTokenizerSpec, content: bytes, where: str):
        self.spec = spec
        self.content = content
        try:
            self._library = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for anything it cannot parse
            raise DataError(
                where,
                expected="a tokenizer.json of the tokenizers library",
                got=str(error)[:200],
                todo="give the tokenizer.json of a model, not tokenizer_config.json or tokenizer.model",
            ) from error
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        self._vocab = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values()) + 1
        is_ours = isinstance(spec, BpeTokenizerSpec)
        self.eos_id = self._special("eos", END_OF_TEXT if is_ours else spec.eos, where)
        self.bos_id = self._special("bos", "" if is_ours else spec.bos, where)

    def _special(self, role: str, token: str, where: str) -> int | None:
        if not token:
            return None
        if token not in self._vocab:
            raise DataError(
                f"tokenizer.{role}",
                expected=f"a token of {where}",
                got=repr(token),
                todo=suggest(token, [name for name in self._vocab if name.startswith(("<", "["))]),
            )
        return self._vocab[token]

    def encode_array(self, text: str) -> UInt32[np.ndarray, " T"]:
        to_utf8(text)
        return np.array(self._library.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            to_utf8(text)
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._library.decode(checked_ids(ids, self.vocab_size).tolist(), skip_special_tokens=True)

    def files(self) -> dict[str, bytes]:
        return {SPEC_FILE: spec_content(self.spec), TOKENIZER_FILE: self.content}


def read(spec: HuggingFaceTokenizerSpec) -> SubwordTokenizer:
    """The tokenizer in the file or fsspec URL that a spec names; its own spec points at the saved copy."""
    try:
        system, path = fsspec.core.url_to_fs(spec.path)
        content = system.cat_file(path)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            "tokenizer.path",
            expected="a tokenizer.json that can be read",
            got=f"{spec.path}: {error}",
            todo="correct the path",
        ) from error
    return SubwordTokenizer(dataclasses.replace(spec, path=TOKENIZER_FILE), content, spec.path)


def train(spec: BpeTokenizerSpec, texts: Iterable[str]) -> SubwordTokenizer:
    """A byte-level BPE (Sennrich et al. 2016, on bytes as GPT-2 does) of `spec.vocab_size` ids, `<|endoftext|>` first.

    Any text can be encoded, because all 256 bytes are in it. Raises DataError when the vocabulary is smaller than that,
    or when the text has too few pairs to fill it.
    """
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if spec.vocab_size < len(alphabet) + 1:
        raise DataError(
            "tokenizer.vocab_size",
            expected=f"at least {len(alphabet) + 1} (all bytes and {END_OF_TEXT})",
            got=str(spec.vocab_size),
            todo="raise it, or use the byte tokenizer",
        )
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=spec.vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(_checked(texts), trainer)
    if library.get_vocab_size() < spec.vocab_size:
        raise DataError(
            "tokenizer.vocab_size",
            expected=f"at most {library.get_vocab_size()}, which is all that this text gives",
            got=str(spec.vocab_size),
            todo="lower it (and the model's), or train on more text",
        )
    return SubwordTokenizer(spec, library.to_str(pretty=False).encode(), "the trained tokenizer")


def load(spec: HuggingFaceTokenizerSpec | BpeTokenizerSpec, directory: str | os.PathLike[str]) -> SubwordTokenizer:
    """The tokenizer that `SubwordTokenizer.save` wrote."""
    file = Path(directory) / TOKENIZER_FILE
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(
            str(file), expected="the saved tokenizer", got=str(error), todo="prepare the data again"
        ) from error
    return SubwordTokenizer(spec, content, str(file))


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        to_utf8(text)
        yield text
