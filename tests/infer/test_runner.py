"""Both runners on a real model: requests that share steps get the answers that they would get alone, and the model's own
full forward pass agrees. Of the flat runner, bit for bit, whatever runs beside a request."""

from __future__ import annotations

import dataclasses
import json
import random
from functools import partial

import jax
import numpy as np
import pytest

from jaxml.errors import NonFiniteError, RequestError
from jaxml.infer.decode import generate
from jaxml.infer.flat_runner import FlatRunner
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.progress import Progress
from jaxml.infer.request import GREEDY, Event, Request, Sampling
from jaxml.infer.runner import FastRunner, PagedRunner
from jaxml.infer.sampling import make_row
from jaxml.infer.scheduler import Scheduler
from jaxml.tasks.spec import LanguageModeling
from tests.infer.written import small_decoder, write

PROMPTS = [(65,), (66, 67, 68), tuple(range(30, 110)), (1, 2), (200,) * 17, (9, 8, 7)]
SEEDED = Sampling(max_tokens=12, temperature=0.9, top_p=0.95, frequency_penalty=0.2, num_logprobs=2)


@pytest.fixture(scope="module")
def fast(model: LanguageModel) -> FastRunner:
    return FastRunner(model, max_rows=3, num_pages=40, target_s=0.001)


@pytest.fixture(scope="module")
def flat(model: LanguageModel) -> FlatRunner:
    return FlatRunner(model, max_rows=3, num_pages=40, num_tokens=20)


def run(runner: PagedRunner, requests: list[Request], scheduler: Scheduler | None = None) -> dict[str, list[Event]]:
    """All events by request."""
    scheduler = scheduler or Scheduler(runner)
    model = runner.model
    for request in requests:
        scheduler.add(request, Progress(request, model.tokenizer, model.eos, model.limit(request)), 0.0)
    found: dict[str, list[Event]] = {request.id: [] for request in requests}
    while scheduler.is_busy:
        spans, num_steps, _ = scheduler.plan(0.0)
        for event in scheduler.take(spans, runner.run(spans, num_steps)):
            found[event.id].append(event)
    assert scheduler.stats()["pages_used"] == 0
    return found


def tokens_of(events: list[Event]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.tokens)


def requests_of(sampling: Sampling) -> list[Request]:
    return [
        Request(str(index), prompt, dataclasses.replace(sampling, seed=index, max_tokens=5 + 3 * index))
        for index, prompt in enumerate(PROMPTS)
    ]


def logprobs_of(events: list[Event]) -> list[float]:
    return [item.logprob for event in events for item in event.logprobs]


