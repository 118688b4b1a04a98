"""Turns the result of a benchmark run, as in bench-out/train.json, into docs/benchmarks.md and docs/benchmarks.svg.

The aims live here. Needs matplotlib (extra `bench`) for the plot alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """What a row should reach. `pass_line`: the weaker value that is still acceptable, where there is one."""

    value: float
    is_at_least: bool = False
    pass_line: float | None = None

    def is_met(self, got: float) -> bool:
        return self._reaches(got, self.value)

    def verdict(self, got: float) -> str:
        """Met or missed, and by how much of the aim."""
        gap = abs(got / self.value - 1)
        told = f"{'met' if self.is_met(got) else 'missed'} by {gap:.0%}" if gap >= 0.005 else "met"
        if not self.is_met(got):
            told = f"**{told if gap >= 0.005 else f'missed by {gap:.2%}'}**"
            if self.pass_line is not None:
                passed = self._reaches(got, self.pass_line)
                told += f"; pass line {number(self.pass_line)} {'met' if passed else '**missed**'}"
        return told

    def __str__(self) -> str:
        return f"{'at least' if self.is_at_least else 'at most'} {number(self.value)}"

    def _reaches(self, got: float, line: float) -> bool:
        return got >= line if self.is_at_least else got <= line


AIMS = {
    "jaxml / torch 4x4x128": Aim(1.4, is_at_least=True),
    "jaxml / torch 6x6x384": Aim(1.0, is_at_least=True, pass_line=0.9),
    "first step, cold": Aim(10.0),
    "first step, warm": Aim(4.0),
    "checkpoint stall, share": Aim(0.05),
    "resume": Aim(5.0),
    "seek to step 1,000,000": Aim(1000.0),
    "nanogpt_cpu validation loss": Aim(1.88),
    "torch / nanogpt_cpu, cold": Aim(3.0, is_at_least=True, pass_line=2.0),
    "torch / nanogpt_cpu, warm": Aim(3.0, is_at_least=True, pass_line=2.0),
}

HOW = """\
- **Peak and bandwidth** (`benchmarks/machine.py`): the best of a few short calls at training shapes, by JAX; 2MKN
  operations a product, one read of the matrix.
- **Steps**: `benchmarks/jaxml_steps.py` (the jitted step that `jaxml train` runs) and `benchmarks/torch_nanogpt.py` (our
  own plain PyTorch, eager): the same model, batch, float32 precision, optimizer and clipping, on random tokens. 4x4x128
  has batch 12 and context 64, 6x6x384 batch 16 and context 256 (jaxml: in 4
  microbatches, `train.accumulate`, which is the same gradient). A sample is the median update of a new process, after
  some that do not count. Machine and both sides take turns, every second round backwards; ratios and shares are taken
  round by round. The share counts the model's FLOPs (6N and attention).
- **First step**: from starting `jaxml train experiments/shakespeare.py`, data prepared, to the first line of
  `metrics.jsonl`. Cold has an empty compilation cache, warm a filled one.
- **Checkpoint stall**: the same experiment at its own cadence, killed soon after its second save; `checkpoint_s` of
  the step after each save, and their sum over the time of stepping (waits for data and stalls included, evaluations left
  out). The first save also sets things up, so in a longer run the share is smaller.
- **Resume**: that run is killed; from starting `jaxml resume` on a copy of it, with a filled compilation cache, to its
  first new line of `metrics.jsonl`.
- **Seek**: `TrainBatches.batch(1_000_000)` on the opened data, in a new process each time.
- **nanogpt_cpu**: `experiments/nanogpt_cpu.py` with three seeds (of weights and of the order of rows) against one run of
  `torch_nanogpt.py --train` (2,000 updates, seed 1337) between the first two of ours. Clocks run from the start of the
  process to the evaluation of the whole validation split, which comes last. Preparing the data counts in ours. Cold is
  the first seed, with an empty compilation cache; warm are the other two."""


def number(value: float) -> str:
    """Three significant digits (four around 1 to 10), thousands separated."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 1 <= abs(value) < 10 else f"{value:.3g}"


def outcome(row: Mapping[str, Any]) -> str:
    """The last column: refused, or how the row stands to its aim."""
    if row["refused"]:
        return f"**refused** (spread {row['spread']:.0%})"
    aim = AIMS.get(row["name"])
    return aim.verdict(row["value"]) if aim else ""


