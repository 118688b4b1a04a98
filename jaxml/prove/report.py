"""What a proof found, for people and for programs: the table on a terminal, and proof.json.

Reads `prove.claims`; `prove.prove` makes the Proof, `prove.page` draws it, `cli.prove` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxml import __version__
from jaxml.observe.progress import Stream
from jaxml.prove.claims import Claim

FORMAT = 1
CAPTION = (
    "errors are shares of a leaf's largest magnitude, in float64 in the place of the precision policy, where quantisers are "
    "the identity; low precision is held to tolerances by the tests of jaxml"
)


@dataclass(frozen=True)
class Proof:
    """`rule` is how the small copy was made, `changes` are the fields in which it is not the experiment itself."""

    name: str
    claims: tuple[Claim, ...]
    rule: tuple[str, ...]
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def is_passed(self) -> bool:
        """All claims hold, and there is one."""
        return bool(self.claims) and all(claim.verdict == "pass" for claim in self.claims)

    def to_json(self) -> dict[str, Any]:
        """What proof.json holds."""
        return {
            "format": FORMAT,
            "jaxml": __version__,
            "name": self.name,
            "verdict": "pass" if self.is_passed else "fail",
            "claims": [claim.to_json() for claim in self.claims],
            "rule": list(self.rule),
            "changes": list(self.changes),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
        }

    def verdict(self) -> str:
        """One sentence."""
        failed = sum(claim.verdict == "fail" for claim in self.claims)
        held = f"{len(self.claims)} claims hold" if not failed else f"{failed} of {len(self.claims)} claims fail"
        return f"{self.name}: {held}, in {self.seconds:.0f} s"


def error_text(claim: Claim, error: float | None) -> str:
    """An error as the table shows it: a count of differences for claims of equality.

    >>> error_text(Claim("a", "b", 0.0, 0.0), 0.0), error_text(Claim("a", "b", 2e-15, 1e-9), 2e-15)
    ('equal', '2e-15')
    """
    if error is None:
        return ""
    if not math.isfinite(error):
        return "not a number" if math.isnan(error) else "infinite"
    if claim.bound == 0:
        return "equal" if error == 0 else f"{error:.0f} differ"
    return f"{error:.0e}" if error else "0"


def print_table(claims: Sequence[Claim], stream: Stream) -> None:
    """The table, as wide as the terminal, and under it what is said about each claim that fails."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, width=None if stream.isatty() else 120, highlight=False)  # type: ignore[arg-type]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("claim", "largest error", "bound", "float32", "verdict"):
        table.add_column(title, justify="left" if title in ("claim", "verdict") else "right", no_wrap=title != "claim")
    group = None
    for claim in claims:
        if claim.group != group:
            group = claim.group
            table.add_row(f"[bold]{group}[/bold]")
        bound = f"{claim.bound:.0e}" if claim.bound else "equal"
        colour = "green" if claim.verdict == "pass" else "red"
        cells = (error_text(claim, claim.error), bound, error_text(claim, claim.float32))
        table.add_row(f"  {claim.name}", *cells, f"[{colour}]{claim.verdict}[/{colour}]")
    console.print(table)
    console.print(CAPTION, style="dim")
    for claim in claims:
        for line in explanation(claim):
            console.print(line, markup=False)


def explanation(claim: Claim) -> list[str]:
    """What is said about a claim under the table: of one that fails everything, of another what was left out of it."""
    if claim.verdict == "pass":
        return []
    lines = [f"{claim.group}, {claim.name}:"]
    if claim.detail:
        lines.append(f"  {claim.detail}")
    if claim.parting is not None:
        lines.append(f"  first parts at {claim.parting}")
    return lines
