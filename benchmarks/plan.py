"""What every group of rows measures with: a workspace, repeats, the other Pythons; and how a measured script is called.

Reads `processes`; `train_rows`, `decode_rows` and `serve_rows` take a Plan from `run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, environment, run_json

HERE = ROOT / "benchmarks"
ASSETS = ROOT.parent / "shared" / "assets"
JAXML = (sys.executable, "-c", "from jaxml.cli.main import entry; entry()")
# Libraries whose versions a script may tell in its JSON.
LIBRARIES = ("jax", "torch", "transformers", "llama-cpp-python", "litserve")


@dataclass
class Plan:
    """What a run measures with. `workspace`: an empty directory for runs, models and caches; `torch_python` and
    `peers_python`: None skips their rows.

    `skipped` collects rows that were left out, with the reason; `versions` what the measured processes tell.
    """

    workspace: Path
    repeats: int
    is_quick: bool
    torch_python: str | None = None
    peers_python: str | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def directory(self, name: str) -> Path:
        """A new, empty directory."""
        path = self.workspace / f"{name}-{len(list(self.workspace.iterdir()))}"
        path.mkdir()
        return path

    def without_torch(self, rows: str) -> bool:
        """True, and noted, when there is no torch."""
        if self.torch_python is None:
            self.skipped[rows] = "no Python with torch (`--torch-python`)"
        return self.torch_python is None

    def without_peers(self, rows: str) -> bool:
        """True, and noted, when there is no llama.cpp."""
        if self.peers_python is None:
            self.skipped[rows] = "no Python with llama-cpp-python and gguf (`nox -s peers`, `--peers-python`)"
        return self.peers_python is None


def script(plan: Plan, python: str, name: str, *words: str) -> Callable[[], dict[str, Any]]:
    """A call of a benchmark's script that returns its JSON object, and notes the versions in it."""

    def measure() -> dict[str, Any]:
        sample = run_json([python, str(HERE / name), *words], environment())
        plan.versions |= {library: sample[library] for library in LIBRARIES if library in sample}
        return sample

    return measure


def told(name: str, measure: Callable[[], Any]) -> Callable[[], Any]:
    """`measure`, saying on stderr what it got."""

    def tell() -> Any:
        sample = measure()
        shown = (
            {k: round(v, 4) for k, v in sample.items() if isinstance(v, float)} if isinstance(sample, dict) else sample
        )
        print(f"  {name}: {shown}", file=sys.stderr, flush=True)
        return sample

    return tell


def num_cores() -> int:
    """Cores that this process may use: the threads that every rival gets."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
