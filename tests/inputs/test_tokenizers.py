"""Laws of tokenizers: decoding undoes encoding, saving loses nothing, and what cannot be encoded is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxml.errors import DataError
from jaxml.inputs.spec import BpeTokenizerSpec, ByteTokenizerSpec, CharTokenizerSpec, HuggingFaceTokenizerSpec
from jaxml.inputs.subword import SubwordTokenizer
from jaxml.inputs.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    build_tokenizer,
    encode_document,
    load_tokenizer,
)

ASSETS = Path(__file__).resolve().parents[3] / "shared" / "assets"
TEXT = "the cat sat on the mat; the hat is 日本 and é and 😀. " * 5
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return build_tokenizer(BpeTokenizerSpec(280), [TEXT])


@pytest.fixture(scope="module")
def every(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("bpe")
    bpe.save(folder)
    spec = HuggingFaceTokenizerSpec(str(folder / "tokenizer.json"), eos="<|endoftext|>", bos="<|endoftext|>")
    return {
        "byte": build_tokenizer(ByteTokenizerSpec(), []),
        "char": build_tokenizer(CharTokenizerSpec(), [TEXT, "xyz"]),
        "bpe": bpe,
        "huggingface": build_tokenizer(spec, []),
    }


NAMES = ("byte", "char", "bpe", "huggingface")


@pytest.mark.parametrize("name", ["byte", "bpe", "huggingface"])
@settings(max_examples=40)
@given(text=TEXTS)
def test_decoding_undoes_encoding(name: str, text: str, every: dict[str, Tokenizer]) -> None:
    tokenizer = every[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= number < tokenizer.vocab_size for number in ids)
    (batched,) = tokenizer.encode_many([text])
    assert batched.tolist() == ids


@settings(max_examples=40)
@given(text=st.text(st.sampled_from(sorted(set(TEXT + "xyz"))), max_size=40))
def test_characters_decode_to_what_they_were(text: str, every: dict[str, Tokenizer]) -> None:
    assert every["char"].decode(every["char"].encode(text)) == text


@settings(max_examples=40)
@given(texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=4))
def test_a_character_vocabulary_holds_every_text_it_was_built_of(texts: list[str]) -> None:
    tokenizer = build_tokenizer(CharTokenizerSpec(), texts)
    assert tokenizer.vocab_size == len(set("".join(texts)))
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_many(texts)] == texts


@pytest.mark.parametrize("name", NAMES)
def test_saving_and_loading_is_the_identity_and_writes_only_json(
    name: str, every: dict[str, Tokenizer], tmp_path: Path
) -> None:
    every[name].save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == every[name].fingerprint
    assert loaded.encode(TEXT) == every[name].encode(TEXT)
    assert (loaded.eos_id, loaded.bos_id, loaded.vocab_size) == (
        every[name].eos_id,
        every[name].bos_id,
        every[name].vocab_size,
    )
    for file in tmp_path.iterdir():
        json.loads(file.read_bytes())


def test_fingerprints_tell_vocabularies_apart() -> None:
    assert CharTokenizer("abc").fingerprint != CharTokenizer("abd").fingerprint
    assert CharTokenizer("abc").fingerprint == CharTokenizer("abc").fingerprint


def test_a_bpe_is_the_same_each_time_it_is_trained(bpe: Tokenizer) -> None:
    assert build_tokenizer(BpeTokenizerSpec(280), [TEXT]).fingerprint == bpe.fingerprint


def test_special_tokens_spelt_out_in_a_text_stay_text(every: dict[str, Tokenizer]) -> None:
    for name in ("bpe", "huggingface"):
        ids = every[name].encode("a<|endoftext|>b")
        assert every[name].eos_id not in ids
        assert every[name].decode(ids) == "a<|endoftext|>b"


def test_a_document_begins_with_bos_and_ends_with_eos(every: dict[str, Tokenizer]) -> None:
    def framed(name: str) -> list[int]:
        return encode_document(every[name], every[name].encode_array("cat")).tolist()

    assert framed("byte") == [*b"cat", 256]
    assert framed("char") == every["char"].encode("cat")
    assert framed("huggingface") == [0, *every["huggingface"].encode("cat"), 0]
    assert framed("bpe") == [*every["bpe"].encode("cat"), 0]


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(DataError, match=r"character 'é' \(U\+00E9\) at position 2"):
        CharTokenizer("abc").encode("abéd")


def test_no_text_gives_no_character_vocabulary() -> None:
    with pytest.raises(DataError, match="not empty"):
        build_tokenizer(CharTokenizerSpec(), [""])


def test_half_a_surrogate_pair_is_refused_by_all(every: dict[str, Tokenizer]) -> None:
    for tokenizer in every.values():
        with pytest.raises(DataError, match="surrogate"):
            tokenizer.encode("a\ud800")


def test_ids_outside_the_vocabulary_do_not_decode(every: dict[str, Tokenizer]) -> None:
    for tokenizer in every.values():
        for number in (-1, tokenizer.vocab_size):
            with pytest.raises(DataError, match="token ids"):
                tokenizer.decode([number])


def test_a_special_token_that_the_file_does_not_have_is_refused(tmp_path: Path, bpe: Tokenizer) -> None:
    bpe.save(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.bos(.|\n)*did you mean '<\|endoftext\|>'"):
        build_tokenizer(HuggingFaceTokenizerSpec(str(tmp_path / "tokenizer.json"), bos="<|endoftext>"), [])


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "tokenizer.json", tmp_path / "absent.json"):
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            build_tokenizer(HuggingFaceTokenizerSpec(str(path)), [])
    with pytest.raises(DataError, match="tokenizer_spec"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_that_cannot_be_filled_or_holds_no_bytes_is_refused() -> None:
    for size in (100, 5000):
        with pytest.raises(DataError, match=r"tokenizer\.vocab_size"):
            build_tokenizer(BpeTokenizerSpec(size), ["abc abc"])


def test_bytes_that_are_not_utf8_decode_with_a_replacement() -> None:
    assert ByteTokenizer().decode(np.array([0xFF, 97, 256])) == "\ufffda"


def test_a_file_that_asks_for_truncation_and_padding_encodes_the_whole_text_and_no_more(
    tmp_path: Path, bpe: Tokenizer
) -> None:
    file = library.Tokenizer.from_str(bpe.files()["tokenizer.json"].decode())
    file.enable_truncation(5)
    file.enable_padding(length=100)
    file.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(HuggingFaceTokenizerSpec(str(tmp_path / "tokenizer.json")), [])
    for text in (TEXT, "a"):
        assert tokenizer.encode(text) == bpe.encode(text)


@pytest.mark.skipif(not ASSETS.is_dir(), reason="shared assets are not here")
def test_real_tokenizers_encode_as_their_library_does() -> None:
    text = (ASSETS / "multilingual" / "udhr_deu.txt").read_text()[:2000]
    for folder in ("stories260k-hf", "whisper-tiny-en", "minilm-l6-v2"):
        path = ASSETS / folder / "tokenizer.json"
        reference = library.Tokenizer.from_file(str(path))
        reference.no_truncation()
        reference.no_padding()
        expected = reference.encode(text, add_special_tokens=False).ids
        tokenizer = build_tokenizer(HuggingFaceTokenizerSpec(str(path)), [])
        assert tokenizer.encode(text) == expected
        assert tokenizer.vocab_size > max(expected)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_the_bytes_of_tokens_joined_are_what_they_decode_to(
    name: str, data: st.DataObject, every: dict[str, Tokenizer]
):
    tokenizer = every[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    written = b"".join(tokenizer.token_bytes(number) or b"" for number in ids)
    assert written.decode("utf-8", "replace") == tokenizer.decode(ids)
    assert tokenizer.token_bytes(tokenizer.vocab_size + 3) == b""


def test_a_token_that_depends_on_its_neighbours_has_no_bytes_of_its_own() -> None:
    vocab = {"<unk>": 0, "<s>": 1, "<0xC3>": 2, "▁a": 3}
    made = library.Tokenizer(library.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<s>"])
    decoders = library.decoders
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = SubwordTokenizer(
        HuggingFaceTokenizerSpec("tokenizer.json", bos="<s>"), made.to_str().encode(), "a test"
    )
    assert [tokenizer.token_bytes(number) for number in range(5)] == [None, b"", b"\xc3", None, b""]
    assert tokenizer.special_tokens == {1: "<s>"}


def test_a_token_that_was_added_as_plain_text_writes_it(bpe: Tokenizer) -> None:
    made = library.Tokenizer.from_str(bpe.files()["tokenizer.json"].decode())
    made.add_tokens(["日 本", "<tool>"])
    tokenizer = SubwordTokenizer(HuggingFaceTokenizerSpec("tokenizer.json"), made.to_str().encode(), "a test")
    for text in ("日 本", "<tool>"):
        (number,) = tokenizer.encode(text)
        assert tokenizer.token_bytes(number) == text.encode() == tokenizer.decode([number]).encode()


def test_special_tokens_are_named(every: dict[str, Tokenizer]) -> None:
    assert every["byte"].special_tokens == {256: "<|endoftext|>"}
    assert every["char"].special_tokens == {}
    assert every["bpe"].special_tokens == every["huggingface"].special_tokens == {0: "<|endoftext|>"}


# Characters that special tokens begin and end with, and tokens that eat white space or stand alone only.
MARKS = ["<|a|>", "<|a|>b", "<|ab|>", "<l>", "<r>", "<plain>", "<|", "a", "|>", " ", "\n", "é"]


@pytest.fixture(scope="module")
def marking(bpe: Tokenizer) -> tuple[SubwordTokenizer, library.Tokenizer]:
    made = library.Tokenizer.from_str(bpe.files()["tokenizer.json"].decode())
    plain = [library.AddedToken(text, normalized=False) for text in ("<|a|>", "<|a|>b", "<|ab|>")]
    left, right = library.AddedToken("<l>", lstrip=True), library.AddedToken("<r>", rstrip=True)
    made.add_special_tokens([*plain, left, right, library.AddedToken("<w>", single_word=True)])
    made.add_tokens(["<plain>"])
    content = made.to_str().encode()
    return SubwordTokenizer(HuggingFaceTokenizerSpec("tokenizer.json"), content, "a test"), made


@given(text=st.lists(st.sampled_from([*MARKS, "<w>"]), max_size=10).map("".join))
def test_trusted_text_is_encoded_as_the_library_does(
    text: str, marking: tuple[SubwordTokenizer, library.Tokenizer]
) -> None:
    tokenizer, reference = marking
    assert tokenizer.encode_with_specials(text) == reference.encode(text, add_special_tokens=False).ids


@given(parts=st.lists(st.tuples(st.lists(st.sampled_from(MARKS), max_size=4).map("".join), st.booleans()), max_size=5))
def test_only_marked_parts_write_special_tokens_and_borders_leave_no_trace(
    parts: list[tuple[str, bool]], marking: tuple[SubwordTokenizer, library.Tokenizer]
) -> None:
    tokenizer, _ = marking
    text = "".join(part for part, _ in parts)
    unmarked = tokenizer.encode_marked([(part, False) for part, _ in parts])
    assert unmarked == tokenizer.encode(text)
    assert not set(unmarked) & set(tokenizer.special_tokens)
    ids = tokenizer.encode_marked(parts)
    alone = [number for part, is_marked in parts if is_marked for number in tokenizer.encode_with_specials(part)]
    specials = tokenizer.special_tokens
    assert [number for number in ids if number in specials] == [number for number in alone if number in specials]


@pytest.mark.parametrize("name", ["byte", "char", "bpe"])
def test_without_special_tokens_in_the_text_trust_changes_nothing(name: str, every: dict[str, Tokenizer]) -> None:
    parts = [("the ", True), ("cat", False), (" sat", True)]
    assert every[name].encode_marked(parts) == every[name].encode("the cat sat")
    assert every[name].encode_with_specials("the cat") == every[name].encode("the cat")
    assert every[name].chat_template is None


def test_trusted_text_that_spells_out_the_end_ends(bpe: Tokenizer) -> None:
    assert bpe.encode_with_specials("a<|endoftext|>") == [*bpe.encode("a"), 0]
    with pytest.raises(DataError, match="surrogate"):
        bpe.encode_with_specials("\ud800")


def test_a_chat_template_is_saved_as_it_is(bpe: Tokenizer, tmp_path: Path) -> None:
    content, spec = bpe.files()["tokenizer.json"], HuggingFaceTokenizerSpec("tokenizer.json")
    template = "{% for m in messages %}\r\n{{ m.content }}é{% endfor %}\n"
    tokenizer = SubwordTokenizer(spec, content, "a test", chat_template=template)
    tokenizer.save(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes() == template.encode()
    loaded = load_tokenizer(tmp_path)
    assert (loaded.chat_template, loaded.fingerprint) == (template, tokenizer.fingerprint)
    without = SubwordTokenizer(spec, content, "a test")
    assert without.chat_template is None
    assert "chat_template.jinja" not in without.files()
    assert without.fingerprint != tokenizer.fingerprint
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match="the saved tokenizer"):
        load_tokenizer(tmp_path)


def test_fingerprints_are_those_of_the_first_release() -> None:
    assert ByteTokenizer().fingerprint == "d8b297e908bd512f4936179b68adc898979e9561a9633bc63d492f9694cec5f7"
    assert CharTokenizer("abc").fingerprint == "86902eac2a3859bc4d4330314128897a2a1bb337b30ea3b49e430f884eeeebc0"
