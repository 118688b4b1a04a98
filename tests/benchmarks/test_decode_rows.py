"""Laws of the decoding rows: what is counted, which ratios are taken, and that rivals must agree on a trained model."""

from __future__ import annotations

import pytest

from benchmarks import decode_clock
from benchmarks.decode_clock import measure
from benchmarks.decode_rows import check_answers, rows_of
from benchmarks.processes import MeasurementError
from benchmarks.verbs import DECODE_AIMS


def sample(speed: float, bound: float | None = None) -> dict[str, float]:
    told = {"tokens_per_s_1": speed}
    return told if bound is None else told | {"bound_1": bound, "vector_gbytes_per_s": bound / 2}


def test_shares_and_ratios_are_taken_turn_by_turn():
    samples = {
        "jaxml": [sample(10.0, 20.0), sample(30.0, 40.0)],
        "transformers": [sample(5.0), sample(6.0)],
        "llama.cpp": [sample(10.0), sample(10.0)],
    }
    rows = {row.name: row.values for row in rows_of("m", (1,), samples)}
    assert rows["matrix-vector bandwidth, m"] == (10.0, 20.0)
    assert rows["jaxml m, 1 row"] == (10.0, 30.0)
    assert rows["jaxml / bound m, 1 row"] == (0.5, 0.75)
    assert rows["jaxml / transformers m, 1 row"] == (2.0, 5.0)
    assert rows["jaxml / llama.cpp m, 1 row"] == (1.0, 3.0)


def test_a_rival_without_a_batch_has_no_row_for_it():
    ours = {
        "vector_gbytes_per_s": 1.0,
        **{f"{what}_{rows}": 2.0 for what in ("tokens_per_s", "bound") for rows in (1, 8)},
    }
    names = [row.name for row in rows_of("m", (1, 8), {"jaxml": [ours], "llama.cpp": [sample(1.0)]})]
    assert "llama.cpp m, 1 row" in names
    assert "jaxml m, 8 rows" in names
    assert "llama.cpp m, 8 rows" not in names


def test_every_aim_names_a_row():
    both = {"vector_gbytes_per_s": 1.0, "tokens_per_s_1": 1.0, "bound_1": 1.0}
    samples = {"jaxml": [both], "transformers": [both], "llama.cpp": [both]}
    models = ("stories260k", "gpt2-124m", "llama-12x768")
    names = {row.name for model in models for row in rows_of(model, (1,), samples)}
    assert set(DECODE_AIMS) <= names


def test_rivals_that_answer_differently_did_not_run_the_same_model():
    check_answers("m", {"jaxml": [1, 2, 3], "transformers": [1, 2, 3]})
    with pytest.raises(MeasurementError, match=r"greedy tokens of jaxml(.|\n)*the same 2 first ones only"):
        check_answers("m", {"jaxml": [1, 2, 3], "llama.cpp": [1, 2, 4]})


def test_the_prompt_and_the_first_token_do_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(decode_clock.time, "perf_counter", lambda: now[0])

    def generate(num_rows: int, num_tokens: int) -> list[list[int]]:
        now[0] += 0.1 + 0.01 * num_tokens
        return [list(range(num_tokens))] * num_rows

    told = measure(generate, [1, 2], 11, is_quick=True)
    assert told["tokens"] == list(range(11))
    assert told["tokens_per_s_1"] == pytest.approx(100.0)
    assert told["tokens_per_s_2"] == pytest.approx(200.0)


def test_an_answer_that_ended_early_is_no_measurement():
    with pytest.raises(ValueError, match=r"1 rows of \[3\] tokens, expected 1 of 5"):
        measure(lambda num_rows, num_tokens: [[0] * min(3, num_tokens)], [1], 5)
