"""`jaxml batch CKPT IN.jsonl -o OUT.jsonl`: a file of requests to a file of answers. Reads `recipes.batching`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.errors import ConfigError

DESCRIPTION = """Answer the requests in IN.jsonl, one a line as in OpenAI's batch API:

  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "To be", "max_tokens": 20}}

The answers come in the same order. A line that cannot be right is told by its number in OUT.errors.jsonl. After a kill
the same command goes on where it was."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, answer, and return the report."""
    options = parser("batch", DESCRIPTION)
    options.add_argument("path", metavar="CKPT", help="run directory, checkpoints folder or step folder")
    options.add_argument("source", metavar="IN.jsonl", type=Path, help="the requests")
    options.add_argument("-o", "--out", metavar="OUT.jsonl", type=Path, required=True, help="the answers")
    options.add_argument("--max-batch", type=int, default=8, help="requests that decode together (default 8)")
    given = options.parse_args(arguments)
    if given.max_batch < 1:
        raise ConfigError("--max-batch", expected="at least 1", got=str(given.max_batch), todo="leave it out for 8")
    from jaxml.devices.start import tune_allocator, use_compilation_cache
    from jaxml.recipes.batching import run_batch

    tune_allocator()
    use_compilation_cache(cache_directory())
    report = run_batch(given.path, given.source, given.out, sys.stderr, max_batch=given.max_batch)
    answers = report.num_lines - report.num_bad
    text = f"{report.out}: {answers:,} answers ({report.num_failed:,} failed), {report.num_before:,} lines done before"
    if report.num_bad:
        text += f"; {report.num_bad:,} bad lines in {report.errors}"
    return {"text": text, **asdict(report)}, 0
