"""Multiple-choice and exact-match sets from JSONL: read, scored, and summed up with standard errors.

Reads `infer.scoring`, `infer.language_model` and `errors`; `cli.eval` reads it. The kinds are told by their fields, which
are those of MosaicML's llm-foundry:

  query, choices, gold                   which continuation of the query is likeliest
  context_options, continuation, gold    after which context the continuation is likeliest
  context, continuation                  is the continuation what the model says, token for token
  context, answer, aliases               is its answer, up to the end of the line, one of these

Context and continuation are joined as EleutherAI's lm-evaluation-harness does (`_encode_pair`): a delimiter between them
(one of white space only where there is none yet), all white space at the border given to the continuation, whose tokens
are those of encode(context + continuation) after as many as encode(context) has. What does not fit into the model's
context is cut off at the front.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxml.errors import DataError, RequestError
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.opening import Opened
from jaxml.infer.request import Sampling
from jaxml.infer.scoring import language_model_spec, score
from jaxml.infer.text import encode_prompt
from jaxml.inputs.tokenizers import Tokenizer

ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Choice:
    """`options`: (context, continuation) pairs, of which number `gold` is right. `line`: where it stands in its file."""

    line: int
    options: tuple[tuple[str, str], ...]
    gold: int


@dataclass(frozen=True)
class Match:
    """`answers` to a context, any of which is right; `is_exact`: the one answer has to be met token for token."""

    line: int
    context: str
    answers: tuple[str, ...]
    is_exact: bool


@dataclass(frozen=True)
class Estimate:
    """A mean over items and its standard error, the sample's standard deviation by the root of their number (NaN for one
    item)."""

    value: float
    standard_error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The mean of at least one value."""
        error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(np.mean(values)), error)


@dataclass(frozen=True)
class SetResult:
    """Estimates by name, and how many options or prompts lost their beginning because they were too long."""

    kind: str
    num_items: int
    num_cut: int
    estimates: Mapping[str, Estimate]


def read_set(path: str | os.PathLike[str], limit: int | None = None) -> list[Choice] | list[Match]:
    """The items of a JSONL file, its first `limit` if that is given; all of one kind.

    Raises DataError naming the line: no JSON object, unknown fields, a value of the wrong type, a `gold` that numbers no
    option, another kind than the lines before it, or no item at all.
    """
    choices: list[Choice] = []
    matches: list[Match] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(choices) + len(matches) >= limit:
                break
            if line.strip():
                item = _item(line, number, f"{path}, line {number}")
                choices.append(item) if isinstance(item, Choice) else matches.append(item)
    if bool(choices) == bool(matches):
        got = "both" if choices else "no items"
        todo = "split the file by kind" if choices else "give a file with items, and a limit of at least 1"
        raise DataError(str(path), expected="items to choose from, or items to answer", got=got, todo=todo)
    return choices or matches


def evaluate_choices(opened: Opened, items: Sequence[Choice], delimiter: str = " ") -> SetResult:
    """How often the right option is the likeliest: `accuracy` by the sum of log-probabilities of the continuation's
    tokens, `accuracy_per_character` by that sum over the continuation's characters (white space at the border aside).

    Of equal options the first counts. Raises DataError for a continuation that has no tokens or is longer than the
    context, or text that the tokenizer cannot write.
    """
    sums, num_cut = option_logprobs(opened, items, delimiter)
    return choice_result(items, sums, num_cut)


def option_logprobs(
    opened: Opened, items: Sequence[Choice], delimiter: str = " "
) -> tuple[list[tuple[float, ...]], int]:
    """(for each item the log-probability of each option's continuation in nats, how many options were cut)."""
    tokenizer, most = opened.require_tokenizer(), language_model_spec(opened).context_length + 1
    pairs = [
        encode_pair(tokenizer, context, continuation, delimiter, f"line {item.line}", most)
        for item in items
        for context, continuation in item.options
    ]
    logprobs = score(opened, [(context + continuation)[-most:] for context, continuation in pairs])
    sums = iter(
        float(row[-len(continuation) :].sum(dtype=np.float64))
        for row, (_, continuation) in zip(logprobs, pairs, strict=True)
    )
    num_cut = sum(len(context) + len(continuation) > most for context, continuation in pairs)
    return [tuple(next(sums) for _ in item.options) for item in items], num_cut


def choice_result(items: Sequence[Choice], sums: Sequence[Sequence[float]], num_cut: int = 0) -> SetResult:
    """The accuracies that summed log-probabilities give."""
    by_sum, by_mean = [], []
    for item, values in zip(items, sums, strict=True):
        lengths = [max(1, len(continuation.strip())) for _, continuation in item.options]
        by_sum.append(float(np.argmax(values) == item.gold))
        by_mean.append(float(np.argmax(np.divide(values, lengths)) == item.gold))
    estimates = {"accuracy": Estimate.of(by_sum), "accuracy_per_character": Estimate.of(by_mean)}
    return SetResult("multiple choice", len(items), num_cut, estimates)


