"""`nox -s same -- BASE`: is the seeded 20-step loss of the tiny experiment, bit for bit, what it was at BASE?

For refactors on one machine. Either side runs its own `tests/tiny.py` with its own code in its own process; BASE is
unpacked to a temporary directory, "here" is the working tree with what is not committed. Exit codes: 0 the same,
1 different, 2 one side could not run.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = """
import json, sys
from pathlib import Path
import jaxml
from jaxml.config.spec import to_json
from jaxml.recipes.train import train
from tests.tiny import tiny_experiment

tree, place = map(Path, sys.argv[1:])
assert Path(jaxml.__file__).is_relative_to(tree), f"jaxml comes from {jaxml.__file__}"
experiment = tiny_experiment(place)
train(experiment, place / "run")
lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
losses = {line["step"]: line["loss"] for line in lines}
print(json.dumps({"experiment": to_json(experiment), "losses": losses}))
"""


def run_tree(tree: Path, place: Path) -> dict:
    """Trains with the code of a tree in a new process; its experiment (tagged JSON) and its loss by step."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, "-c", RUN, str(tree), str(place)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{done.stderr}\nsame: the tiny experiment failed with the code in {tree}", file=sys.stderr)
        sys.exit(2)
    return json.loads(done.stdout.splitlines()[-1])


def unpack(commit: str, place: Path) -> Path:
    """The files of a commit, in a directory below `place`. Unlike a work tree, it leaves nothing behind in `.git`."""
    archive = subprocess.run(["git", "archive", "--format=tar", commit], cwd=ROOT, capture_output=True)
    if archive.returncode:
        print(f"same: {archive.stderr.decode().strip()}", file=sys.stderr)
        sys.exit(2)
    tree = place / "base"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    return tree


def main(arguments: list[str]) -> int:
    """Compare BASE with the working tree; print both sides where they differ."""
    if len(arguments) != 1:
        print("usage: nox -s same -- BASE   (a commit, such as HEAD or HEAD~1)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        # The paths of data are part of an experiment: one place for both, emptied in between, keeps them equal.
        place = Path(temporary) / "tiny"
        sides = []
        for tree in (unpack(arguments[0], Path(temporary)), ROOT):
            place.mkdir()
            sides.append(run_tree(tree, place))
            place.rename(Path(temporary) / f"done{len(sides)}")
    base, here = sides
    if base["experiment"] != here["experiment"]:
        print("note: the tiny experiment itself differs between the two sides")
    if base["losses"] == here["losses"]:
        last = list(here["losses"].items())[-1]
        print(f"the same: {len(here['losses'])} losses, bit for bit; step {last[0]}: {last[1]!r}")
        return 0
    print(f"{'step':>6}  {arguments[0]:<24}  here")
    for step in base["losses"] | here["losses"]:
        left, right = base["losses"].get(step), here["losses"].get(step)
        print(f"{step:>6}  {left!r:<24}  {right!r:<24}  {'' if left == right else 'differs'}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
