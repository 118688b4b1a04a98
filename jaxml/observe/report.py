"""`report.html`: one run on one page that needs nothing else, in light or dark, on a desk or a phone.

Reads `observe.charts`, `observe.summary` and `observe.progress`; the recipe fills a `RunReport` and writes the text. No
jax. There is no script on the page, and its content security policy forbids any; every text from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jaxml.observe.charts import Point, Series, line_chart
from jaxml.observe.document import document, text_of
from jaxml.observe.progress import short
from jaxml.observe.summary import RunSummary, summarize

STEPS_NAMED = 8  # of the steps with non-finite values


@dataclass(frozen=True)
class RunReport:
    """What the page shows, as plain data.

    facts: name and value of what was run (model, data, devices), in order.
    records: those of `metrics.jsonl`.
    clock_shares: the fraction of the wall time by kind (`WallClock.shares`).
    events: what the guard, a resume or a signal did, a sentence each.
    rows: the first packed rows as (text, segment id); segment 0 is padding, 1.. are the documents of the row.
    samples: what the trained model made of some prompts, as (prompt, answer). commands: how to go on, as (what it does,
    command line).
    """

    title: str
    facts: dict[str, str]
    records: list[dict[str, Any]]
    clock_shares: dict[str, float]
    events: list[str]
    rows: list[list[tuple[str, int]]]
    samples: Sequence[tuple[str, str]] = ()
    commands: Sequence[tuple[str, str]] = ()


def render_report(run: RunReport) -> str:
    """The HTML text of the page (write it as UTF-8). Its size grows with the facts and rows, not with the steps."""
    summary = summarize(run.records, {})
    sections = [
        _headline(run.records, summary),
        _section("Training", f'<div class="charts">{"".join(_charts(run.records))}</div>'),
        _section("Where the time went", _time_bar(run.clock_shares) + f"<p>{text_of(_sentence(summary.verdict))}.</p>"),
        _section("What happened", _events(run.events, run.records)),
        _section("Samples", _samples(run.samples)),
        _section("How to go on", _commands(run.commands)),
        _section("First packed rows", _rows(run.rows)),
        _section("Last values", _table(_last_values(run.records))),
        _section("The run", _table(run.facts)),
    ]
    return document(run.title, _STYLE, "\n".join(sections))


def rounded_percent(shares: Mapping[str, float]) -> dict[str, float]:
    """Percent with one decimal that sum to exactly 100.0 (largest remainders are rounded up); empty without time.

    >>> rounded_percent({"a": 1.0, "b": 1.0, "c": 1.0})
    {'a': 33.4, 'b': 33.3, 'c': 33.3}
    """
    total = sum(shares.values())
    if total <= 0:
        return {}
    exact = {kind: share / total * 1000 for kind, share in shares.items()}
    whole = {kind: int(value) for kind, value in exact.items()}
    by_remainder = sorted(exact, key=lambda kind: whole[kind] - exact[kind])
    for kind in by_remainder[: 1000 - sum(whole.values())]:
        whole[kind] += 1
    return {kind: value / 10 for kind, value in whole.items()}


def _headline(records: Sequence[Mapping[str, Any]], summary: RunSummary) -> str:
    """The four numbers that people look for first."""
    numbers = {"steps": str(records[-1]["step"]) if records else "0"}
    for name, title in (("loss", "last train loss"), ("eval_loss", "last eval loss")):
        values = [record[name] for record in records if record.get(name) is not None]
        if values:
            numbers[title] = f"{values[-1]:.4f}"
    if summary.tokens_per_s is not None:
        numbers["tokens/s, median"] = short(summary.tokens_per_s)
    cells = "".join(
        f"<div><b>{text_of(value)}</b><span>{text_of(name)}</span></div>" for name, value in numbers.items()
    )
    return f'<div class="numbers">{cells}</div>'


def _charts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    evaluated = [record for record in records if "eval_loss" in record]
    loss = [Series("train", _points(records, "loss")), Series("eval", _points(evaluated, "eval_loss"), "b")]
    rate = [Series("rate", _points(records, "learning_rate"))]
    norm = [Series("norm", _points(records, "grad_norm"))]
    throughput = [Series("throughput", _points(records, "tokens_per_s"))]
    charts = {
        "Loss": line_chart("Loss", "loss, nats", loss),
        "Learning rate": line_chart("Learning rate", "learning rate at each step", rate, is_from_zero=True),
        "Gradient norm": line_chart("Gradient norm", "global norm before clipping", norm),
        "Throughput": line_chart("Throughput", "tokens/s", throughput, is_from_zero=True),
    }
    return [f"<figure><figcaption>{title}</figcaption>{chart}</figure>" for title, chart in charts.items()]


def _points(records: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """The curve of one metric; a gap where it is absent or was not finite."""
    values = ((float(record["step"]), record.get(name)) for record in records)
    return [(step, None if value is None else float(value)) for step, value in values]


def _time_bar(shares: Mapping[str, float]) -> str:
    percent = {kind: value for kind, value in rounded_percent(shares).items() if value > 0}
    if not percent:
        return '<p class="none">No time was recorded.</p>'
    colours = {kind: f"k{list(shares).index(kind) % 8}" for kind in percent}
    bar = "".join(
        f'<i class="{colours[kind]}" style="width:{value}%" title="{text_of(kind)} {value}%"></i>'
        for kind, value in percent.items()
    )
    legend = "".join(
        f'<li><i class="{colours[kind]}"></i>{text_of(kind.replace("_", " "))} <b>{value:.1f}%</b></li>'
        for kind, value in percent.items()
    )
    return f'<div class="bar">{bar}</div><ul class="legend">{legend}</ul>'


def _events(events: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    steps = [str(record["step"]) for record in records if record.get("nonfinite")]
    events = list(events)
    if steps:
        more = f" and {len(steps) - STEPS_NAMED} more" if len(steps) > STEPS_NAMED else ""
        events.append(f"Infinite or NaN values at step {', '.join(steps[:STEPS_NAMED])}{more}.")
    if not events:
        return '<p class="none">Nothing out of the ordinary.</p>'
    return "<ul>" + "".join(f"<li>{text_of(event)}</li>" for event in events) + "</ul>"


def _rows(rows: Sequence[Sequence[tuple[str, int]]]) -> str:
    if not rows:
        return '<p class="none">No rows were given.</p>'
    parts = ["<p>Each colour is one document of the row; a token attends only within its own.</p>"]
    for row in rows:
        spans = []
        for segment, pieces in groupby(row, key=lambda piece: piece[1]):
            texts = [text for text, _ in pieces]
            if segment == 0:
                spans.append(f'<span class="pad">{len(texts)} × padding</span>')
            else:
                text = text_of("".join(texts).replace("\n", "↵"))
                spans.append(f'<span class="s{(segment - 1) % 4}"><sup>{segment}</sup>{text}</span>')
        parts.append(f'<p class="row">{"".join(spans)}</p>')
    return "".join(parts)


def _samples(samples: Sequence[tuple[str, str]]) -> str:
    if not samples:
        return '<p class="none">None were asked for (train with --sample PROMPT).</p>'
    return "".join(f'<p class="row"><b>{text_of(prompt)}</b>{text_of(answer)}</p>' for prompt, answer in samples)


def _commands(commands: Sequence[tuple[str, str]]) -> str:
    if not commands:
        return '<p class="none">Nothing was said.</p>'
    return (
        "<ul>" + "".join(f"<li>{text_of(what)}: <code>{text_of(line)}</code></li>" for what, line in commands) + "</ul>"
    )


def _last_values(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The newest value of every number in the records, and the step it is from."""
    last: dict[str, tuple[Any, int]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float):
                last[name] = (value, record["step"])
    last.pop("step", None)
    return {name: f"{value:.6g} (step {step})" for name, (value, step) in last.items()}