def evaluate_matches(
    model: LanguageModel, items: Sequence[Match], delimiter: str = " ", max_tokens: int = ANSWER_TOKENS
) -> SetResult:
    """How often greedy generation gives a right answer (`exact_match`).

    A continuation has to be met token for token. Other answers end with the line, or after `max_tokens` tokens, and are
    compared by `normalized`. Raises as `evaluate_choices` does.
    """
    tokenizer, context_length = model.opened.require_tokenizer(), model.context_length
    prompts: list[list[int]] = []
    wanted: list[list[int]] = []
    for item in items:
        name = f"line {item.line}"
        if item.is_exact:
            pair = encode_pair(tokenizer, item.context, item.answers[0], delimiter, name, context_length)
        else:
            pair = _encode(tokenizer, _border(item.context, "", delimiter)[0], name), []
        prompts.append(pair[0])
        wanted.append(pair[1])
    rooms = [len(tokens) or min(max_tokens, context_length - 1) for tokens in wanted]
    cut = [prompt[-(context_length - room) :] for prompt, room in zip(prompts, rooms, strict=True)]
    kinds = [(item.is_exact, room) for item, room in zip(items, rooms, strict=True)]
    is_right = [0.0] * len(items)
    for is_exact, room in sorted(set(kinds)):
        numbers = [number for number, kind in enumerate(kinds) if kind == (is_exact, room)]
        sampling = Sampling(temperature=0.0, max_tokens=room, stop=() if is_exact else ("\n",))
        answers = model.generate([cut[number] for number in numbers], sampling)
        for number, answer in zip(numbers, answers, strict=True):
            is_right[number] = float(_is_right(items[number], answer.tokens, answer.text, wanted[number]))
    num_cut = sum(len(short) < len(whole) for short, whole in zip(cut, prompts, strict=True))
    return SetResult("exact match", len(items), num_cut, {"exact_match": Estimate.of(is_right)})


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str, delimiter: str, name: str, most: int
) -> tuple[list[int], list[int]]:
    """(tokens of the context, tokens of the continuation); the context begins as a document does.

    Raises DataError, naming the item: text that the tokenizer cannot write, no context, a continuation without tokens of
    its own, or with `most` and more, since at least one has to be left for the context.
    """
    context, continuation = _border(context, continuation, delimiter)
    before = _encode(tokenizer, context, name)
    after = _encode(tokenizer, context + continuation, name)[len(before) :]
    if not 0 < len(after) < most:
        raise DataError(
            f"the continuation in {name}",
            expected=f"from 1 to {most - 1} tokens",
            got=f"{len(after)}: {continuation[:40]!r}",
            todo="leave the item out, or take a model with a longer context",
        )
    return before, after


def _border(context: str, continuation: str, delimiter: str) -> tuple[str, str]:
    """Context and continuation with the delimiter, all white space at the border in the continuation."""
    has_space = context[-1:].isspace() or continuation[:1].isspace()
    joined = context if has_space and not delimiter.strip() else context + delimiter
    bare = joined.rstrip()
    return bare, joined[len(bare) :] + continuation


def _encode(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    try:
        return encode_prompt(tokenizer, text)
    except RequestError as error:
        faults = [dataclasses.replace(fault, failed=f"{name}: {fault.failed}") for fault in error.faults]
        raise DataError.from_faults(faults) from error


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces (SQuAD: Rajpurkar et al. 2016, arXiv:1606.05250).

    >>> normalized(" The Answer, is:  a Dog. ")
    'answer is dog'
    """
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _is_right(item: Match, tokens: Sequence[int], text: str, wanted: list[int]) -> bool:
    if item.is_exact:
        return list(tokens) == wanted
    return normalized(text) in {normalized(answer) for answer in item.answers}


def _item(line: bytes, number: int, where: str) -> Choice | Match:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _wrong(where, "a JSON object", str(error)) from error
    match value:
        case {"query": str(query), "choices": [_, _, *_] as choices, "gold": int(gold)} if _all_text(choices):
            return _choice(number, tuple((query, choice) for choice in choices), gold, where)
        case {"context_options": [_, _, *_] as contexts, "continuation": str(text), "gold": int(gold)} if _all_text(
            contexts
        ):
            return _choice(number, tuple((context, text) for context in contexts), gold, where)
        case {"context": str(context), "continuation": str(text)}:
            return Match(number, context, (text,), is_exact=True)
        case {"context": str(context), "answer": str(answer)} if _all_text(value.get("aliases", [])):
            return Match(number, context, (answer, *value.get("aliases", [])), is_exact=False)
    expected = "query, choices, gold; context_options, continuation, gold; context, continuation; or context, answer"
    got = f"fields {', '.join(value)}" if isinstance(value, dict) else repr(value)[:60]
    raise _wrong(where, expected, got)


def _choice(number: int, options: tuple[tuple[str, str], ...], gold: int, where: str) -> Choice:
    if isinstance(gold, bool) or not 0 <= gold < len(options):
        raise _wrong(f"{where}: gold", f"from 0 to {len(options) - 1}", repr(gold))
    return Choice(number, options, gold)


def _all_text(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _wrong(where: str, expected: str, got: str) -> DataError:
    todo = "mend the line, or leave it out (sets whose answers are programs to be run are not supported)"
    return DataError(where, expected=expected, got=got[:200], todo=todo)
