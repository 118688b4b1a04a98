"""Question: does one model really go all the way, trained, killed, resumed, measured, served? (`nox -s quickstart`)

Command: python experiments/quickstart.py   (needs the extras `serve` and `client`)
Hardware: two CPU cores, no accelerator; two to three minutes.
Result: the killed run's curve is the straight run's bit for bit, and the served model answers OpenAI's own client.

1. trains `experiments/shakespeare.py`, is killed with -9 on the way, and resumes to the end;
2. trains the same again, not killed, past the place of the kill, and compares every loss and every bit of a checkpoint;
3. evaluates, and prints a sample;
4. serves the checkpoint, asks one streamed question with the official `openai` client, and stops cleanly;
5. leaves `report.html`.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

STEPS, KILL_AFTER, COMPARED = 300, 70, 100
FILE = Path(__file__).parent / "shakespeare.py"
RUN = "from jaxml.cli.main import entry; entry()"
PROMPT = "ROMEO:"
# A checkpoint every 50 steps; those of every 100 steps stay, so that both runs have one of step COMPARED.
SAVING = ["--checkpoint.every", "50", "--checkpoint.keep-every", str(COMPARED)]
SETTINGS = ["--train.steps", str(STEPS), "--train.eval-every", "150", *SAVING]


def jaxml(*arguments: str) -> list[str]:
    """The command line of `jaxml ARGUMENTS` in this environment."""
    return [sys.executable, "-c", RUN, *arguments]


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def losses(run_dir: Path) -> dict[int, float]:
    """Step to loss, of every logged step."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def stop_after(step: int, run_dir: Path, number: signal.Signals) -> None:
    """Start the run and send it a signal once it has logged `step`."""
    process = subprocess.Popen(jaxml("train", str(FILE), "--run-dir", str(run_dir), *SETTINGS))
    log = run_dir / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended by itself with exit code {process.returncode}")
        time.sleep(0.02)
    process.send_signal(number)
    process.wait()


def compare(killed: Path, straight: Path) -> None:
    """Refuse to go on unless both runs have the same losses up to step COMPARED and the same bits there."""
    first, second = losses(killed), losses(straight)
    is_same_curve = all(first[step] == second[step] for step in range(1, COMPARED + 1))
    folders = [str(run / "checkpoints" / str(COMPARED)) for run in (killed, straight)]
    is_same_model = subprocess.run(jaxml("inspect", *folders)).returncode == 0
    print(f"   {COMPARED} losses: {'the same, bit for bit' if is_same_curve else 'DIFFERENT'}")
    if not (is_same_curve and is_same_model):
        raise SystemExit(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_ready(port: int) -> bool:
    """Whether the server answers, and says that it is ready (it answers 503 until then)."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready") as answer:
            return answer.status == 200
    except OSError:
        return False


def serve_and_ask(run_dir: Path) -> None:
    """Serve the newest checkpoint, stream one answer through the official client, and stop the server."""
    import openai

    port = free_port()
    server = subprocess.Popen(jaxml("serve", str(run_dir), "--port", str(port), "--max-batch", "2"))
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        while True:
            if server.poll() is not None:
                raise SystemExit(f"the server ended by itself with exit code {server.returncode}")
            if is_ready(port):
                break
            time.sleep(0.2)
        model = client.models.list().data[0].id
        print(f"   {PROMPT}", end="", flush=True)
        for chunk in client.completions.create(
            model=model, prompt=PROMPT, max_tokens=100, temperature=0.7, seed=1, stream=True
        ):
            print(chunk.choices[0].text.replace("\n", "\n   "), end="", flush=True)
        print()
    finally:
        server.terminate()
        code = server.wait(timeout=30)
    print(f"   the server stopped with exit code {code}")
    if code != 0:
        raise SystemExit(1)


def main() -> None:
    begun = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="jaxml-quickstart-"))
    killed, straight = home / "run", home / "straight"
    say(f"1. Train {STEPS} steps, killed with -9 after step {KILL_AFTER} ({killed})")
    stop_after(KILL_AFTER, killed, signal.SIGKILL)
    say("   killed; resume it to the end")
    subprocess.run(jaxml("resume", str(killed), "--sample", PROMPT), check=True)
    say(f"2. The same, not killed, as far as step {COMPARED}: is it the same curve?")
    stop_after(COMPARED, straight, signal.SIGTERM)
    compare(killed, straight)
    say("3. Evaluate, and let it write")
    subprocess.run(jaxml("eval", str(killed)), check=True)
    arguments = ["--prompt", PROMPT, "--max-tokens", "200", "--temperature", "0.8", "--seed", "0", "--stream"]
    subprocess.run(jaxml("generate", str(killed), *arguments), check=True)
    say("4. Serve it, and ask with OpenAI's client")
    serve_and_ask(killed)
    say(f"5. The report: {killed / 'report.html'}")
    print(f"   {time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
