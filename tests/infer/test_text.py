"""Laws of streamed text: the pieces joined are the text, cut at the stop string that is complete first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers as library
from hypothesis import example, given
from hypothesis import strategies as st

from jaxml.errors import RequestError
from jaxml.infer.text import CONTEXT_TOKENS, StopMatcher, TextStream, encode_prompt, token_text
from jaxml.inputs.spec import BpeTokenizerSpec, HuggingFaceTokenizerSpec
from jaxml.inputs.subword import SubwordTokenizer
from jaxml.inputs.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, build_tokenizer

CHARACTERS = "ab\n é日😀<|>"
TEXTS = st.text(st.sampled_from(CHARACTERS), max_size=24)
STOPS = st.lists(st.text(st.sampled_from(CHARACTERS), min_size=1, max_size=4), max_size=3)
NAMES = ("byte", "char", "bpe", "sentencepiece", "wordpiece")


def sentencepiece() -> SubwordTokenizer:
    """As a Llama tokenizer.json is made: ▁ for spaces, byte tokens for the rest, no space at the start of a text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{number:02X}>": 3 + number for number in range(256)}
    pieces = ["▁", "a", "b", "\n", "<", "|", ">", "▁a", "▁b", "ab", "▁ab", "é"]
    vocab |= {piece: 259 + index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    made = library.Tokenizer(library.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.normalizer = library.normalizers.Sequence(
        [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
    )
    replace, strip = library.decoders.Replace("▁", " "), library.decoders.Strip(" ", 1, 0)
    decoders = [replace, library.decoders.ByteFallback(), library.decoders.Fuse(), strip]
    made.decoder = library.decoders.Sequence(decoders)
    spec = HuggingFaceTokenizerSpec("tokenizer.json", eos="</s>", bos="<s>")
    return SubwordTokenizer(spec, made.to_str().encode(), "a test")


def wordpiece() -> SubwordTokenizer:
    """As BERT's: a token that goes on inside a word is spelt with ##, all others write a space before themselves."""
    words = ["[UNK]", "a", "b", "ab", "##a", "##b", "##é", "日", "##日", "<", "|", ">", "😀", "é"]
    made = library.Tokenizer(library.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    made.decoder = library.decoders.WordPiece()
    return SubwordTokenizer(HuggingFaceTokenizerSpec("tokenizer.json"), made.to_str().encode(), "a test")


@pytest.fixture(scope="module")
def every() -> dict[str, Tokenizer]:
    bpe = build_tokenizer(BpeTokenizerSpec(265), ["ab ab\n é日 日 <|a|> <|b|>"] * 5)
    byte, char = ByteTokenizer(), CharTokenizer("".join(sorted(CHARACTERS)))
    return dict(zip(NAMES, (byte, char, bpe, sentencepiece(), wordpiece()), strict=True))


def cut(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longest of those that end together; and which."""
    for end in range(1, len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


def streamed(stream: TextStream, pieces: Sequence[Sequence[int]]) -> str:
    return "".join([stream.push(piece) for piece in pieces] + [stream.flush()])


def split(ids: list[int], borders: list[int]) -> list[list[int]]:
    ends = [0, *sorted(border % (len(ids) + 1) for border in borders), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("name", NAMES)
@given(before=TEXTS, text=TEXTS, stop=STOPS, borders=st.lists(st.integers(0, 99), max_size=5))
def test_streamed_text_is_the_decoded_whole_cut_at_the_first_stop_string(
    name: str, before: str, text: str, stop: list[str], borders: list[int], every: dict[str, Tokenizer]
) -> None:
    tokenizer = every[name]
    prompt, ids = tokenizer.encode(before), tokenizer.encode(text)
    whole = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    expected, by = cut(whole, stop)
    for pieces in ([ids], [[number] for number in ids], split(ids, borders)):
        stream = TextStream(tokenizer, prompt, stop)
        assert streamed(stream, pieces) == expected
        assert (stream.stopped, stream.stop_string) == (by is not None, by)


@pytest.mark.parametrize("name", ["byte", "bpe"])
@given(data=st.data())
def test_any_ids_at_all_stream_to_what_they_decode_to(
    name: str, data: st.DataObject, every: dict[str, Tokenizer]
) -> None:
    tokenizer = every[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    assert streamed(TextStream(tokenizer, [], []), [[number] for number in ids]) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), stop=STOPS)
def test_any_ids_at_all_stream_alike_in_any_pieces_and_beyond_the_vocabulary(
    name: str, data: st.DataObject, stop: list[str], every: dict[str, Tokenizer]
) -> None:
    ids = data.draw(st.lists(st.integers(0, every[name].vocab_size + 5), max_size=20))
    one, many = TextStream(every[name], [], stop), TextStream(every[name], [], stop)
    assert streamed(one, [ids]) == streamed(many, [[number] for number in ids])
    assert one.num_tokens_used == many.num_tokens_used <= len(ids)


@example(ids=[0xE2, 0xA9, 0xED, 0xA9])
@given(ids=st.lists(st.sampled_from([*"a😀é日".encode(), 0xE0, 0xED, 0xF4, 0xFF]), max_size=20))
def test_no_replacement_is_shown_while_the_bytes_may_become_a_character(ids: list[int]) -> None:
    stream, shown = TextStream(ByteTokenizer(), [], []), ""
    for index, number in enumerate(ids):
        shown += stream.push([number])
        # Whatever may come, what was shown stays.
        assert bytes([*ids[: index + 1], 97]).decode("utf-8", "replace").startswith(shown)
        # What is held back is one character that is not whole. (Of half a surrogate pair, which is never one, CPython
        # waits for the third byte, and each byte is replaced on its own.)
        held = bytes(ids[: index + 1]).decode("utf-8", "replace").removeprefix(shown)
        assert held in ("", "\ufffd", "\ufffd\ufffd")
        assert len(held) < 2 or 0xED in ids[index - 1 : index]


def test_a_character_is_shown_once_its_last_byte_is_there() -> None:
    stream = TextStream(ByteTokenizer(), [], [])
    assert [stream.push([number]) for number in "😀".encode()] == ["", "", "", "😀"]


def test_a_model_that_never_writes_utf8_is_shown_nevertheless() -> None:
    stream = TextStream(ByteTokenizer(), [], [])
    assert all(stream.push([0xFF]) == "\ufffd" for _ in range(100))
    fallback = TextStream(sentencepiece(), [], [])
    assert all(fallback.push([3 + 0xFF]) == "\ufffd" for _ in range(100))
    assert fallback.push([3 + 0xC3]) == ""
    assert fallback.push([3 + 0xA9]) == "é"


@pytest.mark.parametrize(
    ("prompt", "text"), [([], "ab"), ([1], "ab"), ([1, 260], " ab"), ([260, 2, 2, 2, 2, 2], " ab")]
)
def test_a_first_word_has_a_space_only_behind_text(prompt: list[int], text: str) -> None:
    tokenizer = sentencepiece()
    (token,) = tokenizer.encode("ab")
    stream = TextStream(tokenizer, prompt, [])
    assert stream.push([token]) == text
    assert stream.push([token]) == " ab"


def test_only_a_beginning_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(ByteTokenizer(), [], ["<|end|>", "\n\n"])
    shown = [stream.push([number]) for number in b"a<b|end <|en\nx"]
    assert shown == ["a", "", "<b", "|", "e", "n", "d", " ", "", "", "", "", "<|en", "\nx"]


@example(string="aabaaac", text="aabaaabaaac")  # the border of a border
@given(string=st.text("ab", min_size=1, max_size=9), text=st.text("ab", max_size=40))
def test_a_stop_string_is_found_where_it_first_ends(string: str, text: str) -> None:
    matcher = StopMatcher(string)
    for end, character in enumerate(text, 1):
        is_complete = matcher.completes(character)
        held = next(size for size in range(min(end, len(string)), -1, -1) if text[:end].endswith(string[:size]))
        assert (matcher.num_matched, is_complete) == (held, held == len(string))
        if is_complete:
            break


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    stream = TextStream(ByteTokenizer(), [], ["c", "abc", "bc"])
    assert stream.push([*b"xabc"]) == "x"
    assert stream.stop_string == "abc"


def test_a_false_start_inside_a_stop_string_is_not_lost() -> None:
    stream = TextStream(ByteTokenizer(), [], ["aab"])
    assert [stream.push([number]) for number in b"aaab"] == ["", "", "a", ""]
    assert (stream.stop_string, stream.num_tokens_used) == ("aab", 4)


def test_the_token_that_completes_a_stop_string_is_the_last_one_used() -> None:
    stream = TextStream(ByteTokenizer(), [], ["bc"])
    assert stream.push([*b"abcde"]) == "a"
    assert (stream.stopped, stream.stop_string, stream.num_tokens_used) == (True, "bc", 3)
    assert stream.push([*b"more"]) == stream.flush() == ""
    assert stream.num_tokens_used == 3


def test_a_stop_string_that_the_end_completes_counts() -> None:
    stream = TextStream(ByteTokenizer(), [], ["\ufffd"])
    assert stream.push([97, 0xC3]) == "a"
    assert stream.flush() == ""
    assert stream.stopped


def test_flushing_gives_what_was_held_once() -> None:
    stream = TextStream(ByteTokenizer(), [], ["abc"])
    assert stream.push([*b"xab"]) == "x"
    assert (stream.flush(), stream.flush(), stream.stopped) == ("ab", "", False)


def test_special_tokens_give_no_text() -> None:
    tokenizer = sentencepiece()
    stream = TextStream(tokenizer, [], [])
    assert [stream.push([number]) for number in (1, 260, 2, 260)] == ["", "a", "", "a"]


@pytest.mark.parametrize("name", ["sentencepiece", "wordpiece"])
def test_a_late_token_costs_no_more_than_an_early_one(
    name: str, every: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, windows = every[name], []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: windows.append(len(ids)) or decode(ids))
    stream = TextStream(tokenizer, tokenizer.encode("ab " * 50), ["<|end|>", "ab ab ab <|"])
    held = 0
    for number in tokenizer.encode("ab ab <|en" * 100):
        stream.push([number])
        held = max(held, len(stream._held))
    assert max(windows) <= CONTEXT_TOKENS + 1
    assert len(windows) <= 2 * stream.num_tokens_used
    assert held < len("ab ab ab <|")


def test_a_prompt_begins_with_the_start_token() -> None:
    tokenizer = sentencepiece()
    assert encode_prompt(tokenizer, "ab") == [1, *tokenizer.encode("ab")]
    assert encode_prompt(tokenizer, "") == [1]


def test_a_prompt_without_any_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"prompt(.|\n)*at least one token"):
        encode_prompt(ByteTokenizer(), "")


def test_what_the_tokenizer_cannot_write_is_refused_in_its_own_words() -> None:
    with pytest.raises(RequestError) as caught:
        encode_prompt(CharTokenizer("abc"), "abéd")
    assert caught.value.faults[0].failed == "character 'é' (U+00E9) at position 2"
    with pytest.raises(RequestError, match="surrogate"):
        encode_prompt(ByteTokenizer(), "a\ud800")


def test_a_token_has_the_text_that_it_writes_behind_others(every: dict[str, Tokenizer]) -> None:
    assert token_text(every["byte"], 0xC3) == b"\xc3"
    assert token_text(every["byte"], 256) == b""
    assert token_text(every["char"], every["char"].encode("é")[0]) == "é".encode()
    pieces = every["sentencepiece"]
    assert [token_text(pieces, number) for number in (2, 3 + 0xE2, 259, 260, 266)] == [b"", b"\xe2", b" ", b"a", b" a"]
    assert [token_text(every["wordpiece"], number) for number in (1, 4)] == [b" a", b"a"]


def test_a_published_llama_tokenizer_streams_what_it_encodes(assets: Path) -> None:
    path = assets / "stories260k-hf" / "tokenizer.json"
    tokenizer = build_tokenizer(HuggingFaceTokenizerSpec(str(path), eos="</s>", bos="<s>"), [])
    for language in ("deu", "jpn", "hin"):
        text = (assets / "multilingual" / f"udhr_{language}.txt").read_text(encoding="utf-8")[:1500]
        stream = TextStream(tokenizer, [1], [])
        assert streamed(stream, [[number] for number in tokenizer.encode(text)]) == text
