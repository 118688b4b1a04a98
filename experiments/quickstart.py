"""Question: does a run that was killed with -9 really go on bit for bit? (`nox -s quickstart`)

Command: python experiments/quickstart.py
Hardware: two CPU cores, no accelerator; about two minutes.
Result: the curves of the killed and of the straight run are the same, bit for bit.

It trains `experiments/shakespeare.py` twice, for fewer steps: once straight through, and once killed half way and
resumed. Then it compares every logged loss and every bit of the last checkpoint.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, KILL_AFTER = 200, 110
FILE = Path(__file__).parent / "shakespeare.py"
RUN = "from jaxml.cli.main import entry; entry()"
SETTINGS = ["--train.steps", str(STEPS), "--train.eval-every", "100", "--checkpoint.every", "50"]


def jaxml(*arguments: str) -> list[str]:
    """The command line of `jaxml ARGUMENTS` in this environment."""
    return [sys.executable, "-c", RUN, *arguments]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every logged step."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def kill_half_way(run_dir: Path) -> int:
    """Start a run and kill it with -9 once it has logged step KILL_AFTER; returns the last step it logged."""
    process = subprocess.Popen(jaxml("train", str(FILE), "--run-dir", str(run_dir), *SETTINGS))
    while not (run_dir / "metrics.jsonl").exists() or len(losses_so_far(run_dir)) < KILL_AFTER:
        if process.poll() is not None:
            raise SystemExit(f"the run ended by itself with exit code {process.returncode}")
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(losses_so_far(run_dir))


def losses_so_far(run_dir: Path) -> list[bytes]:
    """Whole lines of a log that is being written."""
    return (run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]


def main() -> None:
    begun = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="jaxml-quickstart-"))
    straight, killed = home / "straight", home / "killed"
    print(f"1. Train {STEPS} steps straight through ({straight})", flush=True)
    subprocess.run(jaxml("train", str(FILE), "--run-dir", str(straight), *SETTINGS), check=True)
    print("\n2. The same again, killed with -9 on the way", flush=True)
    last = kill_half_way(killed)
    print(f"\n   killed after step {last}\n\n3. Resume it", flush=True)
    subprocess.run(jaxml("resume", str(killed)), check=True)
    print("\n4. Compare", flush=True)
    same_curve = losses(straight) == losses(killed)
    same_weights = subprocess.run(jaxml("inspect", str(straight), str(killed))).returncode == 0
    first, end = losses(straight)[0][1], losses(straight)[-1][1]
    print(f"   {STEPS} losses, from {first:.3f} to {end:.3f}: {'the same' if same_curve else 'DIFFERENT'}, bit for bit")
    print(f"   report: {killed / 'report.html'}")
    print(f"   {time.monotonic() - begun:.0f} s in all")
    if not (same_curve and same_weights):
        raise SystemExit(1)
    shutil.rmtree(straight)


if __name__ == "__main__":
    main()
