"""From text to prompt ids, and from generated ids back to text while they come. On the host, without jax.

Reads `inputs.tokenizers` and `errors`; `infer.engine` and `infer.generate` keep one `TextStream` for each answer,
`serve` reads `encode_prompt` and `token_text`.

A token is not a piece of text. In a byte-level vocabulary a character may need several tokens: their bytes go through an
incremental UTF-8 decoder, which waits for the rest of a character and replaces bytes that can no longer become one. In
other vocabularies a token's text may depend on what stands before it (SentencePiece writes no space at the start of a
text): such a token is decoded behind the last few ids, and what the text grows by is its own.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from jaxml.errors import DataError, RequestError
from jaxml.inputs.tokenizers import Tokenizer

# Decoders of the tokenizers library look at most at one neighbour; the rest is margin.
CONTEXT_TOKENS = 4


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt: the token that begins a document, where the tokenizer has one, and those of the text.

    Raises RequestError when that gives no token at all, and for text that the tokenizer cannot write.

    >>> from jaxml.inputs.tokenizers import ByteTokenizer
    >>> encode_prompt(ByteTokenizer(), "hé")
    [104, 195, 169]
    """
    try:
        ids = tokenizer.encode(text)
    except DataError as error:
        raise RequestError.from_faults(error.faults) from error
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    if not ids:
        raise RequestError(
            "prompt",
            expected="at least one token",
            got="an empty text, and this tokenizer has no token that begins one",
            todo="give some text to go on from",
        )
    return ids


def token_text(tokenizer: Tokenizer, token: int) -> bytes:
    """The UTF-8 bytes that a token writes when text stands before it (b"" for a special one): its name in a list.

    >>> from jaxml.inputs.tokenizers import ByteTokenizer
    >>> token_text(ByteTokenizer(), 195)
    b'\\xc3'
    """
    exact = tokenizer.token_bytes(token)
    if exact is not None:
        return exact
    # Behind itself a token is certainly not at the start.
    return tokenizer.decode([token, token])[len(tokenizer.decode([token])) :].encode()


class TextStream:
    """The text of one answer, as far as it can be shown, token by token; the joined results are the whole.

    `prompt_ids` tell how the text before the answer ended. `stop` strings (none empty) end the answer and are not part of
    it: the one counts that is complete first, and of several that end together the longest. What may still become a stop
    string, or the rest of a character, is held back until it is decided; `flush` gives it out at the end.
    The cost of a token does not depend on the length of the answer.

    `stopped`, `stop_string`: whether a stop string is complete, and which. `num_tokens_used`: tokens taken, up to and
    including the one that completed it.

    >>> from jaxml.inputs.tokenizers import ByteTokenizer
    >>> stream = TextStream(ByteTokenizer(), prompt_ids=[65], stop=["\\nQ:"])
    >>> [stream.push([number]) for number in "hé\\nQ:!".encode()]
    ['h', '', 'é', '', '', '', '']
    >>> stream.stop_string
    '\\nQ:'
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str]):
        self.stopped = False
        self.stop_string: str | None = None
        self.num_tokens_used = 0
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: deque[int] = deque(maxlen=CONTEXT_TOKENS)
        for token in reversed(prompt_ids):
            if len(self._context) == CONTEXT_TOKENS:
                break
            if tokenizer.token_bytes(token) != b"":
                self._context.appendleft(token)
        self._matchers = [StopMatcher(string) for string in stop]
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """The further text that can be shown after these ids: "" while all of it is pending, or once stopped."""
        shown = []
        for token in ids:
            if self.stopped:
                break
            self.num_tokens_used += 1
            shown.append(self._release(self._utf8.decode(self._bytes_of(token))))
        return "".join(shown)

    def flush(self) -> str:
        """What is still held back, at the end of an answer; "" once stopped."""
        if self.stopped:
            return ""
        shown = self._release(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return shown if self.stopped else shown + held

    def _bytes_of(self, token: int) -> bytes:
        exact = self._tokenizer.token_bytes(token)
        if exact == b"":
            return b""
        before = tuple(self._context)
        self._context.append(token)
        if exact is not None:
            return exact
        return self._tokenizer.decode([*before, token])[len(self._tokenizer.decode(before)) :].encode()

    def _release(self, text: str) -> str:
        """Adds text to what is held and takes out of it what no stop string can claim any more."""
        if not self._matchers:
            return text
        first = len(self._held)
        self._held += text
        for end, character in enumerate(text, first + 1):
            # A list, for every matcher has to see every character.
            complete = [matcher.string for matcher in self._matchers if matcher.completes(character)]
            if complete:
                self.stopped = True
                self.stop_string = max(complete, key=len)
                shown, self._held = self._held[: end - len(self.stop_string)], ""
                return shown
        border = len(self._held) - max(matcher.num_matched for matcher in self._matchers)
        shown, self._held = self._held[:border], self._held[border:]
        return shown


class StopMatcher:
    """Looks for one string in a text that comes character by character (Knuth, Morris and Pratt 1977).

    `num_matched` is the length of the longest beginning of the string which the text seen so far ends with.
    """

    def __init__(self, string: str):
        self.string = string
        self.num_matched = 0
        # The length of the longest proper beginning of string[: i + 1] that it also ends with.
        self._borders = [0] * len(string)
        for index in range(1, len(string)):
            length = self._borders[index - 1]
            while length and string[length] != string[index]:
                length = self._borders[length - 1]
            self._borders[index] = length + (string[length] == string[index])

    def completes(self, character: str) -> bool:
        """Takes one character; whether the string is complete with it (after which the matcher is used up)."""
        while self.num_matched and self.string[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        self.num_matched += self.string[self.num_matched] == character
        return self.num_matched == len(self.string)
