"""Measures jaxml: `nox -s bench -- train` runs this, on a machine that does nothing else.

    python benchmarks/run.py VERB [--quick] [--only SECTION,..] [--torch-python PATH] [--peers-python PATH]

    train   steps, starts, checkpoints, a whole small run     sections steps,start,checkpoint,seek,nanogpt
    decode  generated tokens a second, against the bound      sections stories,gpt2,llama
    serve   requests over HTTP, against LitServe's own loop   sections load,start
    scale   meshes, collectives, compiling, precision         sections overhead,collectives,compile,digests,precision

Prints a table and writes bench-out/VERB.json; a whole run also writes the verb's section of docs/benchmarks.md and its plot,
and leaves those of the other verbs; a quick or partial one writes both beside the JSON. Exit code 1 when a row was refused
or a section failed. Reads `train_rows`, `decode_rows`, `serve_rows` and `scale_rows` for what is measured, `page` for how it
is told.
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
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# As a script, this file sees only its own folder, and jaxml is to be that of this checkout.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import decode_rows, page, scale_rows, serve_rows, train_rows
from benchmarks.interleave import MAX_SPREAD, REPEATS, Row
from benchmarks.plan import Plan, num_cores
from benchmarks.processes import ROOT, MeasurementError
from benchmarks.verbs import VERBS

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
SECTIONS = {
    "train": train_rows.SECTIONS,
    "decode": decode_rows.SECTIONS,
    "serve": serve_rows.SECTIONS,
    "scale": scale_rows.SECTIONS,
}
# What the other Pythons need: modules of `--torch-python` by verb, and of `--peers-python`.
TORCH_NEEDS = {"train": ("torch",), "decode": ("torch", "transformers"), "serve": (), "scale": ()}
PEERS_NEED = ("llama_cpp", "gguf")


def main() -> int:
    args = parse(sys.argv[1:])
    # An exception, so that the process being measured is killed and its files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sections = SECTIONS[args.what]
    chosen = args.only or list(sections)
    load = os.getloadavg()[0]
    torch_python = python_with(TORCH_NEEDS[args.what], args.torch_python, "--torch-python")
    peers_python = python_with(PEERS_NEED if args.what == "decode" else (), args.peers_python, "--peers-python")
    begun = time.perf_counter()
    rows: list[Row] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="jaxml-bench-") as workspace:
        plan = Plan(Path(workspace), 1 if args.quick else REPEATS, args.quick, torch_python, peers_python)
        for name in chosen:
            print(f"{name} (after {time.perf_counter() - begun:.0f} s)", file=sys.stderr, flush=True)
            try:
                rows += sections[name](plan)
            except MeasurementError as error:
                failed[name] = str(error)
                print(f"benchmarks: {error}", file=sys.stderr)
    limit = None if args.quick else MAX_SPREAD
    result = {
        "verb": args.what,
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
    write(result, is_whole=not args.quick and set(chosen) == set(sections))
    return 1 if failed or any(row["refused"] for row in result["rows"]) else 0


def parse(words: list[str]) -> argparse.Namespace:
    """The flags; `only` becomes a list of sections of the verb in their own order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(VERBS), help="the group of rows to measure")
    parser.add_argument("--quick", action="store_true", help="prove that everything runs: one repeat, few steps")
    parser.add_argument(
        "--torch-python", help="a Python that has torch, transformers too (default: this one, if it has)"
    )
    parser.add_argument("--peers-python", help="a Python that has llama-cpp-python and gguf (`nox -s peers` makes one)")
    parser.add_argument("--only", help="sections, with commas")
    args = parser.parse_args(words)
    if args.only is not None:
        sections, wanted = SECTIONS[args.what], args.only.split(",")
        if unknown := set(wanted) - set(sections):
            parser.error(f"--only {','.join(sorted(unknown))}: expected some of {','.join(sections)}")
        args.only = [name for name in sections if name in wanted]
    return args


def command_of(args: argparse.Namespace) -> str:
    """As someone else would type it: without the path of this machine's torch."""
    words = ["nox", "-s", "bench", "--", args.what, *(["--quick"] if args.quick else [])]
    return shlex.join([*words, *(["--only", ",".join(args.only)] if args.only else [])])


def python_with(modules: Sequence[str], named: str | None, flag: str) -> str | None:
    """The Python that was named, or this one, if it has `modules`; None, and said, when nobody has; None when there are
    none to have. Exits with 2 for one that was named and lacks them."""
    if not modules:
        return None
    python = named or sys.executable
    if imports(python, modules):
        return python
    needed = " and ".join(modules)
    if named:
        print(f"benchmarks: {flag} {named} cannot import {needed}", file=sys.stderr)
        sys.exit(2)
    print(f"benchmarks: no {needed} here and no {flag}: its rows are skipped", file=sys.stderr)
    return None


def imports(python: str, modules: Sequence[str]) -> bool:
    """True when that Python imports them all."""
    try:
        return subprocess.run([python, "-c", f"import {', '.join(modules)}"], capture_output=True).returncode == 0
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
    return {"cpu": cpu_model(), "cores": num_cores(), "load": load, "versions": versions | told}


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
    """The table on stdout, bench-out/VERB.json, the verb's section of the page and its plot."""
    out = ROOT / "bench-out"
    out.mkdir(exist_ok=True)
    (out / f"{result['verb']}.json").write_text(json.dumps(result, indent=1) + "\n")
    folder = ROOT / "docs" if is_whole else out
    print(page.terminal(result))
    print(*page.shortfalls(result), sep="\n")
    plot = None
    try:
        page.draw(result, folder / VERBS[result["verb"]].plot)
        plot = VERBS[result["verb"]].plot
    except ImportError:
        print("benchmarks: no plot, matplotlib is missing (extra `bench`)", file=sys.stderr)
    place = folder / "benchmarks.md"
    old = place.read_text() if place.exists() else ""
    place.write_text(page.merged(old, result["verb"], page.section(result, plot)))


if __name__ == "__main__":
    sys.exit(main())
