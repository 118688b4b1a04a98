"""Which tokenizer, as data. Reads `config.spec`; `inputs.tokenizers` builds them. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxml.config.spec import Spec


@dataclass(frozen=True)
class ByteTokenizerSpec(Spec):
    """UTF-8 bytes are ids 0 to 255; 256 ends a document (it is appended to each)."""


@dataclass(frozen=True)
class CharTokenizerSpec(Spec):
    """One id for each distinct character of the sources, held-out part too, sorted; no special tokens (as nanoGPT)."""


@dataclass(frozen=True)
class HuggingFaceTokenizerSpec(Spec):
    """A `tokenizer.json` of the tokenizers library, at a path or fsspec URL.

    `eos` and `bos` name the tokens that end and begin each document ("": none).
    """

    path: str
    eos: str = ""
    bos: str = ""


@dataclass(frozen=True)
class BpeTokenizerSpec(Spec):
    """A byte-level BPE trained on the training documents at `data prepare`. Its id 0, `<|endoftext|>`, ends each document."""

    vocab_size: int


TokenizerSpec = ByteTokenizerSpec | CharTokenizerSpec | HuggingFaceTokenizerSpec | BpeTokenizerSpec
