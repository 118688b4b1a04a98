"""Text to token ids and back: the protocol, the byte and character tokenizers, building and loading any of them.

Reads `inputs.spec` and `inputs.subword` (tokenizers of the tokenizers library); `data.prepare`, checkpoints and serving
read this file. A tokenizer is saved as JSON data, never as code or pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32

from jaxml.config.spec import canonical_json, from_json, to_json
from jaxml.errors import DataError
from jaxml.inputs.spec import (
    BpeTokenizerSpec,
    ByteTokenizerSpec,
    CharTokenizerSpec,
    HuggingFaceTokenizerSpec,
    TokenizerSpec,
)

FORMAT = 1
SPEC_FILE = "tokenizer_spec.json"
CHARACTERS_FILE = "characters.json"
# How the token that ends a document is spelt out, where we choose it.
END_OF_TEXT = "<|endoftext|>"


@runtime_checkable
class Tokenizer(Protocol):
    """What every tokenizer can do. `eos_id` ends and `bos_id` begins a document (None: it has no such token).

    `encode` knows text only: special tokens that are spelt out in a text stay text, and none is added
    (`encode_document` adds them). `encode_marked` is for text of which a trusted part writes special tokens.
    """

    spec: TokenizerSpec
    vocab_size: int
    eos_id: int | None
    bos_id: int | None

    def encode_array(self, text: str) -> UInt32[np.ndarray, " T"]:
        """The ids of a text. Raises DataError where the text cannot be written in this vocabulary."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special tokens give no text. Raises DataError for an id outside the vocabulary."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """The UTF-8 bytes that an id writes, wherever it stands: b"" for a special token or an id that has no token.

        None where they depend on the ids before it; then only `decode` of several ids tells.
        """
        ...

    def files(self) -> dict[str, bytes]:
        """Everything that `load_tokenizer` needs, as file names and contents."""
        ...

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """How special tokens are spelt out, by id."""
        return {}

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that makes one prompt of a conversation (None: the model has not learnt to converse)."""
        return None

    def encode_marked(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """The ids of the joined parts; where a part is marked True, special tokens that it spells out become their ids.

        Only those that lie in one marked part: one that begins in a part and ends in the next is text. All else is
        encoded as if there were no borders between the parts.
        """
        return self.encode("".join(text for text, _ in parts))

    def encode_with_specials(self, text: str) -> list[int]:
        """The ids of a text that is trusted: special tokens that it spells out become their ids."""
        return self.encode_marked([(text, True)])

    def encode(self, text: str) -> list[int]:
        """The ids of a text, as a list."""
        return self.encode_array(text).tolist()

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode_array` of each text (in parallel where the library can)."""
        return [self.encode_array(text) for text in texts]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the saved files: equal fingerprints encode equally."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            digest.update(f"{name}:{len(content)}:".encode() + content)
        return digest.hexdigest()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the files, each under a temporary name first; `load_tokenizer(directory)` is the inverse."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # The spec goes last: a directory that has it is complete.
        for name, content in sorted(self.files().items(), key=lambda item: item[0] == SPEC_FILE):
            temporary = folder / f".{name}.{os.getpid()}"
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, folder / name)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255; 256 ends a document.

    >>> ByteTokenizer().encode("hé")
    [104, 195, 169]
    """

    vocab_size = 257
    eos_id: int | None = 256
    bos_id: int | None = None

    def __init__(self) -> None:
        self.spec = ByteTokenizerSpec()

    def encode_array(self, text: str) -> UInt32[np.ndarray, " T"]:
        return np.frombuffer(to_utf8(text), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        numbers = checked_ids(ids, self.vocab_size)
        return numbers[numbers < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    @property
    def special_tokens(self) -> Mapping[int, str]:
        return {256: END_OF_TEXT}

    def files(self) -> dict[str, bytes]:
        return {SPEC_FILE: spec_content(self.spec)}


class CharTokenizer(Tokenizer):
    """One id for each character of `characters`, which are distinct and sorted; no special tokens.

    >>> CharTokenizer("abc").encode("cab")
    [2, 0, 1]
    """

    eos_id: int | None = None
    bos_id: int | None = None

    def __init__(self, characters: str):
        if not characters or list(characters) != sorted(set(characters)):
            raise DataError(
                "character vocabulary",
                expected="distinct characters in order, at least one",
                got=f"{len(characters)} characters: {characters[:40]!r}",
                todo="give a text that is not empty, or mend the tokenizer's characters.json",
            )
        self.spec = CharTokenizerSpec()
        self.characters = characters
        self.vocab_size = len(characters)
        self._codes = np.array([ord(character) for character in characters], np.uint32)

    def encode_array(self, text: str) -> UInt32[np.ndarray, " T"]:
        to_utf8(text)
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids = np.minimum(np.searchsorted(self._codes, codes), self.vocab_size - 1)
        unknown = np.flatnonzero(self._codes[ids] != codes)
        if len(unknown):
            where = int(unknown[0])
            raise DataError(
                f"character {text[where]!r} (U+{ord(text[where]):04X}) at position {where}",
                expected=f"one of the {self.vocab_size} characters of the tokenizer's vocabulary",
                got=f"{len(set(text) - set(self.characters))} unknown: "
                + ", ".join(repr(c) for c in sorted(set(text) - set(self.characters))[:10]),
                todo="prepare the data again with this text among its sources, or use the byte tokenizer",
            )
        return ids.astype(np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._codes[checked_ids(ids, self.vocab_size)].astype("<u4").tobytes().decode("utf-32-le")

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode() if token < self.vocab_size else b""

    def files(self) -> dict[str, bytes]:
        characters = json.dumps(self.characters, ensure_ascii=True).encode()
        return {SPEC_FILE: spec_content(self.spec), CHARACTERS_FILE: characters}


def encode_document(tokenizer: Tokenizer, ids: UInt32[np.ndarray, " T"]) -> UInt32[np.ndarray, " S"]:
    """The ids of a whole document: those of its text, between what begins and ends one. Serving calls it too."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return np.concatenate([np.array(begin, np.uint32), ids, np.array(end, np.uint32)])


