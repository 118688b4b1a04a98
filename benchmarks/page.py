"""Turns the result of a benchmark run, as in bench-out/decode.json, into a section of docs/benchmarks.md and its plot.

Reads `verbs` for the aims and the words; `run` calls it. Needs matplotlib (extra `bench`) for the plot alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.verbs import VERBS, number

Json = dict[str, Any]

HEAD = """\
# Benchmarks

`benchmarks/run.py` wrote this page, a section for each of its verbs: do not edit it. Values are medians of the repeats
shown; a row is refused when (max - min) / median exceeds the limit that its section names. Rows marked as worst stand for
their largest repeat, and a single value for one measurement."""
RIVALS = ("torch", "transformers", "llama.cpp", "LitServe")


def outcome(verb: str, row: Mapping[str, Any]) -> str:
    """The last column: refused, or how the row stands to its aim."""
    if row["refused"]:
        return f"**refused** (spread {row['spread']:.0%})"
    aim = VERBS[verb].aims.get(row["name"])
    return aim.verdict(row["value"]) if aim else ""


def table(result: Json) -> list[list[str]]:
    """Header and lines: what, value, unit, repeats, aim, outcome."""
    verb = result["verb"]
    lines = [["what", "value", "unit", "repeats", "aim", "outcome"]]
    for row in result["rows"]:
        value = "" if row["refused"] else number(row["value"])
        if row["is_bound"] and len(row["values"]) > 1:
            value = f"{value} (worst)"
        repeats = ", ".join(map(number, row["values"])) if len(row["values"]) > 1 else ""
        aim = str(VERBS[verb].aims.get(row["name"], ""))
        lines.append([row["name"], value, row["unit"], repeats, aim, outcome(verb, row)])
    return lines


def terminal(result: Json) -> str:
    """The table in columns, without Markdown's stars."""
    lines = [[cell.replace("**", "") for cell in line] for line in table(result)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def section(result: Json, plot: str | None = None) -> str:
    """The verb's part of the page, from its heading on. `plot`: the file of its bars, where there is one."""
    verb, machine, limit = VERBS[result["verb"]], result["machine"], result["max_spread"]
    parts = [f"## {verb.title}"]
    if result["is_quick"]:
        parts.append("**A quick run, which proves that the benchmark works: its numbers mean nothing.**")
    parts.append(f"```console\n{result['command']}\n```")
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    refusal = "No row is refused" if limit is None else f"Rows are refused above a spread of {limit:.0%}"
    parts.append(
        f"{result['date']}, {machine['cpu']}, {machine['cores']} cores; {versions}; commit {result['commit']}. The load "
        f"of the machine before the run was {machine['load']:.2f}; the run took {result['seconds'] / 60:.1f} minutes. "
        f"{refusal}."
    )
    header, *lines = table(result)
    rule = ["---" if column != 1 else "---:" for column in range(len(header))]
    parts.append("\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines]))
    if plot is not None:
        parts.append(f"![The same numbers as bars]({plot})")
    parts.append(f"### {verb.title}: how each row is measured\n\n" + verb.how)
    parts.append(f"### {verb.title}: missed, refused, left out\n\n" + "\n".join(shortfalls(result)))
    return "\n\n".join(parts)


def merged(page: str, verb: str, text: str) -> str:
    """docs/benchmarks.md with the section of one verb in the place of its old one; those of the other verbs stay."""
    found = {part.partition("\n")[0]: part.rstrip() for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]}
    kept = {verb: f"## {found[told.title]}" for verb, told in VERBS.items() if told.title in found}
    kept[verb] = text.rstrip()
    return "\n\n".join([HEAD, *(kept[verb] for verb in VERBS if verb in kept)]) + "\n"


def shortfalls(result: Json) -> list[str]:
    """One bullet for each aim missed or not measured, row refused, group of rows left out, and section that failed."""
    aims = VERBS[result["verb"]].aims
    bullets, measured = [], {row["name"] for row in result["rows"] if not row["refused"]}
    for row in result["rows"]:
        aim = aims.get(row["name"])
        if row["refused"]:
            values = ", ".join(map(number, row["values"]))
            bullets.append(f"- {row['name']}: refused, spread {row['spread']:.0%} ({values} {row['unit']}).")
        elif aim and not aim.is_met(row["value"]):
            bullets.append(f"- {row['name']}: {number(row['value'])}, aim {aim}: {aim.verdict(row['value'])}.")
    bullets += [f"- {rows}: left out, {why}." for rows, why in result["skipped"].items()]
    bullets += [f"- Section {name} failed: {why.splitlines()[0]}." for name, why in result["failed"].items()]
    bullets += [f"- {name}: aim {aim}, no number." for name, aim in aims.items() if name not in measured]
    return bullets or ["Nothing: every row was measured and every aim is met."]


def draw(result: Json, path: Path) -> None:
    """Bars of the rows with an aim and their rivals; dots are single repeats, a line is the aim. Refused rows are hollow."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jaxml", "font.size": 9})
    from matplotlib.figure import Figure

    rows = {row["name"]: row for row in result["rows"]}
    verb = VERBS[result["verb"]]
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    for axes, (title, wanted) in zip(figure.subplots(2, 2).flat, verb.panels.items(), strict=True):
        names = [name for name in wanted if name in rows]
        axes.set_title(title, fontsize=10, loc="left")
        for place, name in enumerate(names):
            row = rows[name]
            color = "#c0504d" if name.startswith(RIVALS) else "#3b6fb6"
            axes.barh(place, row["value"], color="none" if row["refused"] else color, edgecolor=color, height=0.6)
            axes.plot(row["values"], [place] * len(row["values"]), "k.", markersize=3)
            if name in verb.aims:
                axes.plot([verb.aims[name].value] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.5)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
