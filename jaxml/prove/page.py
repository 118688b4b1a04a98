"""proof.html: a proof on one page that needs nothing else, in light or dark.

Reads `prove.report`, `prove.meshes` and `observe.charts`; `prove.prove` writes it. There is no script on the page, and its
content security policy forbids any; every text from outside is escaped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxml.devices.spec import MeshSpec
from jaxml.observe.charts import Series, line_chart
from jaxml.observe.document import document, text_of
from jaxml.prove.claims import BOUND, Claim, Picture
from jaxml.prove.meshes import mesh_name
from jaxml.prove.report import CAPTION, Proof, error_text, explanation

LEFT, WIDTH, ROW, TOP = 330, 900, 19, 26  # the chart of errors
LOWEST, HIGHEST = -18, 0  # powers of ten on its axis


def render_page(proof: Proof, meshes: Sequence[MeshSpec]) -> str:
    """The HTML text (write it as UTF-8). `meshes` are drawn: how they split rows, tokens and weights."""
    failed = sum(claim.verdict == "fail" for claim in proof.claims)
    largest = max((claim.error for claim in proof.claims if claim.bound > 0), default=0.0)
    numbers = {
        "claims hold": f"{len(proof.claims) - failed} of {len(proof.claims)}",
        "largest error in float64": f"{largest:.0e}",
        "bound": f"{BOUND:.0e}",
        "seconds": f"{proof.seconds:.0f}",
    }
    cells = "".join(
        f"<div><b>{text_of(value)}</b><span>{text_of(name)}</span></div>" for name, value in numbers.items()
    )
    sections = [
        f'<p class="{"fail" if failed else "pass"}">{text_of(proof.verdict())}</p><div class="numbers">{cells}</div>',
        _section("Claims", f'{_table(proof.claims)}<p class="none">{text_of(CAPTION)}.</p>'),
        _section("Where they part", _explanations(proof.claims)) if failed else "",
        _section("Errors", error_chart([claim for claim in proof.claims if claim.bound > 0])),
        _section("Curves", _pictures(picture for claim in proof.claims for picture in claim.pictures)),
        _section("Meshes", f'<div class="meshes">{"".join(mesh_picture(mesh) for mesh in meshes)}</div>'),
        _section("The small copy", _list(proof.rule)),
        _section("Fields that are not as they were", _list(proof.changes)),
        _section("Notes", _list(proof.notes)) if proof.notes else "",
    ]
    return document(f"Proof of {proof.name}", _STYLE, "\n".join(filter(None, sections)))


def error_chart(claims: Sequence[Claim]) -> str:
    """An `<svg>`: for each claim its error on a logarithmic axis, a dot for float64, a ring for float32, and the bound."""
    if not claims:
        return '<p class="none">No claim with a bound was tried.</p>'
    height = TOP + ROW * len(claims) + 24
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Errors of the claims">']
    for power in range(LOWEST, HIGHEST + 1, 3):
        x = _place(10.0**power)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{height - 22}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">1e{power}</text>')
    parts.append(f'<path class="bound" d="M{_place(BOUND):.1f} {TOP - 6}V{height - 22}"/>')
    parts.append(f'<text class="name" x="{_place(BOUND):.1f}" y="12" text-anchor="middle">bound</text>')
    for number, claim in enumerate(claims):
        y = TOP + ROW * (number + 0.5)
        parts.append(f'<text class="name" x="0" y="{y + 4:.1f}">{text_of(_short(claim))}</text>')
        if claim.float32 is not None:
            parts.append(f'<circle class="ring" cx="{_place(claim.float32):.1f}" cy="{y:.1f}" r="4"/>')
        parts.append(f'<circle class="dot {claim.verdict}" cx="{_place(claim.error):.1f}" cy="{y:.1f}" r="4"/>')
    return "\n".join([*parts, "</svg>", '<p class="none">Dots: float64. Rings: the same in float32.</p>'])


def mesh_picture(mesh: MeshSpec) -> str:
    """A figure: a batch (rows down, tokens across) and a weight (embed down, heads across), cut as the mesh cuts them."""
    batch = _cut("batch", mesh.data * mesh.fsdp, mesh.context, 0)
    weight = _cut("weight", mesh.fsdp, mesh.tensor, 110)
    used = math.prod(dataclasses.astuple(mesh))
    svg = f'<svg viewBox="0 0 200 104" role="img" aria-label="{text_of(mesh_name(mesh))}">{batch}{weight}</svg>'
    return f"<figure>{svg}<figcaption>{text_of(mesh_name(mesh))}, {used} devices</figcaption></figure>"


def _cut(name: str, down: int, across: int, left: int) -> str:
    lines = [f'<rect class="s0" x="{left}" y="18" width="84" height="84"/>']
    lines += [f'<path class="cut" d="M{left} {18 + 84 * n / down:.1f}h84"/>' for n in range(down + 1)]
    lines += [f'<path class="cut" d="M{left + 84 * n / across:.1f} 18v84"/>' for n in range(across + 1)]
    return f'<text class="name" x="{left}" y="12">{name}</text>' + "".join(lines)


def _place(error: float) -> float:
    power = HIGHEST if not math.isfinite(error) else math.log10(error) if error > 0 else LOWEST
    share = (min(max(power, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)
    return LEFT + share * (WIDTH - LEFT - 20)


def _short(claim: Claim) -> str:
    text = f"{claim.group}: {claim.name}"
    return text if len(text) <= 52 else text[:51] + "…"


def _table(claims: Sequence[Claim]) -> str:
    head = "".join(
        f"<th>{t}</th>" for t in ("claim", "largest error", "bound", "float32", "verdict", "seconds", "of what")
    )
    rows = []
    for claim in claims:
        cells = [
            f"{claim.group}: {claim.name}",
            error_text(claim, claim.error),
            f"{claim.bound:.0e}" if claim.bound else "equal",
            error_text(claim, claim.float32),
        ]
        told = "".join(f"<td>{text_of(cell)}</td>" for cell in cells)
        verdict = f'<td class="{claim.verdict}">{claim.verdict}</td>'
        rows.append(f"<tr>{told}{verdict}<td>{claim.seconds:.1f}</td><td>{text_of(claim.detail)}</td></tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _explanations(claims: Iterable[Claim]) -> str:
    return _list(
        ["; ".join(line.strip(" :") for line in explanation(claim)) for claim in claims if claim.verdict == "fail"]
    )


def _pictures(pictures: Iterable[Picture]) -> str:
    charts = []
    for picture in pictures:
        series = [Series(name, points, style) for (name, points), style in zip(picture.curves, "ab", strict=False)]
        chart = line_chart(picture.title, picture.y_name, series, picture.x_name)
        charts.append(f"<figure><figcaption>{text_of(picture.title)}</figcaption>{chart}</figure>")
    return f'<div class="charts">{"".join(charts)}</div>' if charts else '<p class="none">None was drawn.</p>'


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{text_of(line)}</li>" for line in lines) + "</ul>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1e24; --soft: #5d6470; --line: #d9dde3;
  --a: #1f5fbf; --b: #c2410c; --good: #18794e; --bad: #c1121f; --s0: #d7e5fb; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --ink: #e6e9ee; --soft: #9aa3b0; --line: #323844;
    --a: #78aefc; --b: #ff9f66; --good: #56c486; --bad: #ff7a85; --s0: #1f3a63; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1040px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .2rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }
.numbers, .charts, .meshes { display: grid; gap: 1rem; }
.numbers { grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); }
.numbers b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.numbers span, .none, figcaption { color: var(--soft); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.meshes { grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); }
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
svg .name { fill: var(--ink); }
svg path { fill: none; }
.grid { stroke: var(--line); }
.axis, .cut { stroke: var(--soft); }
.bound { stroke: var(--bad); stroke-dasharray: 4 3; }
.curve { stroke-width: 1.5; stroke-linejoin: round; stroke-linecap: round; }
.curve.a { stroke: var(--a); } .dot.a { fill: var(--a); }
.curve.b { stroke: var(--b); } .dot.b { fill: var(--b); }
.dot.pass { fill: var(--good); } .dot.fail { fill: var(--bad); }
.ring { fill: none; stroke: var(--soft); }
.s0 { fill: var(--s0); }
p.pass, td.pass { color: var(--good); } p.fail, td.fail { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--soft); white-space: nowrap; }
"""