def build_tokenizer(spec: TokenizerSpec, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a spec. `texts` (training and held-out) is read once, as a stream, by those that learn from it.

    Raises DataError: a file that is missing or not a tokenizer, a special token that it does not have, no text.
    """
    from jaxml.inputs import subword

    if isinstance(spec, ByteTokenizerSpec):
        return ByteTokenizer()
    if isinstance(spec, CharTokenizerSpec):
        characters: set[str] = set()
        for text in texts:
            to_utf8(text)
            characters.update(text)
        return CharTokenizer("".join(sorted(characters)))
    if isinstance(spec, HuggingFaceTokenizerSpec):
        return subword.read(spec)
    return subword.train(spec, texts)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `save` wrote. Raises DataError when a file is missing or damaged."""
    from jaxml.inputs import subword

    spec_file = Path(directory) / SPEC_FILE
    value = read_json(spec_file)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(
            str(spec_file),
            expected=f"a JSON object with format {FORMAT}",
            got=repr(value)[:80],
            todo="open it with the jaxml version that wrote it, or prepare the data again",
        )
    spec = from_json(value["spec"])
    if isinstance(spec, ByteTokenizerSpec):
        return ByteTokenizer()
    if isinstance(spec, CharTokenizerSpec):
        characters = read_json(Path(directory) / CHARACTERS_FILE)
        return CharTokenizer(characters if isinstance(characters, str) else "")
    if isinstance(spec, HuggingFaceTokenizerSpec | BpeTokenizerSpec):
        return subword.load(spec, directory)
    raise DataError(
        str(spec_file),
        expected="the spec of a tokenizer",
        got=type(spec).__qualname__,
        todo="prepare the data again",
    )


def spec_content(spec: TokenizerSpec) -> bytes:
    """The content of the spec file."""
    return canonical_json({"format": FORMAT, "spec": to_json(spec)}).encode()


def to_utf8(text: str) -> bytes:
    """The UTF-8 of a text. Raises DataError for a lone surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {text[error.start]!r} at position {error.start}",
            expected="text that UTF-8 can hold",
            got="half of a surrogate pair",
            todo="correct the escape in the source; a character outside the basic plane takes both halves",
        ) from error


def checked_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Ids as an int64 array. Raises DataError for one outside [0, vocab_size)."""
    numbers = np.asarray(ids, np.int64).reshape(-1)
    wrong = numbers[(numbers < 0) | (numbers >= vocab_size)]
    if len(wrong):
        raise DataError(
            "token ids to decode",
            expected=f"ids from 0 to {vocab_size - 1}",
            got=", ".join(str(number) for number in wrong[:5]),
            todo="decode with the tokenizer that encoded them",
        )
    return numbers


def read_json(file: Path) -> Any:
    """The JSON value of a file. Raises DataError that names the file."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            str(file),
            expected="a readable JSON file",
            got=str(error),
            todo="give the directory that a tokenizer was saved to, or prepare the data again",
        ) from error
