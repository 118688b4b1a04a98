"""Tokenizers of the tokenizers library: a `tokenizer.json` from outside, and the byte-level BPE that we train.

Reads `inputs.spec`; `inputs.tokenizers` calls `read`, `train` and `load`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import fsspec
import numpy as np
import tokenizers
from jaxtyping import UInt32

from jaxml.config.spec import suggest
from jaxml.errors import DataError
from jaxml.inputs.spec import BpeTokenizerSpec, HuggingFaceTokenizerSpec
from jaxml.inputs.tokenizers import END_OF_TEXT, SPEC_FILE, Tokenizer, checked_ids, spec_content, to_utf8

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library. `content` is the whole `tokenizer.json`.

    Truncation and padding that the file asks for are switched off, and special tokens that a text spells out stay text.
    `vocab_size` is one more than the largest id: files exist whose ids have holes. `chat_template` is kept as a file of
    its own beside it.
    """

    def __init__(
        self,
        spec: HuggingFaceTokenizerSpec | BpeTokenizerSpec,
        content: bytes,
        where: str,
        chat_template: str | None = None,
    ):
        self.spec = spec
        self.content = content
        self._chat_template = chat_template
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
        eos, bos = (END_OF_TEXT, "") if isinstance(spec, BpeTokenizerSpec) else (spec.eos, spec.bos)
        self.eos_id = self._special("eos", eos, where)
        self.bos_id = self._special("bos", bos, where)
        added = self._library.get_added_tokens_decoder()
        self._specials = {number: token for number, token in added.items() if token.special}
        self._names = {self._vocab[token]: token for token in (eos, bos) if token}
        self._names |= {number: token.content for number, token in self._specials.items()}
        decoders = _decoder_types(self._library)
        # With any other decoder beside it, what a token writes is no longer in the token alone.
        self._is_byte_level = decoders == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in decoders

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

    def token_bytes(self, token: int) -> bytes | None:
        written = self._library.id_to_token(token) if token not in self._specials else None
        if written is None:
            return b""
        if self._is_byte_level:
            numbers = [_byte_of_character().get(character) for character in written]
            # As the library does: a token with a character outside the alphabet is one that was added as plain text.
            return written.encode() if None in numbers else bytes(number for number in numbers if number is not None)
        match = BYTE_TOKEN.fullmatch(written) if self._has_byte_tokens else None
        return bytes([int(match[1], 16)]) if match else None

    @property
    def special_tokens(self) -> Mapping[int, str]:
        return self._names

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def encode_marked(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """As the library encodes with special tokens on, but only those count that lie in a marked part.

        A token that the file declares `normalized` is looked for in the text as it is, which is the same wherever the
        normaliser leaves the token alone.
        """
        text = "".join(part for part, _ in parts)
        to_utf8(text)
        ids: list[int] = []
        done = 0
        for start, end, token in self._specials_in(parts, text):
            ids += self._library.encode(text[done:start], add_special_tokens=False).ids if start > done else []
            ids.append(token)
            done = end
        return ids + (self._library.encode(text[done:], add_special_tokens=False).ids if text[done:] else [])

    def _specials_in(self, parts: Sequence[tuple[str, bool]], text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of the special tokens in marked parts, the leftmost and longest, as the library finds them."""
        by_text = {token.content: (number, token) for number, token in self._specials.items() if token.content}
        longest_first = sorted(by_text, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        offset = done = 0
        for part, is_marked in parts:
            for match in pattern.finditer(part) if is_marked else ():
                number, token = by_text[match[0]]
                start, end = offset + match.start(), offset + match.end()
                beside = text[max(start - 1, 0) : start] + text[end : end + 1]
                if token.single_word and re.search(r"\w", beside):
                    continue
                while token.lstrip and start > done and text[start - 1].isspace():
                    start -= 1
                while token.rstrip and end < len(text) and text[end].isspace():
                    end += 1
                yield start, end, number
                done = end
            offset += len(part)

    def files(self) -> dict[str, bytes]:
        template = {} if self._chat_template is None else {TEMPLATE_FILE: self._chat_template.encode()}
        return {SPEC_FILE: spec_content(self.spec), TOKENIZER_FILE: self.content, **template}


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
    file, template_file = Path(directory) / TOKENIZER_FILE, Path(directory) / TEMPLATE_FILE
    try:
        content = file.read_bytes()
        template = template_file.read_bytes().decode("utf-8") if template_file.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            str(file), expected="the saved tokenizer", got=str(error), todo="prepare the data again"
        ) from error
    return SubwordTokenizer(spec, content, str(file), template)


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        to_utf8(text)
        yield text


def _decoder_types(library: tokenizers.Tokenizer) -> list[str]:
    """The kinds of decoder that a tokenizer applies, in order, such as ["Replace", "ByteFallback", "Fuse", "Strip"]."""
    if library.decoder is None:
        return []
    described = json.loads(library.decoder.__getstate__())
    return [part["type"] for part in described.get("decoders", [described])]


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The byte behind each character of GPT-2's byte-level alphabet (its `bytes_to_unicode`, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
