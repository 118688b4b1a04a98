"""Measures jaxml: `nox -s bench -- train` runs this, on a machine that does nothing else.

    python benchmarks/run.py train [--quick] [--torch-python PATH] [--only steps,start,checkpoint,seek,nanogpt]

Prints a table and writes bench-out/train.json; a whole run also writes docs/benchmarks.md and docs/benchmarks.svg, a
quick or partial one writes both beside the JSON. Exit code 1 when a row was refused or a section failed. Reads
`train_rows` for what is measured and `page` for how it is told.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# As a script, this file sees only its own folder, and jaxml is to be that of this checkout.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import page
from benchmarks.interleave import MAX_SPREAD, REPEATS, Row
from benchmarks.processes import ROOT, MeasurementError
from benchmarks.train_rows import SECTIONS, Plan

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def main() -> int:
    args = parse(sys.argv[1:])
    # An exception, so that the process being measured is killed and its files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = args.only or list(SECTIONS)
    load = os.getloadavg()[0]
    torch_python = args.torch_python or (sys.executable if has_torch(sys.executable) else None)
    if torch_python and not has_torch(torch_python):
        print(f"benchmarks: {torch_python} cannot import torch", file=sys.stderr)
        return 2
    if torch_python is None:
        print("benchmarks: no torch here and no --torch-python: its rows are skipped", file=sys.stderr)
    begun = time.perf_counter()
    rows: list[Row] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="jaxml-bench-") as workspace:
        plan = Plan(Path(workspace), 1 if args.quick else REPEATS, args.quick, torch_python)
        for name in chosen:
            print(f"{name} (after {time.perf_counter() - begun:.0f} s)", file=sys.stderr, flush=True)
            try:
                rows += SECTIONS[name](plan)
            except MeasurementError as error:
                failed[name] = str(error)
                print(f"benchmarks: {error}", file=sys.stderr)
    limit = None if args.quick else MAX_SPREAD
    result = {
        "command": command_of(args),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "seconds": round(time.perf_counter() - begun, 1),
        "is_quick": args.quick,
        "max_spread": limit,
        "machine": machine(load, plan.versions),
        "rows": [{**row.as_json(), "refused": limit is not None and row.is_refused(limit)} for row in rows],
        "skipped": plan.skipped,
        "failed": failed,
    }
    write(result, is_whole=not args.quick and set(chosen) == set(SECTIONS))
    return 1 if failed or any(row["refused"] for row in result["rows"]) else 0


def parse(words: list[str]) -> argparse.Namespace:
    """The flags; `only` becomes a list of sections in the order of SECTIONS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train"], help="the group of rows to measure")
    parser.add_argument("--quick", action="store_true", help="prove that everything runs: one repeat, few steps")
    parser.add_argument("--torch-python", help="a Python that has torch (default: this one, if it has)")
    parser.add_argument("--only", help="sections, with commas: " + ",".join(SECTIONS))
    args = parser.parse_args(words)
    if args.only is not None:
        wanted = args.only.split(",")
        if unknown := set(wanted) - set(SECTIONS):
            parser.error(f"--only {','.join(sorted(unknown))}: expected some of {','.join(SECTIONS)}")
        args.only = [name for name in SECTIONS if name in wanted]
    return args


def command_of(args: argparse.Namespace) -> str:
    """As someone else would type it: without the path of this machine's torch."""
    words = ["nox", "-s", "bench", "--", args.what, *(["--quick"] if args.quick else [])]
    return shlex.join([*words, *(["--only", ",".join(args.only)] if args.only else [])])


def has_torch(python: str) -> bool:
    """True when `import torch` works there."""
    try:
        return subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0
    except OSError:
        return False


def machine(load: float, told: dict[str, str]) -> dict[str, Any]:
    """CPU, usable cores, versions, and the load average (1 minute) before anything was measured."""
    versions = {"Python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu_model(), "cores": cores, "load": load, "versions": versions | told}


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the kernel calls the processor; elsewhere, what Python says."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The short commit of this checkout, with a + when files differ from it; unknown outside git."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def write(result: dict[str, Any], is_whole: bool) -> None:
    """The table on stdout, bench-out/train.json, the page and the plot."""
    out = ROOT / "bench-out"
    out.mkdir(exist_ok=True)
    (out / "train.json").write_text(json.dumps(result, indent=1) + "\n")
    folder = ROOT / "docs" if is_whole else out
    print(page.terminal(result))
    print(*page.shortfalls(result), sep="\n")
    (folder / "benchmarks.md").write_text(page.page(result))
    try:
        page.draw(result, folder / "benchmarks.svg")
    except ImportError:
        print("benchmarks: no plot, matplotlib is missing (extra `bench`)", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
