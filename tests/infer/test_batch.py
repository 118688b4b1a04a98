"""Requests that share a batch get the answers that they would get alone, and the model's own full forward pass agrees."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest

from jaxml.errors import RequestError
from jaxml.infer.batch import Batch
from jaxml.infer.decode import generate
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.request import GREEDY, Event, Request, Sampling

PROMPTS = [(65,), (66, 67, 68), tuple(range(30, 110)), (1, 2), (200,) * 17, (9, 8, 7)]
SEEDED = Sampling(max_tokens=12, temperature=0.9, top_p=0.95, frequency_penalty=0.2, num_logprobs=2)


def run(batch: Batch, requests: list[Request]) -> dict[str, list[Event]]:
    """All events by request; each joins as soon as there is a place."""
    found: dict[str, list[Event]] = {request.id: [] for request in requests}
    waiting = list(requests)
    while waiting or batch.is_busy:
        while waiting and batch.has_place:
            batch.add(waiting.pop(0))
        for event in batch.step():
            found[event.id].append(event)
    return found


def tokens_of(events: list[Event]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.tokens)


def requests_of(sampling: Sampling) -> list[Request]:
    return [
        Request(str(index), prompt, dataclasses.replace(sampling, seed=index, max_tokens=5 + 3 * index))
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def alone(model: LanguageModel) -> dict[str, list[Event]]:
    """Every request in a batch of its own."""
    return {request.id: run(Batch(model, 1), [request])[request.id] for request in requests_of(SEEDED)}


def test_requests_that_join_and_leave_are_answered_as_if_alone(model, alone):
    together = run(Batch(model, 3, target_s=0.001), requests_of(SEEDED))
    for id, events in together.items():
        assert tokens_of(events) == tokens_of(alone[id])
        assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
        assert events[-1].num_tokens == 5 + 3 * int(id)
        assert "".join(event.text for event in events) == "".join(event.text for event in alone[id])


def test_log_probabilities_are_those_of_the_full_forward_pass(model, alone):
    """Of every token, at every place, over prompts that need several pieces and rows that joined at different times."""
    bound = model.opened.bound
    together = run(Batch(model, 3), requests_of(SEEDED))

    @jax.jit
    def log_probs(params, tokens, positions, segments):
        module = bound.bind(params)
        return jax.nn.log_softmax(module.logits(module(tokens, positions, segments)[0]))

    for request in requests_of(SEEDED):
        events = together[request.id]
        whole = (*request.prompt, *tokens_of(events))
        row = np.zeros((1, 128), np.int32)
        row[0, : len(whole)] = whole
        positions = np.arange(128, dtype=np.int32)[None]
        expected = np.asarray(log_probs(model.opened.params, row, positions, np.ones_like(row)))[0]
        items = [item for event in events for item in event.logprobs]
        for place, item in enumerate(items, len(request.prompt) - 1):
            np.testing.assert_allclose(item.logprob, expected[place, item.token], atol=1e-4)
            assert [token for token, _ in item.top] == np.argsort(-expected[place])[:2].tolist()


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(model):
    sampling = dataclasses.replace(SEEDED, max_tokens=10)
    answers = [model.generate([PROMPTS[0]], dataclasses.replace(sampling, seed=seed))[0].tokens for seed in (5, 5, 6)]
    assert answers[0] == answers[1] != answers[2]
    unseeded = {model.generate([PROMPTS[0]], sampling)[0].tokens for _ in range(3)}
    assert len(unseeded) > 1


def test_an_answer_grows_past_the_first_capacity_up_to_the_context(model):
    """Greedy to the end of the context: the cache is copied to a larger one on the way, beside a short neighbour."""
    long = Request("long", (65, 66, 67), GREEDY)
    short = Request("short", (70,), dataclasses.replace(GREEDY, max_tokens=4))
    events = run(Batch(model, 2), [long, short])
    tokens = tokens_of(events["long"])
    assert len(tokens) == model.context_length - 3
    assert events["long"][-1].finish_reason == "length"
    bound = model.opened.bound
    whole = np.array([(65, 66, 67, *tokens)], np.int32)
    positions = np.arange(whole.shape[1], dtype=np.int32)[None]
    module = jax.jit(lambda params, *row: bound.bind(params).logits(bound.bind(params)(*row)[0]))
    logits = np.asarray(module(model.opened.params, whole, positions, np.ones_like(whole)))[0]
    assert logits[2:-1].argmax(-1).tolist() == list(tokens)


def test_places_are_free_again_after_leaving_in_any_state(model):
    batch = Batch(model, 2)
    joining, running = Request("joining", PROMPTS[2]), Request("running", (65,))
    batch.add(running)
    batch.step()
    batch.add(joining)
    assert batch.num_places == 0
    assert batch.remove("joining")
    assert batch.num_places == 1
    assert batch.remove("running")
    assert (batch.num_places, batch.is_busy) == (2, False)
    assert not batch.remove("running")
    assert tokens_of(run(batch, [Request("next", (65,), dataclasses.replace(GREEDY, max_tokens=6))])["next"])


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


def test_the_pure_jitted_generate_gives_the_same_tokens(model):
    """Ragged prompts in one traced call, for scripts that roll out inside their own `jit`."""
    prompts = [PROMPTS[1], PROMPTS[4]]
    sampling = dataclasses.replace(SEEDED, max_tokens=9, seed=2)
    rows = [model.make_row(Request("", prompt, sampling)) for prompt in prompts]
    padded = np.full((2, 17), 3, np.int32)
    for index, prompt in enumerate(prompts):
        padded[index, : len(prompt)] = prompt
    run_jitted = jax.jit(partial(generate, model.bound, max_tokens=9))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
    tokens, counts = run_jitted(model.params, padded, lengths, together)
    for index, prompt in enumerate(prompts):
        expected = model.generate([prompt], sampling)[0].tokens
        assert tuple(np.asarray(tokens)[index, : int(counts[index])].tolist()) == expected


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
