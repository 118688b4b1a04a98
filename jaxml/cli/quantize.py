"""`jaxml quantize CKPT --scheme int8 --out CKPT`: a checkpoint with int8 weights. Reads `recipes.quantizing`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.cli.score import read_text
from jaxml.models.spec import Quantization

if TYPE_CHECKING:
    from jaxml.recipes.quantizing import QuantizeReport

DESCRIPTION = """Write the language model of a checkpoint with its matrices in int8, as a checkpoint of its own.

  --scheme int8          int8 products: activations are rounded to int8 as they come
  --scheme int8-weights  int8 weights alone: less loss, less speed

It is compared with the model that it was made of on held-out text: --text FILE, or else the data that its run held out.
One whose perplexity grows by more than --max-perplexity-increase is not written."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, quantize, and return the report."""
    options = parser("quantize", DESCRIPTION)
    options.add_argument("path", metavar="CKPT", help="run directory, checkpoints folder or step folder")
    options.add_argument("--scheme", required=True, choices=get_args(Quantization))
    options.add_argument("--out", required=True, metavar="CKPT", help="directory of the checkpoint, new or empty")
    options.add_argument("--text", metavar="FILE", help="a UTF-8 text that the model was not trained on")
    options.add_argument("--max-perplexity-increase", type=float, help="a share (default 0.05: 5 %%)")
    options.add_argument("--max-tokens", type=int, help="compare on so many held-out tokens at most (default 16384)")
    given = options.parse_args(arguments)
    text = None if given.text is None else read_text(given.text)
    from jaxml.devices.start import tune_allocator, use_compilation_cache
    from jaxml.recipes.quantizing import quantize_checkpoint

    tune_allocator()
    use_compilation_cache(cache_directory())
    limits = {name: getattr(given, name) for name in ("max_perplexity_increase", "max_tokens")}
    chosen = {name: value for name, value in limits.items() if value is not None}
    report = quantize_checkpoint(given.path, given.out, given.scheme, sys.stderr, text=text, **chosen)
    return {"text": _text(report), **asdict(report)}, 0


def _text(report: QuantizeReport) -> str:
    lines = [
        f"{report.checkpoint} ({report.scheme})",
        f"  bytes: {report.bytes_before:,} before, {report.bytes_after:,} after",
        f"  over {report.num_tokens:,} held-out tokens:",
        f"    perplexity: {report.perplexity_before:.4f} before, {report.perplexity_after:.4f} after "
        f"({100 * report.perplexity_increase:+.3f} %)",
        f"    same most likely token: {100 * report.greedy_agreement:.2f} %",
        f"    largest error of a logit: {report.largest_logit_error:.4g}",
        f"  probe {report.probe[:16]}, seal {report.seal[:16]}",
    ]
    return "\n".join(lines)
