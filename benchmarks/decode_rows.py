"""Measures the rows of `benchmarks/run.py decode`: tokens a second against the bound, transformers and llama.cpp.

Reads `interleave`, `plan`, `published`; what the rows must reach and how the page tells it stands in `verbs`.

Every rival is a process of its own in each turn, so that none keeps another's memory or threads; the models are written
once. A Llama is one published directory that all three load; GPT-2's shape has random weights on either side.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import published
from benchmarks.interleave import Row, take_turns
from benchmarks.plan import ASSETS, HERE, JAXML, Plan, num_cores, script, told
from benchmarks.processes import MeasurementError, environment, run_json

STORIES_CONFIG = published.llama_config(
    vocab_size=512, context=512, width=64, layers=5, heads=8, kv_heads=4, mlp_width=172
)
LLAMA_CONFIG = published.llama_config(
    vocab_size=32_000, context=1024, width=768, layers=12, heads=12, kv_heads=12, mlp_width=2048
)
BATCHES = (1, 8)
QUICK_TOKENS = 16


@dataclass(frozen=True)
class Model:
    """What is decoded. `torch`: what `torch_decode` takes, a word or the directory of a Llama; `gguf` None: llama.cpp has
    no such model. `is_trained`: rounding does not change its greedy answer, so that all rivals must give the same."""

    name: str
    num_tokens: int
    rows: tuple[int, ...]
    checkpoint: Path
    torch: str
    gguf: Path | None = None
    is_trained: bool = False


def stories(plan: Plan) -> list[Row]:
    """260K parameters: the trained model of the assets, or a random one of its shape."""
    place = ASSETS / "stories260k-hf"
    is_trained = place.is_dir()
    if not is_trained:
        place = published.write(plan.directory("stories"), STORIES_CONFIG, published.random_llama(STORIES_CONFIG))
    return _measured(plan, replace(_llama(plan, "stories260k", place, BATCHES, 199), is_trained=is_trained))


def gpt2(plan: Plan) -> list[Row]:
    """The shape of GPT-2 124M, random weights."""
    checkpoint = plan.directory("gpt2") / "checkpoint"
    run_json([sys.executable, str(HERE / "random_checkpoint.py"), "gpt2_124m", str(checkpoint)], environment())
    return _measured(plan, Model("gpt2-124m", 64, BATCHES, checkpoint, torch="gpt2"))


def llama(plan: Plan) -> list[Row]:
    """The same size as a Llama, random weights: what llama.cpp can run."""
    place = published.write(plan.directory("llama"), LLAMA_CONFIG, published.random_llama(LLAMA_CONFIG))
    return _measured(plan, _llama(plan, "llama-12x768", place, (1,), 64))


SECTIONS: dict[str, Callable[[Plan], list[Row]]] = {"stories": stories, "gpt2": gpt2, "llama": llama}


def _llama(plan: Plan, name: str, place: Path, rows: tuple[int, ...], num_tokens: int) -> Model:
    """A published Llama as a checkpoint and, where the peers are, as GGUF."""
    folder = plan.directory(name)
    run_json([*JAXML, "import", str(place), "--out", str(folder / "checkpoint"), "--json"], environment())
    gguf = None
    if not plan.without_peers(f"llama.cpp {name}, jaxml / llama.cpp {name}"):
        assert plan.peers_python is not None
        gguf = folder / f"{name}.gguf"
        run_json([plan.peers_python, str(HERE / "gguf_llama.py"), str(place), str(gguf)], environment())
    return Model(name, num_tokens, rows, folder / "checkpoint", str(place), gguf)


def _measured(plan: Plan, model: Model) -> list[Row]:
    """Turns of all rivals on one model, then its rows. The model's files are removed."""
    num_tokens = QUICK_TOKENS if plan.is_quick else model.num_tokens
    flags = ["--tokens", str(num_tokens), "--threads", str(num_cores()), *(["--quick"] if plan.is_quick else [])]
    batches = ["--rows", *map(str, model.rows)]
    cache = ["--cache", str(plan.directory("cache"))]
    rivals = {"jaxml": script(plan, sys.executable, "jaxml_decode.py", str(model.checkpoint), *flags, *batches, *cache)}
    if not plan.without_torch(f"transformers {model.name}, jaxml / transformers {model.name}"):
        assert plan.torch_python is not None
        rivals["transformers"] = script(plan, plan.torch_python, "torch_decode.py", model.torch, *flags, *batches)
    if model.gguf is not None:
        assert plan.peers_python is not None
        rivals["llama.cpp"] = script(plan, plan.peers_python, "llama_cpp_decode.py", str(model.gguf), *flags)
    telling = {name: told(f"{name} {model.name}", run) for name, run in rivals.items()}
    samples = take_turns(telling, plan.repeats, warm_ups=0)
    shutil.rmtree(model.checkpoint.parent)
    if model.is_trained:
        check_answers(model.name, {name: found[0]["tokens"] for name, found in samples.items()})
    return rows_of(model.name, model.rows, samples)


def check_answers(model: str, answers: dict[str, list[int]]) -> None:
    """Raises MeasurementError when the rivals' greedy answers differ: then they did not run the same model."""
    first, *others = answers
    for other in others:
        if answers[other] != answers[first]:
            pairs = zip(answers[first], answers[other], strict=False)
            same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(answers[first]))
            raise MeasurementError([other, model], f"the greedy tokens of {first}", f"the same {same} first ones only")


def rows_of(model: str, batches: tuple[int, ...], samples: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Bandwidth, then for each batch: our speed, the bound and our share of it, each rival's speed and the ratio to it.

    A sample without a batch's number, as those of llama.cpp for 8 rows, has no row. Shares and ratios go turn by turn.
    """
    ours = samples["jaxml"]
    rows = [Row(f"matrix-vector bandwidth, {model}", "GB/s", tuple(sample["vector_gbytes_per_s"] for sample in ours))]
    for batch in batches:
        speed, case = f"tokens_per_s_{batch}", f"{model}, {batch} row{'s' if batch > 1 else ''}"
        bounds = tuple(sample[f"bound_{batch}"] for sample in ours)
        speeds = tuple(sample[speed] for sample in ours)
        rows.append(Row(f"jaxml {case}", "tokens/s", speeds))
        rows.append(Row(f"bound {case}", "tokens/s", bounds))
        shares = tuple(got / bound for got, bound in zip(speeds, bounds, strict=True))
        rows.append(Row(f"jaxml / bound {case}", "ratio", shares))
        for rival, found in samples.items():
            if rival == "jaxml" or speed not in found[0]:
                continue
            theirs = tuple(sample[speed] for sample in found)
            rows.append(Row(f"{rival} {case}", "tokens/s", theirs))
            ratios = tuple(got / other for got, other in zip(speeds, theirs, strict=True))
            rows.append(Row(f"jaxml / {rival} {case}", "ratio", ratios))
    return rows