def table(result: Json) -> list[list[str]]:
    """Header and lines: what, value, unit, repeats, aim, outcome."""
    lines = [["what", "value", "unit", "repeats", "aim", "outcome"]]
    for row in result["rows"]:
        value = "" if row["refused"] else number(row["value"])
        if row["is_bound"] and len(row["values"]) > 1:
            value = f"{value} (worst)"
        repeats = ", ".join(map(number, row["values"])) if len(row["values"]) > 1 else ""
        lines.append([row["name"], value, row["unit"], repeats, str(AIMS.get(row["name"], "")), outcome(row)])
    return lines


def terminal(result: Json) -> str:
    """The table in columns, without Markdown's stars."""
    lines = [[cell.replace("**", "") for cell in line] for line in table(result)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def page(result: Json, plot: str = "benchmarks.svg") -> str:
    """docs/benchmarks.md."""
    machine, limit = result["machine"], result["max_spread"]
    parts = ["# Benchmarks", "`benchmarks/run.py` wrote this page: do not edit it."]
    if result["is_quick"]:
        parts.append("**A quick run, which proves that the benchmark works: its numbers mean nothing.**")
    parts.append(f"```console\n{result['command']}\n```")
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts.append(
        f"{result['date']}, {machine['cpu']}, {machine['cores']} cores; {versions}; commit {result['commit']}. The load "
        f"of the machine before the run was {machine['load']:.2f}; the run took {result['seconds'] / 60:.1f} minutes."
    )
    header, *lines = table(result)
    rule = ["---" if column != 1 else "---:" for column in range(len(header))]
    parts.append("\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines]))
    refusal = (
        "no row is refused" if limit is None else f"a row is refused when (max - min) / median exceeds {limit:.0%}"
    )
    parts.append(
        f"Values are medians of the repeats shown; {refusal}. Rows marked as worst stand for "
        "their largest repeat, and a single value for one measurement."
    )
    parts.append(f"![The same numbers as bars]({plot})")
    parts.append("## How each row is measured\n\n" + HOW)
    parts.append("## Missed, refused, left out\n\n" + "\n".join(shortfalls(result)))
    return "\n\n".join(parts) + "\n"


def shortfalls(result: Json) -> list[str]:
    """One bullet for each aim missed or not measured, row refused, group of rows left out, and section that failed."""
    bullets, measured = [], {row["name"] for row in result["rows"] if not row["refused"]}
    for row in result["rows"]:
        aim = AIMS.get(row["name"])
        if row["refused"]:
            values = ", ".join(map(number, row["values"]))
            bullets.append(f"- {row['name']}: refused, spread {row['spread']:.0%} ({values} {row['unit']}).")
        elif aim and not aim.is_met(row["value"]):
            bullets.append(f"- {row['name']}: {number(row['value'])}, aim {aim}: {aim.verdict(row['value'])}.")
    bullets += [f"- {rows}: left out, {why}." for rows, why in result["skipped"].items()]
    bullets += [f"- Section {name} failed: {why.splitlines()[0]}." for name, why in result["failed"].items()]
    bullets += [f"- {name}: aim {aim}, no number." for name, aim in AIMS.items() if name not in measured]
    return bullets or ["Nothing: every row was measured and every aim is met."]


def draw(result: Json, path: Path) -> None:
    """Bars of the rows with an aim and their rivals; dots are single repeats, a line is the aim. Refused rows are hollow."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jaxml", "font.size": 9})
    from matplotlib.figure import Figure

    rows = {row["name"]: row for row in result["rows"]}
    panels = {
        "Step 4x4x128, tokens/s": ["jaxml step 4x4x128", "torch step 4x4x128"],
        "Step 6x6x384, tokens/s": ["jaxml step 6x6x384", "torch step 6x6x384"],
        "From the command, s": ["first step, cold", "first step, warm", "resume"],
        "nanoGPT's CPU model, s": [
            "nanogpt_cpu to its evaluation, cold",
            "nanogpt_cpu to its evaluation, warm",
            "torch nanogpt to its evaluation",
        ],
    }
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    for axes, (title, wanted) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        names = [name for name in wanted if name in rows]
        axes.set_title(title, fontsize=10, loc="left")
        for place, name in enumerate(names):
            row = rows[name]
            color = "#c0504d" if name.startswith("torch") else "#3b6fb6"
            axes.barh(place, row["value"], color="none" if row["refused"] else color, edgecolor=color, height=0.6)
            axes.plot(row["values"], [place] * len(row["values"]), "k.", markersize=3)
            if name in AIMS:
                axes.plot([AIMS[name].value] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.5)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