@pytest.fixture(scope="module")
def alone(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """The tokens of every request by the pure jitted `generate`, one row at a time over a contiguous cache."""
    found = {}
    one = jax.jit(partial(generate, model.bound, max_tokens=20))
    for request in requests_of(SEEDED):
        sampling, prompt = request.sampling, request.prompt
        limits = {"vocab_size": model.vocab_size, "max_tokens": sampling.max_tokens, "eos": model.eos}
        row = make_row(sampling, prompt, seed=sampling.seed, **limits)
        padded = np.full((1, 80), 3, np.int32)
        padded[0, : len(prompt)] = prompt
        tokens, counts = one(model.params, padded, np.array([len(prompt)], np.int32), row)
        found[request.id] = tuple(np.asarray(tokens)[0, : int(counts[0])].tolist())
    return found


@pytest.mark.parametrize("kind", ["fast", "flat"])
def test_requests_that_join_and_leave_are_answered_as_if_alone(kind, request, alone):
    together = run(request.getfixturevalue(kind), requests_of(SEEDED))
    for id, events in together.items():
        assert tokens_of(events) == alone[id]
        assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
        assert events[-1].num_tokens == 5 + 3 * int(id)


@pytest.fixture(scope="module")
def whole(model: LanguageModel):
    """(features, log-probabilities) of one pass over a text."""
    bound = model.opened.bound

    @jax.jit
    def run_whole(params, *row):
        module = bound.bind(params)
        features = module(*row)[0]
        return features[0], jax.nn.log_softmax(module.logits(features))[0]

    def of(text: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        row = np.zeros((1, 128), np.int32)
        row[0, : len(text)] = text
        positions = np.arange(128, dtype=np.int32)[None]
        features, log_probs = run_whole(model.opened.params, row, positions, np.ones_like(row))
        return np.asarray(features)[: len(text)], np.asarray(log_probs)[: len(text)]

    return of


@pytest.mark.parametrize("kind", ["fast", "flat"])
def test_log_probabilities_are_those_of_the_full_forward_pass(kind, request, whole):
    """Of every token, at every place, over prompts that need several pieces and rows that joined at different times."""
    together = run(request.getfixturevalue(kind), requests_of(SEEDED))
    for asked in requests_of(SEEDED):
        events = together[asked.id]
        _, expected = whole((*asked.prompt, *tokens_of(events)))
        items = [item for event in events for item in event.logprobs]
        for place, item in enumerate(items, len(asked.prompt) - 1):
            np.testing.assert_allclose(item.logprob, expected[place, item.token], atol=1e-4)
            assert [token for token, _ in item.top] == np.argsort(-expected[place])[:2].tolist()


@pytest.mark.parametrize("kind", ["fast", "flat"])
def test_the_prompt_is_scored_and_embedded_as_by_the_full_forward_pass(kind, request, whole):
    runner = request.getfixturevalue(kind)
    prompt = PROMPTS[2]
    scored = Request("scored", prompt, dataclasses.replace(GREEDY, max_tokens=3, num_prompt_logprobs=2))
    only = Request("only", prompt, dataclasses.replace(GREEDY, max_tokens=0, num_prompt_logprobs=0))
    embedded = Request("embedded", prompt, wants_embedding=True)
    beside = Request("beside", PROMPTS[1], dataclasses.replace(GREEDY, max_tokens=9))
    scheduler = Scheduler(runner)
    found = run(runner, [Request("before", prompt, GREEDY), beside, scored, only, embedded], scheduler)
    features, log_probs = whole(prompt)
    expected = log_probs[np.arange(len(prompt) - 1), prompt[1:]]
    for id in ("scored", "only"):
        first = found[id][0]
        assert [item.token for item in first.prompt_logprobs] == list(prompt[1:])
        np.testing.assert_allclose([item.logprob for item in first.prompt_logprobs], expected, atol=1e-4)
    assert [token for token, _ in found["scored"][0].prompt_logprobs[5].top] == np.argsort(-log_probs[5])[:2].tolist()
    assert tokens_of(found["scored"]) == tokens_of(found["before"])[:3]
    assert (found["only"][0].finish_reason, found["only"][0].num_tokens) == ("length", 0)
    mean = features.mean(0)
    np.testing.assert_allclose(found["embedded"][0].embedding, mean / np.linalg.norm(mean), atol=1e-5)


def test_of_the_flat_runner_nothing_that_runs_beside_a_request_changes_a_bit(flat):
    """Neighbours, the order of arrival, the cut into pieces, pre-emption, and pages that others filled."""
    prompt = PROMPTS[2]
    sampling = dataclasses.replace(SEEDED, max_tokens=30, seed=7, num_logprobs=20)
    asked = Request("asked", prompt, sampling)
    (alone,) = run(flat, [asked]).values()
    chance = random.Random(0)
    seen = set()
    for turn in range(6):
        others = [
            Request(
                str(index),
                (*prompt[: chance.choice((0, 16, 40))], *(chance.randrange(250) for _ in range(chance.randint(1, 40)))),
                Sampling(max_tokens=chance.randint(20, 60), temperature=chance.choice((0, 1)), seed=index, top_k=3),
                lane="interactive",
            )
            for index in range(4)
        ]
        place = chance.randint(0, 4)
        scheduler = Scheduler(flat)
        if turn % 2:  # A cache too small for all: the asked one has the slower lane and is sent back.
            scheduler.pages.take(29)
        found = {}
        for index, request in enumerate([*others[:place], asked, *others[place:]]):
            scheduler.add(request, Progress(request, None, (), flat.model.limit(request)), float(index))
        now = 0.0
        while scheduler.is_busy:
            spans, num_steps, _ = scheduler.plan(now)
            for event in scheduler.take(spans, flat.run(spans, num_steps)):
                found.setdefault(event.id, []).append(event)
            now += 1.0
        assert tokens_of(found["asked"]) == tokens_of(alone)
        assert logprobs_of(found["asked"]) == logprobs_of(alone)
        assert [item.top for event in found["asked"] for item in event.logprobs] == [
            item.top for event in alone for item in event.logprobs
        ]
        seen |= {"found"} if found["asked"][0].num_cached else set()
        seen |= {"sent back"} if scheduler.counts["preempted"] else set()
    assert seen == {"found", "sent back"}


def test_a_model_that_gives_no_numbers_fails_that_request_alone(tmp_path, monkeypatch):
    """The embedding of one token is not a number: who has it in the prompt fails, and its pages are good for others."""
    spec = dataclasses.replace(small_decoder(context_length=64), tied_head=False)
    model = LanguageModel.open(write(tmp_path, spec, LanguageModeling(), {}))
    runner = FastRunner(model, max_rows=2, num_pages=8)
    greedy = dataclasses.replace(GREEDY, max_tokens=20)
    prompts = [(66,) * 20 if index % 2 else (70, 71 + index) for index in range(6)]
    requests = [Request(str(index), prompt, greedy) for index, prompt in enumerate(prompts)]
    clean = run(runner, requests)
    assert not any(66 in tokens_of(clean[str(index)]) for index in (0, 2, 4)), "change the prompts"
    broken = np.array(model.params["embed"]["table"])
    broken[66] = np.nan
    monkeypatch.setattr(model, "params", {**model.params, "embed": {"table": broken}})
    found = run(runner, requests)
    for index in range(6):
        if index % 2:
            assert [event.error for event in found[str(index)]] == ["non_finite"]
        else:
            assert tokens_of(found[str(index)]) == tokens_of(clean[str(index)])
    with pytest.raises(NonFiniteError):
        model.generate([(66, 67)], greedy)


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(model):
    sampling = dataclasses.replace(SEEDED, max_tokens=10)
    answers = [model.generate([PROMPTS[0]], dataclasses.replace(sampling, seed=seed))[0].tokens for seed in (5, 5, 6)]
    assert answers[0] == answers[1] != answers[2]
    unseeded = {model.generate([PROMPTS[0]], sampling)[0].tokens for _ in range(3)}
    assert len(unseeded) > 1


def test_an_answer_goes_on_to_the_end_of_the_context(model, fast):
    """Greedy, beside a short neighbour."""
    long = Request("long", (65, 66, 67), GREEDY)
    short = Request("short", (70,), dataclasses.replace(GREEDY, max_tokens=4))
    events = run(fast, [long, short])
    tokens = tokens_of(events["long"])
    assert len(tokens) == model.context_length - 3
    assert events["long"][-1].finish_reason == "length"
    bound = model.opened.bound
    whole = np.array([(65, 66, 67, *tokens)], np.int32)
    positions = np.arange(whole.shape[1], dtype=np.int32)[None]
    module = jax.jit(lambda params, *row: bound.bind(params).logits(bound.bind(params)(*row)[0]))
    logits = np.asarray(module(model.opened.params, whole, positions, np.ones_like(whole)))[0]
    assert logits[2:-1].argmax(-1).tolist() == list(tokens)


def test_two_streams_of_one_model_do_not_disturb_each_other(model):
    sampling = dataclasses.replace(GREEDY, max_tokens=12)
    alone = [model.generate([prompt], sampling)[0].tokens for prompt in PROMPTS[:2]]
    streams = [model.stream(prompt, sampling) for prompt in PROMPTS[:2]]
    found: list[list[int]] = [[], []]
    for _ in range(12):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += [token for event in [next(stream, None)] if event for token in event.tokens]
    assert [tuple(tokens) for tokens in found] == alone


def test_stop_tokens_and_stop_strings_end_an_answer_and_are_not_in_it(model):
    (free,) = model.generate([PROMPTS[1]], temperature=0.0, max_tokens=20)
    stop = free.tokens[6]
    first = free.tokens.index(stop)
    (stopped,) = model.generate([PROMPTS[1]], temperature=0.0, max_tokens=20, stop_token_ids=(stop,))
    assert (stopped.tokens, stopped.finish_reason) == (free.tokens[:first], "stop")
    (late,) = model.generate([PROMPTS[1]], temperature=0.0, max_tokens=20, stop_token_ids=(stop,), min_tokens=20)
    assert stop not in late.tokens
    assert len(late.tokens) == 20
    seeded = {"max_tokens": 40, "seed": 3}
    text = model.generate("Go", **seeded).text
    cut = next(text[i : i + 2] for i in range(8, len(text) - 2) if "\ufffd" not in text[i : i + 2])
    answer = model.generate("Go", stop=(cut,), **seeded)
    assert (answer.text, answer.finish_reason) == (text[: text.index(cut)], "stop")
    events = list(model.stream("Go", stop=(cut,), **seeded))
    assert "".join(event.text for event in events) == answer.text
    assert events[-1].finish_reason == "stop"
    assert tokens_of(events) == answer.tokens


def test_only_a_prompt_that_does_not_fit_is_refused_with_the_three_numbers(model):
    fits = (65,) * (model.context_length - 1)
    (answer,) = model.generate([fits], temperature=0.0, max_tokens=1000)
    assert (len(answer.tokens), answer.finish_reason) == (1, "length")
    with pytest.raises(RequestError) as refused:
        model.generate([(65,) * model.context_length])
    told = str(refused.value)
    assert all(number in told for number in ("192", "191", "1 is generated"))
    for wrong in ([], [257], [-1]):
        with pytest.raises(RequestError, match="prompt"):
            model.generate([wrong])


def test_a_trained_model_says_what_its_reference_says(assets, tmp_path):
    """stories260K: 199 greedy tokens by transformers, through prefill, cache and both capacities."""
    from jaxml.recipes.importing import import_model

    folder = assets / "stories260k-hf"
    import_model(folder, tmp_path / "stories")
    reference = json.loads((folder / "reference.json").read_text())
    stories = LanguageModel.open(tmp_path / "stories")
    (answer,) = stories.generate([[1]], temperature=0.0, max_tokens=199)
    assert [1, *answer.tokens] == reference["greedy_ids_from_bos_200"]
    assert answer.text.startswith("Once upon a time")
