"""Laws of the benchmark page: what is met, missed, refused or left out is said, and nothing else is claimed."""

from __future__ import annotations

import re

import pytest

from benchmarks.interleave import MAX_SPREAD, Row
from benchmarks.page import HEAD, draw, merged, section, shortfalls, terminal
from benchmarks.verbs import TRAIN_AIMS, VERBS, Aim, number

GOOD = {
    "jaxml / torch 4x4x128": (1.5, 1.55, 1.52),
    "jaxml / torch 6x6x384": (0.95, 0.94, 0.96),
    "first step, cold": (8.0, 8.1, 8.2),
    "first step, warm": (3.0, 3.1, 3.0),
    "checkpoint stall, share": (0.01,),
    "resume": (9.0, 4.0, 4.0),
    "seek to step 1,000,000": (1.0, 7.0),
    "nanogpt_cpu validation loss": (1.87, 1.89, 1.86),
    "torch / nanogpt_cpu, cold": (1.7,),
    "torch / nanogpt_cpu, warm": (3.1, 3.0),
}
BOUNDS = ("checkpoint stall, share", "seek to step 1,000,000", "nanogpt_cpu validation loss")


def result(values: dict[str, tuple[float, ...]] = GOOD, **changes: object) -> dict:
    rows = [Row(name, "unit", repeats, name in BOUNDS) for name, repeats in values.items()]
    return {
        "verb": "train",
        "command": "nox -s bench -- train",
        "date": "2026-01-01",
        "commit": "abc1234",
        "seconds": 600.0,
        "is_quick": False,
        "max_spread": MAX_SPREAD,
        "machine": {"cpu": "A Processor", "cores": 2, "load": 0.02, "versions": {"Python": "3.11", "jax": "0.10.2"}},
        "rows": [{**row.as_json(), "refused": row.is_refused()} for row in rows],
        "skipped": {},
        "failed": {},
        **changes,
    }


def line_of(text: str, name: str) -> list[str]:
    """The cells of a row of the page's table."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_an_aim_is_met_or_missed_by_a_share_of_it():
    assert line_of(section(result()), "jaxml / torch 4x4x128")[1:] == [
        "1.52", "unit", "1.5, 1.55, 1.52", "at least 1.4", "met by 9%",
    ]  # fmt: skip
    assert line_of(section(result()), "first step, cold")[-2:] == ["at most 10", "met by 19%"]
    assert Aim(10.0).verdict(10.0) == "met"
    assert Aim(1.88).verdict(1.881) == "**missed by 0.05%**"


def test_a_missed_aim_says_whether_its_pass_line_holds():
    assert line_of(section(result()), "jaxml / torch 6x6x384")[-1] == "**missed by 5%**; pass line 0.9 met"
    assert line_of(section(result()), "torch / nanogpt_cpu, cold")[-1] == "**missed by 43%**; pass line 2 **missed**"


def test_a_refused_row_shows_its_repeats_and_no_value():
    cells = line_of(section(result()), "resume")
    assert cells[1] == ""
    assert cells[3] == "9, 4, 4"
    assert cells[-1] == "**refused** (spread 125%)"
    assert "- resume: refused, spread 125% (9, 4, 4 unit)." in shortfalls(result())
    assert "- resume: aim at most 5, no number." in shortfalls(result())


def test_a_bound_stands_for_its_worst_repeat_and_is_never_refused():
    assert line_of(section(result()), "seek to step 1,000,000")[1] == "7 (worst)"
    assert line_of(section(result()), "nanogpt_cpu validation loss")[-1] == "**missed by 1%**"


def test_what_was_left_out_or_failed_is_named_with_the_reason():
    left_out = {"torch step 4x4x128": "no Python with torch"}
    told = shortfalls(result({}, skipped=left_out, failed={"start": "measuring `x`\n  expected: y"}))
    assert "- torch step 4x4x128: left out, no Python with torch." in told
    assert "- Section start failed: measuring `x`." in told
    assert len(told) == 2 + len(TRAIN_AIMS)


def test_a_run_without_shortfalls_says_so():
    values = {name: (aim.value,) for name, aim in TRAIN_AIMS.items()}
    assert shortfalls(result(values)) == ["Nothing: every row was measured and every aim is met."]


def test_a_quick_run_is_no_measurement():
    assert "its numbers mean nothing" in section(result(is_quick=True, max_spread=None))
    assert "its numbers mean nothing" not in section(result())


def test_the_page_names_command_machine_and_every_aim():
    text = section(result())
    for told in ("nox -s bench -- train", "A Processor, 2 cores", "jax 0.10.2", "commit abc1234", *TRAIN_AIMS):
        assert told in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_the_terminal_shows_the_same_table_without_markup():
    shown = terminal(result())
    assert "*" not in shown
    assert re.search(r"resume +unit +9, 4, 4 +at most 5 +refused \(spread 125%\)", shown)


def test_measuring_one_verb_again_leaves_the_sections_of_the_others():
    whole = ""
    for verb in ("serve", "scale", "train", "decode"):
        whole = merged(whole, verb, section(result({}, verb=verb, command=f"nox -s bench -- {verb}")))
    again = merged(whole, "decode", section(result({}, verb="decode", date="2027-02-03")))
    assert again.startswith(HEAD)
    assert [line for line in again.splitlines() if line.startswith("## ")] == [
        f"## {verb.title}" for verb in VERBS.values()
    ]
    before, after = (text.split("\n## ") for text in (whole, again))
    assert (before[1], *before[3:]) == (after[1], *after[3:])
    assert "2027-02-03" in after[2] and "2027-02-03" not in before[2]


def test_the_same_section_again_changes_nothing():
    one = section(result())
    assert merged(merged("", "train", one), "train", one) == merged("", "train", one)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_tells_its_own_aims_and_method(verb):
    text = section(result({}, verb=verb), VERBS[verb].plot)
    assert VERBS[verb].how in text
    assert f"]({VERBS[verb].plot})" in text
    for name, aim in VERBS[verb].aims.items():
        assert f"- {name}: aim {aim}, no number." in text


@pytest.mark.parametrize(
    ("value", "shown"), [(12345.6, "12,346"), (99.96, "100"), (1.8849, "1.885"), (0.04567, "0.0457"), (0.0, "0")]
)
def test_numbers_keep_what_can_be_trusted(value, shown):
    assert number(value) == shown


def test_the_plot_is_small_text_that_can_be_searched_and_the_same_every_time(tmp_path):
    pytest.importorskip("matplotlib", reason="extra `bench`")
    draw(result(), tmp_path / "a.svg")
    draw(result(), tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert ">first step, cold</text>" in text
    assert len(text) < 60_000
