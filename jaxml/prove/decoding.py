"""Claim 5 for a language model: cached decoding equals the forward pass, batched equals single.

Reads `infer.language_model`, `infer.decode` and `prove.parting`; `prove.prove` runs it on the straight run's last checkpoint.
Two forms of one decoding are compared with the forward pass over held-out rows: prompts of different lengths as prefill
takes them, then the true tokens one by one, each row at its own position.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxml.data.batches import EvalBatches
from jaxml.infer.decode import decode_step, prefill
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.opening import Opened
from jaxml.infer.request import Sampling
from jaxml.models.build import BoundModel, bind_model
from jaxml.models.cache import empty_cache
from jaxml.models.check import decoder_of
from jaxml.models.spec import ExecutionSpec
from jaxml.models.unrolled import unrolled_params, unrolled_spec
from jaxml.numerics.spec import PrecisionSpec
from jaxml.prove.claims import BOUND, PARTED, Claim, Parting, distances, exact
from jaxml.prove.named_values import named_values, naming
from jaxml.prove.parting import in_layers
from jaxml.prove.subject import Subject

GROUP = "decoding equals the forward pass"
ROWS, PROMPTS = 3, (5, 1, 9)  # rows that are decoded together, and the tokens of each that prefill takes
MAX_TOKENS = 12
SAMPLINGS = (Sampling(temperature=0.0, max_tokens=MAX_TOKENS), Sampling(seed=7, max_tokens=MAX_TOKENS, top_p=0.9))


def cached(subject: Subject, opened: Opened) -> Claim:
    """The logits at every position from the last token of the prompt on."""
    rows = held_out_rows(subject)
    errors = {}
    for precision in reversed(subject.precisions):
        spec = PrecisionSpec(precision, precision)  # type: ignore[arg-type]
        forward = _forward(bind_model(opened.model, spec, ExecutionSpec()), opened.params, rows)
        steps = _stepped(*_decoding(opened, spec), rows)
        is_known = ~np.isnan(steps)
        pair = (np.where(is_known, steps, 0), np.where(is_known, forward, 0))
        errors[precision] = distances({"logits": pair[0]}, {"logits": pair[1]})["logits"]
    detail = f"{ROWS} rows of {rows.shape[1]} tokens, prompts of {', '.join(map(str, PROMPTS))}"
    claim = Claim(GROUP, "cached logits", errors["float64"], BOUND, detail, errors.get("float32"))
    if claim.verdict == "pass":
        return claim
    return replace(claim, parting=_parting(opened, rows))


def batched(subject: Subject, model: LanguageModel) -> Claim:
    """The same tokens for several prompts together as for each alone, greedy and sampled."""
    prompts = [row[:length].tolist() for row, length in zip(held_out_rows(subject), PROMPTS, strict=True)]
    faults = []
    for sampling in SAMPLINGS:
        together = model.generate(prompts, sampling)
        for prompt, answer in zip(prompts, together, strict=True):
            alone = model.generate([prompt], sampling)[0]
            if alone.tokens != answer.tokens:
                what = f"prompt of {len(prompt)} tokens, temperature {sampling.temperature:g}"
                faults.append(f"{what}: {answer.tokens} among others, {alone.tokens} alone")
    return exact(GROUP, "batched is single", faults, f"{len(prompts)} prompts, {MAX_TOKENS} tokens, greedy and sampled")


def held_out_rows(subject: Subject) -> np.ndarray:
    """Held-out tokens [ROWS, T]; what a row lacks is filled with its first token."""
    batch = EvalBatches(subject.prepared, ROWS).batch(0)
    tokens, segments = batch["tokens"], batch["segment_ids"]
    return np.where(segments > 0, tokens, tokens[:, :1]).astype(np.int32)


def _forward(bound: BoundModel, params: Any, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(partial(_forward_logits, bound))(_in(bound, params), tokens))


def _forward_logits(bound: BoundModel, params: Any, tokens: Any) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    model = bound.bind(params)
    features, _ = model(tokens, positions, jnp.ones_like(tokens), None)
    return model.logits(features)


def _stepped(bound: BoundModel, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [ROWS, T, V] through the cache; NaN before the last token of a row's prompt."""
    params, num_tokens = _in(bound, params), tokens.shape[1]
    lengths = np.minimum(np.array(PROMPTS, np.int32), num_tokens)
    spec = decoder_of(bound.spec)
    cache = empty_cache(spec, ROWS, num_tokens, bound.policy.compute)
    first = tokens[:, : lengths.max()]
    logits, cache = jax.jit(partial(prefill, bound))(params, first, jnp.int32(0), lengths - 1, cache)
    found = np.full((*tokens.shape, logits.shape[-1]), np.nan)
    rows = np.arange(ROWS)
    found[rows, lengths - 1] = np.asarray(logits)
    step = jax.jit(partial(decode_step, bound))
    for offset in range(num_tokens - int(lengths.min())):
        # A row that is at its end takes its last token again, at its place.
        positions = np.minimum(lengths + offset, num_tokens - 1).astype(np.int32)
        logits, cache = step(params, tokens[rows, positions], positions, cache)
        found[rows, positions] = np.asarray(logits)
    return found


def _decoding(opened: Opened, precision: PrecisionSpec) -> tuple[BoundModel, Any]:
    """The model and its parameters in the layout for decoding."""
    spec = decoder_of(opened.model)
    return bind_model(unrolled_spec(spec), precision, ExecutionSpec()), unrolled_params(spec, opened.params)


def _in(bound: BoundModel, params: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), bound.policy.params), params)


def _parting(opened: Opened, tokens: np.ndarray) -> Parting | None:
    """The first value, of those that both ways name, that is not the same: token by token through the cache against the
    forward pass."""
    spec, precision = decoder_of(opened.model), PrecisionSpec("float64", "float64")
    forward = partial(_forward_logits, bind_model(opened.model, precision, ExecutionSpec()))
    expected = in_layers(named_values(forward, (opened.params, tokens), opened.mesh), spec)
    bound, params = _decoding(opened, precision)
    cache = empty_cache(decoder_of(bound.spec), ROWS, tokens.shape[1], bound.policy.compute)
    step, by_token = jax.jit(partial(decode_step, bound)), []
    names = naming(partial(decode_step, bound), (params, tokens[:, 0], np.zeros(ROWS, np.int32), cache), opened.mesh)
    for place in range(tokens.shape[1]):
        arguments = (params, tokens[:, place], np.full(ROWS, place, np.int32), cache)
        by_token.append(in_layers(names(arguments), spec))
        _, cache = step(*arguments)
    got = {
        same[0].name: np.stack([step.value.reshape(ROWS, -1) for step in same], axis=1)
        for same in zip(*by_token, strict=True)
    }
    both = {step.name: step for step in expected if step.name in got}
    errors = distances(
        {name: got[name].reshape(step.value.shape) for name, step in both.items()},
        {name: step.value for name, step in both.items()},
    )
    parted = (
        Parting(name, step.made_by, errors[name]) for name, step in both.items() if not errors[name] <= PARTED * BOUND
    )
    return next(parted, None)
