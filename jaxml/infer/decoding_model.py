"""A causal language model laid out for decoding: parameters prepared, functions jitted, prompts checked.

Reads `infer.opening`, `infer.decode` and `models.unrolled`; `infer.runner` and `infer.beam` compute with it, and
`infer.language_model` is what scripts see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxml.checkpoint.probe import check
from jaxml.errors import CheckpointError, RequestError
from jaxml.infer.decode import prefill
from jaxml.infer.opening import Opened
from jaxml.infer.request import Request
from jaxml.infer.sealed import probe_batch, products
from jaxml.infer.text import encode_prompt
from jaxml.inputs.tokenizers import Tokenizer
from jaxml.models.build import BoundModel, bind_model
from jaxml.models.cache import Cache, empty_cache
from jaxml.models.check import decoder_of
from jaxml.models.spec import DecoderSpec, ExecutionSpec
from jaxml.models.unrolled import for_decoding, out_in, unrolled_params, unrolled_spec
from jaxml.numerics.precision import cast_floating
from jaxml.numerics.spec import PrecisionSpec

PIECES = (16, 64, 256)  # tokens of a prompt that one prefill takes; every size is compiled once
Prompt = str | Sequence[int]


class DecodingModel:
    """Parameters in the layout for decoding, and the jitted functions over them. Not for several threads at once.

    `pieces`: the lengths that prefill is compiled for; `capacity`: tokens that a row of a cache holds.
    """

    def __init__(self, opened: Opened):
        spec = opened.model
        if not isinstance(spec, DecoderSpec) or not spec.is_causal:
            raise CheckpointError(
                f"generating with {opened.described.directory}",
                expected="a causal decoder with a vocabulary head",
                got=type(spec).__name__ if not isinstance(spec, DecoderSpec) else "a bidirectional decoder",
                todo="use `jaxml predict` for a classifier, or name a language model",
            )
        self.opened = opened
        self.tokenizer: Tokenizer | None = opened.tokenizer
        self.context_length, self.vocab_size = spec.context_length, spec.vocab_size
        self.bound: BoundModel = for_decoding(bind_model(unrolled_spec(spec), _precision(opened), ExecutionSpec()))
        self.params: dict[str, Any] = _prepare(opened, self.bound)
        small = -(-self.context_length // PIECES[0]) * PIECES[0]
        self.pieces = tuple(dict.fromkeys(min(size, small) for size in PIECES))
        self.capacity = -(-self.context_length // self.pieces[-1]) * self.pieces[-1]
        eos = None if opened.tokenizer is None else opened.tokenizer.eos_id
        self.eos = () if eos is None else (eos,)
        self._prefill = jax.jit(partial(prefill, self.bound), donate_argnums=4)
        self.beam_step: Callable[..., Any] | None = None  # made at first use by `infer.beam`
        self._check_layout()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a prompt, with the token that begins a text if the tokenizer has one; ids are taken as they are.

        Raises RequestError: no tokens, ids outside the vocabulary, characters that the tokenizer does not have.
        """
        if isinstance(prompt, str):
            ids = encode_prompt(self.opened.require_tokenizer(), prompt)
        else:
            ids = [int(token) for token in prompt]
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if not ids or outside:
            raise RequestError(
                "prompt",
                expected=f"at least one token id from 0 to {self.vocab_size - 1}",
                got=f"ids {outside[:5]}" if outside else "no tokens",
                todo="encode the prompt with the model's own tokenizer",
            )
        return tuple(ids)

    def limit(self, request: Request) -> int:
        """The most tokens that can be generated for a request: its own ceiling, or what fits into the context.

        Raises RequestError for a prompt that leaves no room.
        """
        left = self.context_length - len(request.prompt)
        if left < 1:
            raise RequestError(
                "prompt",
                expected=f"at most {self.context_length - 1} tokens: the context has {self.context_length}, 1 is generated",
                got=f"{len(request.prompt)} tokens",
                todo=f"shorten it by {1 - left}",
            )
        return left if request.sampling.max_tokens is None else min(request.sampling.max_tokens, left)

    def empty_cache(self, num_rows: int, capacity: int) -> Cache:
        """A cache for `num_rows` rows of at most `capacity` tokens."""
        return empty_cache(self.bound.spec, num_rows, capacity, self.bound.policy.compute)  # type: ignore[arg-type]

    def prefill(self, prompt: Sequence[int], start: int, cache: Cache) -> tuple[jax.Array, Cache, int]:
        """One piece of a prompt, from `start`, into a cache of one row, which is donated: (logits [1, V] of the piece's
        last token, cache, tokens of the prompt that are done)."""
        end = min(start + self.pieces[-1], len(prompt))
        size = next(size for size in self.pieces if size >= end - start)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : end - start] = prompt[start:end]
        last = np.array([end - start - 1], np.int32)
        logits, cache = self._prefill(self.params, tokens, np.int32(start), last, cache)
        return logits, cache, end

    def _check_layout(self) -> None:
        """Refuse to go on when decoding would not give the sealed logits: the probe, through the cache."""
        tokens = probe_batch(self.opened.bound)["tokens"]

        def logits(params: Any) -> jax.Array:
            decoder = self.bound.bind(params)
            cache = empty_cache(self.bound.spec, *tokens.shape, self.bound.policy.compute)  # type: ignore[arg-type]
            return decoder.logits(decoder.extend(tokens, jnp.int32(0), cache)[0])

        compute = products(self.bound.policy, decoder_of(self.bound.spec).quantization)
        sealed = self.opened.manifest.probe
        got = np.asarray(jax.jit(logits)(self.params)).astype(sealed["dtype"])
        faults = check(sealed, got, compute=compute, layout="decoding")
        if faults:
            raise CheckpointError.from_faults(faults)


def _precision(opened: Opened) -> PrecisionSpec:
    """The dtype that decodes fastest and loses nothing: on CPUs half-precision products fall into slow loops."""
    compute = opened.bound.policy.compute.name
    if jax.default_backend() == "cpu" and compute in ("bfloat16", "float16"):
        compute = "float32"
    return PrecisionSpec(compute=compute)  # type: ignore[arg-type]


def _prepare(opened: Opened, bound: BoundModel) -> dict[str, Any]:
    """The canonical parameters, unrolled and cast, on one device."""
    spec, dtype = opened.model, bound.policy.compute
    assert isinstance(spec, DecoderSpec)
    with jax.set_mesh(opened.mesh):
        prepare = jax.jit(lambda params: out_in(cast_floating(unrolled_params(spec, params), dtype)))
        prepared = prepare(opened.params)
    # Through the host, so that they are committed to no device: programs are compiled again for arguments that are.
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), prepared)