def _table(facts: Mapping[str, str]) -> str:
    if not facts:
        return '<p class="none">Nothing was recorded.</p>'
    rows = "".join(f"<tr><th>{text_of(name)}</th><td>{text_of(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{rows}</table>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1e24; --soft: #5d6470; --line: #d9dde3;
  --a: #1f5fbf; --b: #c2410c; --s0: #d7e5fb; --s1: #fbe3d2; --s2: #d6f1de; --s3: #efe0f8;
  --k0: #8f6bd1; --k1: #c2410c; --k2: #d4a017; --k3: #1f77b4;
  --k4: #2a9d5c; --k5: #17a2b0; --k6: #c13a7a; --k7: #8a919c; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --ink: #e6e9ee; --soft: #9aa3b0; --line: #323844;
    --a: #78aefc; --b: #ff9f66; --s0: #1f3a63; --s1: #5a3518; --s2: #1d4a2e; --s3: #472a5a;
    --k0: #a98be6; --k1: #f0793f; --k2: #e3bb4a; --k3: #5aa6e0;
    --k4: #56c486; --k5: #4cc5d1; --k6: #e671a8; --k7: #7b8492; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1040px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .2rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }
.numbers, .charts { display: grid; gap: 1rem; }
.numbers { grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); }
.numbers b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.numbers span, .none { color: var(--soft); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
svg .name { fill: var(--ink); }
svg path { fill: none; }
.grid { stroke: var(--line); }
.axis { stroke: var(--soft); }
.curve { stroke-width: 1.5; stroke-linejoin: round; stroke-linecap: round; }
.curve.a { stroke: var(--a); } .dot.a { fill: var(--a); }
.curve.b { stroke: var(--b); } .dot.b { fill: var(--b); }
.bar { display: flex; height: 1.6rem; border-radius: 4px; overflow: hidden; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .6rem 0; padding: 0; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: 2px; }
.k0 { background: var(--k0); } .k1 { background: var(--k1); }
.k2 { background: var(--k2); } .k3 { background: var(--k3); }
.k4 { background: var(--k4); } .k5 { background: var(--k5); }
.k6 { background: var(--k6); } .k7 { background: var(--k7); }
.row { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 14rem; overflow-y: auto; }
.row sup { color: var(--soft); padding: 0 .2em; }
.pad { color: var(--soft); border: 1px dashed var(--line); }
.s0 { background: var(--s0); } .s1 { background: var(--s1); }
.s2 { background: var(--s2); } .s3 { background: var(--s3); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); width: 40%; }
"""
