"""From a checkpoint to a smaller one that is nearly as good, or none at all: `jaxml quantize`.

Reads `compress.weights`, `recipes.agreement`, `infer.decoding_model`, `infer.sealed` and `checkpoint.store`;
`cli.quantize` prints the report.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxml import trees
from jaxml.checkpoint.folders import resolve
from jaxml.checkpoint.leaves import describe_leaves
from jaxml.checkpoint.manifest import Manifest, leaf_faults
from jaxml.checkpoint.probe import record
from jaxml.checkpoint.store import CheckpointStore
from jaxml.compress.weights import quantized_params
from jaxml.config.spec import to_json
from jaxml.errors import CheckpointError, ConfigError, Fault
from jaxml.infer.decoding_model import DecodingModel
from jaxml.infer.opening import Opened, open_checkpoint
from jaxml.infer.scoring import language_model_spec
from jaxml.infer.sealed import circumstances, probe_function
from jaxml.models.build import BoundModel, bind_model
from jaxml.models.spec import Quantization
from jaxml.observe.progress import Stream
from jaxml.recipes.agreement import Agreement, compare, pieces_of_run, pieces_of_text
from jaxml.recipes.quantized import QuantizedModel
from jaxml.tasks.spec import LanguageModeling

MAX_PERPLEXITY_INCREASE = 0.05
MAX_TOKENS = (
    16_384  # of held-out text: the perplexity of so many differs by some percent from text to text, its ratio by less
)


@dataclass(frozen=True)
class QuantizeReport:
    """What was written and what it cost. Bytes are of the arrays; perplexities, the share of places with the same most
    likely token and the largest error of a logit are over `num_tokens` held-out tokens."""

    checkpoint: str
    scheme: str
    bytes_before: int
    bytes_after: int
    perplexity_before: float
    perplexity_after: float
    perplexity_increase: float
    greedy_agreement: float
    largest_logit_error: float
    num_tokens: int
    probe: str
    seal: str


def quantize_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    scheme: Quantization,
    stream: Stream,
    *,
    text: str | None = None,
    max_perplexity_increase: float = MAX_PERPLEXITY_INCREASE,
    max_tokens: int = MAX_TOKENS,
) -> QuantizeReport:
    """Write the language model at `path` to `out`, its matrices in int8, as a sealed checkpoint of the same step.

    It is judged on `text`, or else on what the run held out. Raises CheckpointError, with nothing written: a perplexity
    that grows by more than the share `max_perplexity_increase`, an `out` that is not empty, a model that is no language
    model or is quantized already, or has numbers that are not finite; ConfigError: a limit out of range, no held-out text.
    """
    _check_limits(max_perplexity_increase, max_tokens)
    store = resolve(out)
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        got = "files in it" if store.is_dir() else "a file"
        raise CheckpointError(f"--out {store}", expected="a new or empty directory", got=got, todo="name another one")
    before = open_checkpoint(path)
    _check_source(before)
    if text is None:
        pieces = pieces_of_run(before, max_tokens, stream)
    else:
        pieces = pieces_of_text(before, text, max_tokens)
    after = _quantized(before, scheme)
    agreement = compare(before, after, pieces)
    if not agreement.perplexity_increase <= max_perplexity_increase:
        raise CheckpointError(
            f"the perplexity of {scheme} over {agreement.num_tokens} held-out tokens",
            expected=f"at most {100 * max_perplexity_increase:g} % above {agreement.perplexity_before:.4f}",
            got=f"{agreement.perplexity_after:.4f}, {100 * agreement.perplexity_increase:.2f} % above; nothing is written",
            todo="try int8-weights, or raise --max-perplexity-increase if the loss is acceptable",
        )
    sizes = {"bytes_before": trees.num_bytes(before.params), "bytes_after": trees.num_bytes(after.params)}
    measured = {**sizes, **_numbers(agreement)}
    manifest = dataclasses.replace(after.manifest, metrics={name: float(value) for name, value in measured.items()})
    DecodingModel(after)  # Raises when decoding would not give the logits that are sealed.
    files = None if before.tokenizer is None else before.tokenizer.files()
    with CheckpointStore(store) as checkpoints:
        checkpoints.save(manifest.step, {"params": after.params}, manifest, files)
    return QuantizeReport(
        checkpoint=str(store / str(manifest.step)),
        scheme=scheme,
        **measured,
        probe=manifest.probe["sha256"],
        seal=manifest.seal,
    )


def _numbers(agreement: Agreement) -> dict[str, Any]:
    names = ("perplexity_before", "perplexity_after", "perplexity_increase", "greedy_agreement")
    return {name: getattr(agreement, name) for name in (*names, "largest_logit_error", "num_tokens")}


def _check_limits(max_perplexity_increase: float, max_tokens: int) -> None:
    if not 0 <= max_perplexity_increase < math.inf:
        raise ConfigError(
            "--max-perplexity-increase",
            expected="a share, at least 0: 0.05 is 5 %",
            got=str(max_perplexity_increase),
            todo="leave it out for 0.05",
        )
    if max_tokens < 1:
        raise ConfigError("--max-tokens", expected="at least 1", got=str(max_tokens), todo="leave it out")


def _check_source(before: Opened) -> None:
    spec = language_model_spec(before)
    where = f"the model of {before.described.directory}, step {before.described.step}"
    if spec.quantization is not None:
        todo = "quantize the checkpoint that it was made of"
        raise CheckpointError(where, expected="floating-point weights", got=spec.quantization, todo=todo)
    bad = trees.first_nonfinite(before.params)
    if bad is not None:
        todo = "take an earlier checkpoint"
        raise CheckpointError(where, expected="finite weights", got=f"NaN or infinities in {bad}", todo=todo)


def _quantized(before: Opened, scheme: Quantization) -> Opened:
    """The model in int8, sealed by its own probe, as if it had been opened."""
    described = before.described
    spec = dataclasses.replace(language_model_spec(before), quantization=scheme)
    bound = bind_model(spec, described.precision, before.bound.execution)
    with jax.set_mesh(before.mesh):
        params = quantized_params(bound, before.params)
    faults: list[Fault] = leaf_faults("params", describe_leaves(bound.abstract_params), describe_leaves(params))
    if faults:
        raise CheckpointError.from_faults(faults)
    manifest = _manifest(before, bound, params, scheme)
    made = dataclasses.replace(described, manifest=manifest, model=spec, execution=bound.execution)
    return Opened(made, bound, params, before.mesh, before.tokenizer)


def _manifest(before: Opened, bound: BoundModel, params: dict[str, Any], scheme: Quantization) -> Manifest:
    described, sealed = before.described, before.manifest
    assert isinstance(described.task, LanguageModeling)
    model = QuantizedModel(described.name, bound.spec, described.task, described.precision, bound.execution)  # type: ignore[arg-type]
    with jax.set_mesh(before.mesh):
        logits = np.asarray(jax.jit(probe_function(bound, model.task))(params))
    made = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "mode": "quantize",
        "scheme": scheme,
        "source_step": sealed.step,
        "source_seal": sealed.seal,
    }
    return dataclasses.replace(
        sealed,
        experiment=to_json(model),
        lineage=(*sealed.lineage, made),
        leaves={"params": describe_leaves(params)},
        probe=record(logits, **circumstances(before.mesh.shape, model.execution, model.precision, scheme)),
        backend=jax.default_backend(),
        metrics={},
    )
