"""Grammars that an answer must match: a JSON schema, a regular expression or a choice, as masks over the vocabulary.

Reads `infer.request` (`Constraint`), `infer.schema_limits` (what a schema may ask), `infer.text`, `inputs.tokenizers` and
`errors`; `infer.engine` compiles a matcher for each request and follows it. The grammars are those of the llguidance
library (the extra `constrain`), which is imported when the first constraint comes. On the host, without jax.

Where we narrow what the library takes: white space between the parts of a JSON value is bounded, so that a model that
loves spaces must go on; options that a schema could set for the library are refused; and whatever is compiled or followed
has a bound on its work, since neither can be interrupted.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt32

from jaxml.errors import DataError, JaxmlError, RequestError, require_extra
from jaxml.infer.request import Constraint
from jaxml.infer.schema_limits import check_schema
from jaxml.infer.text import token_text
from jaxml.inputs.tokenizers import Tokenizer, to_utf8

# The request's field of each kind, which errors name.
FIELD_OF = {"json_schema": "response_format", "regex": "guided_regex", "choice": "guided_choice"}
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
# Characters with a meaning in a regular expression, inside a class and outside.
REGEX_CHARACTERS = frozenset(r"\.+*?()|[]{}^$#&-~/")
# Compiled grammars that a vocabulary keeps: choices of one request, and requests that ask for the same.
MAX_KEPT = 64

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class ConstraintLimits:
    """The most that a constraint may be, or cost.

    source_bytes: of its source, as UTF-8. depth: of a schema or of a regular expression's brackets. choices: texts of a
    choice. compile_steps: the library's steps when it compiles (some ten thousand a millisecond). step_fuel, step_items:
    what one mask may cost in its lexer and its parser. lexer_states: of 1 to 2 kB each. grammar_size: symbols.
    """

    source_bytes: int = 64 * 1024
    depth: int = 32
    choices: int = 1024
    compile_steps: int = 1_000_000
    step_fuel: int = 200_000
    step_items: int = 50_000
    lexer_states: int = 20_000
    grammar_size: int = 20_000


class ConstraintError(JaxmlError):
    """A grammar cannot be followed any further: no token of this vocabulary goes on, or its limits are reached."""


class Vocabulary:
    """A tokenizer as grammars see it: what each token writes, and which ones end a text. Made once; safe between threads.

    A token writes what it does behind other text. Where a prompt has no text at all and the tokenizer drops the space at
    the start of one (SentencePiece), the answer's first space is lost, as it is without a grammar.
    """

    def __init__(self, tokens: Sequence[bytes], end_tokens: Sequence[int], encode: Encode | None = None):
        library: Any = require_extra("llguidance", "constrain")
        self.vocab_size = len(tokens)
        self.end_tokens = tuple(token for token in end_tokens if token < self.vocab_size)
        # The library needs a token that ends a text. Where there is none, it is one behind the vocabulary.
        tokens = list(tokens) if self.end_tokens else [*tokens, b""]
        self._end = self.end_tokens or (self.vocab_size,)
        wrapped = _Wrapped(tokens, self._end, encode)
        self._tokens = library.LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=list(self._end))
        self._kept: OrderedDict[tuple[Constraint, ConstraintLimits], Any] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int | None = None, end_tokens: Sequence[int] = ()) -> Vocabulary:
        """vocab_size: of the model's logits (None: of the tokenizer); tokens that the tokenizer lacks are never allowed.

        end_tokens: those that end a text (none: the tokenizer's own). Raises MissingExtraError without llguidance.
        """
        size = tokenizer.vocab_size if vocab_size is None else vocab_size
        own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        known = min(size, tokenizer.vocab_size)
        texts = [token_text(tokenizer, token) for token in range(known)]
        return cls([*texts, *[b""] * (size - known)], tuple(end_tokens) or own, tokenizer.encode)

    def compiled(self, constraint: Constraint, limits: ConstraintLimits) -> Any:
        """The library's matcher at the start of a constraint's grammar; a copy of one that is kept."""
        key = (constraint, limits)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key].deep_copy()
        made = self._compile(constraint, limits)
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return made.deep_copy()

    def _compile(self, constraint: Constraint, limits: ConstraintLimits) -> Any:
        library: Any = require_extra("llguidance", "constrain")
        bounds = library.LLParserLimits(
            initial_lexer_fuel=limits.compile_steps,
            step_lexer_fuel=limits.step_fuel,
            step_max_items=limits.step_items,
            max_lexer_states=limits.lexer_states,
            max_grammar_size=limits.grammar_size,
            precompute_large_lexemes=False,
            verbose_errors=False,  # they would hold the answer
        )
        grammar = _grammar(library, constraint, limits)
        matcher = library.LLMatcher(self._tokens, grammar, log_level=0, limits=bounds)
        if matcher.is_error():
            raise _refused(constraint, "a grammar that can be followed", _first_line(matcher.get_error()))
        return matcher


def compile_constraint(
    constraint: Constraint, vocabulary: Vocabulary, limits: ConstraintLimits = ConstraintLimits()
) -> Matcher:
    """A matcher at the start of the constraint's grammar: one for each answer.

    Takes about a millisecond, at the limits some tens of them. Raises RequestError that names the request's field, for a
    source that is wrong, beyond the limits, or that no token of the vocabulary can begin to match.

    >>> from jaxml.inputs.tokenizers import ByteTokenizer
    >>> matcher = compile_constraint(Constraint("choice", '["yes", "no"]'), Vocabulary.of(ByteTokenizer()))
    >>> matcher.advance(b"ye")
    >>> [chr(token) for token in range(256) if matcher.mask()[token // 32] >> (token % 32) & 1]
    ['s']
    """
    matcher = Matcher(vocabulary.compiled(constraint, limits), vocabulary)
    try:
        if not matcher.mask().any() and not matcher.is_finished:
            raise ConstraintError("the grammar", expected="a token to begin with", got="none", todo="change it")
    except ConstraintError as error:
        raise _refused(constraint, "a grammar that this model's tokens can match", error.faults[0].got) from error
    return matcher


class Matcher:
    """Where one answer stands in its grammar. Not for several threads at once."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_words = -(-vocabulary.vocab_size // 32)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing can follow but the end of the text."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def mask(self) -> UInt32[np.ndarray, " W"]:
        """The tokens that may come next, W = ceil(V / 32): bit i % 32 of word i // 32 stands for token i.

        Those that end a text are allowed exactly where the answer may end. No bit at all is set for a finished answer
        where the tokenizer has no such token. Raises ConstraintError where the grammar cannot go on.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), "<u4")[: self._num_words].astype(np.uint32)
        self._check()
        if rest := self._vocabulary.vocab_size % 32:
            bits[-1] &= np.uint32((1 << rest) - 1)
        if not bits.any() and not self.is_accepting:
            raise ConstraintError(
                "the grammar of an answer",
                expected="a token that goes on",
                got="a vocabulary without the characters that must follow",
                todo="ask for what this model can write",
            )
        return bits

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were chosen. Raises ConstraintError at one that the grammar does not allow."""
        for token in tokens:
            if self.is_finished and token in self._vocabulary.end_tokens:
                continue
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(
                "the grammar of an answer",
                expected="tokens that it allows, within the limits of its work",
                got=_first_line(self._matcher.get_error()),
                todo="ask for a simpler grammar",
            )


class _Wrapped:
    """What the library reads of a tokenizer. Where a grammar forces a text, it allows the tokens that this writes it with."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], end_tokens: Sequence[int], encode: Encode | None):
        self.tokens = tokens
        self.eos_token_id = end_tokens[0]
        self.special_token_ids = list(end_tokens)
        self._encode = encode
        self._by_text = {text: token for token, text in reversed(list(enumerate(tokens))) if text}
        self._longest = max(map(len, self._by_text), default=0)

    def __call__(self, text: str) -> list[int]:
        """As the tokenizer does, where that writes just this text; else the longest token each time, as far as it goes."""
        written = text.encode()
        ids = self._as_encoded(text)
        if b"".join(self.tokens[token] for token in ids) == written:
            return ids
        ids, start = [], 0
        while start < len(written):
            ends = range(min(len(written), start + self._longest), start, -1)
            token = next((found for end in ends if (found := self._by_text.get(written[start:end])) is not None), None)
            if token is None:
                return ids
            ids.append(token)
            start += len(self.tokens[token])
        return ids

    def _as_encoded(self, text: str) -> list[int]:
        try:
            ids = self._encode(text) if self._encode is not None else []
        except DataError:  # a character that the vocabulary lacks
            return []
        return ids if all(token < len(self.tokens) for token in ids) else []


def _grammar(library: Any, constraint: Constraint, limits: ConstraintLimits) -> str:
    """The source in the library's language. Raises RequestError."""
    try:
        size = len(to_utf8(constraint.source))
    except DataError as error:
        raise _refused(constraint, error.faults[0].expected, error.faults[0].got) from error
    if size > limits.source_bytes:
        raise _refused(constraint, f"at most {limits.source_bytes} bytes", f"{size}")
    if constraint.kind == "regex":
        _check_brackets(constraint, limits)
        return _grammar_of_regex(library, constraint.source)
    try:
        source = json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise _refused(constraint, "JSON", type(error).__name__) from error
    if constraint.kind == "choice":
        return _grammar_of_regex(library, "|".join(map(_literally, _choices(constraint, source, limits))))
    check_schema(source, FIELD_OF["json_schema"], limits.depth)
    options = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_pattern": WHITESPACE,
        "coerce_one_of": False,
        "lenient": False,
    }
    try:
        return library.LLMatcher.grammar_from_json_schema(constraint.source, overrides=options)
    except ValueError as error:
        raise _refused(constraint, "a JSON schema", _first_line(str(error))) from error


def _grammar_of_regex(library: Any, pattern: str) -> str:
    r"""The library's, in which \d and \w are those of ASCII, as in JSON Schema: a model must not write digits of Tamil."""
    return library.LLMatcher.grammar_from_lark(f"start: /{library.regex_to_lark(pattern, 'dw')}/")


def _choices(constraint: Constraint, source: Any, limits: ConstraintLimits) -> list[str]:
    is_right = isinstance(source, list) and all(isinstance(text, str) and _is_text(text) for text in source)
    if not is_right or not 0 < len(source) <= limits.choices:
        raise _refused(constraint, f"a list of 1 to {limits.choices} texts, none empty", "another one")
    return source


def _is_text(text: str) -> bool:
    return text != "" and not any("\ud800" <= character <= "\udfff" for character in text)


def _literally(text: str) -> str:
    """A regular expression for this text alone."""
    return "(" + "".join(f"\\{c}" if c in REGEX_CHARACTERS else c for c in text) + ")"


def _check_brackets(constraint: Constraint, limits: ConstraintLimits) -> None:
    """The library's parser goes as deep as the brackets do; in a class they count too, which only errs on the safe side."""
    depth = deepest = 0
    for character in constraint.source:
        depth += (character in "([") - (character in ")]" and depth > 0)
        deepest = max(deepest, depth)
    if deepest > limits.depth:
        raise _refused(constraint, f"brackets at most {limits.depth} deep", f"{deepest}")


def _first_line(message: str) -> str:
    return message.partition("\n")[0][:200]


def _refused(constraint: Constraint, expected: str, got: str) -> RequestError:
    field = FIELD_OF[constraint.kind]
    return RequestError(field, expected=expected, got=got, todo=f"simplify or correct {field}")
