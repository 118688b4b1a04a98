"""Claim 5, the last part: the served answer equals `generate`, or `predict`, over HTTP from a service in its own process.

Reads `infer` for what is expected; `prove.prove` starts the service as early as it can, because it compiles while other
claims run. The service is the real one, `jaxml serve` with its defaults, on a port of this machine only.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxml.errors import RunError
from jaxml.infer.language_model import LanguageModel
from jaxml.infer.predict import TextClassifier
from jaxml.prove import decoding, predicting
from jaxml.prove.claims import Claim, exact
from jaxml.prove.decoding import MAX_TOKENS, PROMPTS, SAMPLINGS, held_out_rows
from jaxml.prove.predicting import held_out_ids
from jaxml.prove.subject import Subject

SCRIPT = """
import sys
from jaxml.serve.launch import serve
if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], port=int(sys.argv[2]), cache_dir=sys.argv[3]))
"""
READY_S, DRAIN_S, POLL_S = 180.0, 20.0, 0.1


class Service:
    """`jaxml serve` in a process of its own, ended on the way out. Its words are in `log`."""

    def __init__(self, checkpoint: Path, log: Path, cache_dir: str | None):
        self.log, self.port = log, _free_port()
        script = log.with_name("serve_small.py")
        script.write_text(SCRIPT)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(checkpoint), str(self.port), cache_dir or ""],
                stdout=output,
                stderr=output,
                cwd=Path(__file__).resolve().parents[2],
            )

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_ready(self) -> None:
        """Raises RunError, with the service's last words, where it ends or is not ready in time."""
        deadline = time.monotonic() + READY_S
        while self._status("/health/ready") != 200:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RunError(
                    "starting jaxml serve on the small checkpoint",
                    expected=f"ready within {READY_S:.0f} s",
                    got=self.log.read_text(errors="replace").strip()[-500:] or "no word",
                    todo="try `jaxml serve` on a run of your own, or leave this claim out with --no-serve",
                )
            time.sleep(POLL_S)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON of an answer. Raises RunError for another status than 200."""
        status, answer = self._request("POST", path, body)
        if status != 200:
            got = f"{status}: {json.dumps(answer)[:300]}"
            raise RunError(f"asking {path}", expected="an answer", got=got, todo=f"see {self.log}")
        return answer

    def _status(self, path: str) -> int:
        try:
            return self._request("GET", path)[0]
        except OSError:
            return 0

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            client.request(method, path, None if body is None else json.dumps(body))
            answer = client.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else None
        finally:
            client.close()


def served_text(subject: Subject, model: LanguageModel, service: Service) -> Claim:
    """The texts that /v1/completions gives, greedy and sampled by a seed, against those of `generate`."""
    prompts = [row[:length].tolist() for row, length in zip(held_out_rows(subject), PROMPTS, strict=True)]
    service.wait_ready()
    faults = []
    for sampling in SAMPLINGS:
        for prompt, expected in zip(prompts, model.generate(prompts, sampling), strict=True):
            body = {
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
            }
            answer = service.ask("/v1/completions", body | ({} if sampling.seed is None else {"seed": sampling.seed}))
            choice = answer["choices"][0]
            got, wanted = (choice["text"], choice["finish_reason"]), (expected.text, expected.finish_reason)
            if got != wanted:
                what = f"prompt of {len(prompt)} tokens, temperature {sampling.temperature:g}"
                faults.append(f"{what}: served {got[0]!r} ({got[1]}), generated {wanted[0]!r} ({wanted[1]})")
    detail = f"{len(prompts)} prompts over HTTP, {MAX_TOKENS} tokens, greedy and sampled"
    return exact(decoding.GROUP, "served is generated", faults, detail)


def served_labels(subject: Subject, classifier: TextClassifier, service: Service) -> Claim:
    """The probabilities that /v1/classify gives against those of `predict`, to 12 digits (two processes, two compilers)."""
    texts = [subject.prepared.tokenizer.decode(row) for row in held_out_ids(subject)]
    texts = [text for text in texts if text]
    expected = classifier.predict(texts)
    service.wait_ready()
    results = service.ask("/v1/classify", {"input": texts})["results"]
    faults = [
        f"text {number}: served {result['probabilities']}, predicted {prediction.probabilities}"
        for number, (result, prediction) in enumerate(zip(results, expected, strict=True))
        if not np.allclose(list(result["probabilities"].values()), list(prediction.probabilities.values()), 1e-9, 1e-12)
        or result["label"] != prediction.label
    ]
    return exact(predicting.GROUP, "served is predicted", faults, f"{len(texts)} texts over HTTP")


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]
