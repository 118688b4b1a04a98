"""How fast a model decodes, measured alike for every rival: the time of N tokens less the time of one. Python alone.

`jaxml_decode`, `torch_decode` and `llama_cpp_decode` measure with it, each in the environment of its library.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

PROMPT = (1,)  # the token that begins a text in Llama's vocabularies; any other would take as long
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_S = 3, 20, 3.0
QUICK_ROUNDS = 1

# (rows, tokens for each) to the tokens of every row, without the prompt
Generate = Callable[[int, int], list[list[int]]]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The flags that all rivals have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each row")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="prompts at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round: nothing is measured")
    return parser


def measure(generate: Generate, rows: list[int], num_tokens: int, is_quick: bool = False) -> dict[str, Any]:
    """`tokens_per_s_<rows>` for each number of rows, and the `tokens` of the first row of the first one.

    Raises ValueError when a row is shorter than was asked.
    """
    told: dict[str, Any] = {}
    for num_rows in rows:
        answers = generate(num_rows, num_tokens)
        generate(num_rows, 1)
        lengths = sorted({len(answer) for answer in answers})
        if len(answers) != num_rows or lengths != [num_tokens]:
            raise ValueError(f"{len(answers)} rows of {lengths} tokens, expected {num_rows} of {num_tokens}")
        told.setdefault("tokens", [int(token) for token in answers[0]])
        seconds: dict[int, list[float]] = {num_tokens: [], 1: []}
        begun = time.perf_counter()
        while not _is_enough(len(seconds[1]), time.perf_counter() - begun, is_quick):
            for asked, found in seconds.items():
                start = time.perf_counter()
                generate(num_rows, asked)
                found.append(time.perf_counter() - start)
        told[f"tokens_per_s_{num_rows}"] = tokens_per_s(
            num_rows, num_tokens, statistics.median(seconds[num_tokens]), statistics.median(seconds[1])
        )
    return told


def tokens_per_s(num_rows: int, num_tokens: int, all_s: float, first_s: float) -> float:
    """Decoded tokens a second over all rows, when N tokens took `all_s` and the prompt with one token `first_s`.

    >>> tokens_per_s(num_rows=2, num_tokens=101, all_s=3.0, first_s=1.0)
    100.0
    """
    return num_rows * (num_tokens - 1) / (all_s - first_s)


def _is_enough(rounds: int, seconds: float, is_quick: bool) -> bool:
    if is_quick:
        return rounds >= QUICK_ROUNDS
    return rounds >= MIN_ROUNDS and (seconds >= ROUNDS_S or rounds >= MAX_ROUNDS)
