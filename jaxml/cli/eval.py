"""`jaxml eval CKPT`: the loss on a text, the result on a set of questions, or the loss on the run's held-out data.

Reads `infer.evaluation`, `infer.eval_sets` and, for the last, `recipes.held_out`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.cli.score import read_text
from jaxml.errors import ConfigError

DESCRIPTION = """Evaluate the model of a checkpoint: on the data that its run held out, or

  --text FILE   on a text: nats a token, perplexity, bits per byte, over an exact count of tokens and bytes
  --set FILE    on a set in JSONL: multiple choice (query, choices, gold; context_options, continuation, gold) or exact
                match (context, continuation; context, answer, aliases), with standard errors"""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, open, evaluate; returns the numbers."""
    options = parser("eval", DESCRIPTION)
    options.add_argument("path", metavar="CKPT", help="run directory, checkpoints folder or step folder")
    what = options.add_mutually_exclusive_group()
    what.add_argument("--text", metavar="FILE", help="a UTF-8 text")
    what.add_argument("--set", metavar="FILE", help="a JSONL file of items")
    options.add_argument("--stride", type=int, help="--text: tokens between windows (default: half the context)")
    options.add_argument("--limit", type=int, help="--set: only its first items")
    options.add_argument("--delimiter", help="--set: what stands between context and continuation (default: a space)")
    options.add_argument("--max-tokens", type=int, help="--set: the longest answer that is generated (default 32)")
    given = options.parse_args(arguments)
    _refuse_idle_flags(given)
    text = None if given.text is None else read_text(given.text)
    from jaxml.devices.start import tune_allocator, use_compilation_cache

    tune_allocator()
    use_compilation_cache(cache_directory())
    if text is not None:
        return _text(given, text), 0
    return (_held_out(given) if given.set is None else _set(given)), 0


def _refuse_idle_flags(given: argparse.Namespace) -> None:
    """A flag that would do nothing is a mistake."""
    owners = {"stride": "text", "limit": "set", "delimiter": "set", "max_tokens": "set"}
    for name, owner in owners.items():
        if getattr(given, name) is not None and getattr(given, owner) is None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(flag, expected=f"--{owner} beside it", got="nothing", todo=f"leave {flag} out")


def _text(given: argparse.Namespace, text: str) -> dict[str, Any]:
    from jaxml.infer.evaluation import evaluate_text
    from jaxml.infer.opening import open_checkpoint

    found = evaluate_text(open_checkpoint(given.path), text, given.stride)
    return {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "num_tokens": found.num_tokens,
        "num_bytes": found.num_bytes,
        "num_windows": found.num_windows,
    }


def _set(given: argparse.Namespace) -> dict[str, Any]:
    from jaxml.infer.eval_sets import Choice, Match, evaluate_choices, evaluate_matches, read_set
    from jaxml.infer.language_model import LanguageModel
    from jaxml.infer.opening import open_checkpoint

    items = read_set(given.set, given.limit)
    chosen = {name: value for name in ("delimiter", "max_tokens") if (value := getattr(given, name)) is not None}
    choices = [item for item in items if isinstance(item, Choice)]
    if choices and "max_tokens" in chosen:
        raise ConfigError("--max-tokens", expected="a set of answers", got="one of choices", todo="leave it out")
    if choices:
        found = evaluate_choices(open_checkpoint(given.path), choices, **chosen)
    else:
        matches = [item for item in items if isinstance(item, Match)]
        found = evaluate_matches(LanguageModel.open(given.path), matches, **chosen)
    result: dict[str, Any] = {"kind": found.kind, "num_items": found.num_items, "num_cut": found.num_cut}
    lines = [f"{found.kind}, {found.num_items} items, {found.num_cut} cut at the front to fit into the context"]
    for name, estimate in found.estimates.items():
        result |= {name: estimate.value, f"{name}_standard_error": estimate.standard_error}
        lines.append(f"{name} {estimate.value:.4f} +- {estimate.standard_error:.4f}")
    return {"text": "\n".join(lines), **result}


def _held_out(given: argparse.Namespace) -> dict[str, Any]:
    from jaxml.recipes.held_out import evaluate_held_out

    return dict(evaluate_held_out(given.path, sys.stderr))
