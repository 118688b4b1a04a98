"""A thousand mixed requests with clients that leave and bodies that are wrong: places, memory and files are as before."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.infer.written import write_language_model
from tests.serve.servers import CACHE, ROOT, Server, free_port, resident_bytes, running

COMPLETIONS = "/v1/completions"
NUM_REQUESTS, NUM_CLIENTS = 1000, 8
PROMPTS = [f"{number}: To be, or not to be" for number in range(5)]


def mixed(server: Server, seed: int, alone: dict[str, str]) -> str:
    """One request of a random kind; returns the kind. Raises AssertionError for an answer that is not as it should be."""
    draw = random.Random(seed)
    prompt = draw.choice(PROMPTS)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    kind = draw.choice(["whole", "whole", "stream", "stream", "leave", "leave", "leave", "wrong", "large", "many"])
    if kind == "whole":
        status, answer = server.post(COMPLETIONS, body | {"logprobs": draw.choice([None, 5])})
        assert status == 200 and answer["choices"][0]["text"] == alone[prompt]
    elif kind == "stream":
        status, content = server.post(COMPLETIONS, body | {"stream": True})
        events = [json.loads(line[6:]) for line in content.decode().split("\n\n") if line.startswith("data: {")]
        assert status == 200 and "".join(event["choices"][0]["text"] for event in events) == alone[prompt]
        assert content.endswith(b"data: [DONE]\n\n")
    elif kind == "leave":
        stream = draw.random() < 0.5
        connection = server.open_request(
            COMPLETIONS,
            {"prompt": "x" * draw.choice([1, 150]), "max_tokens": 100, "n": draw.choice([1, 2]), "stream": stream},
        )
        time.sleep(draw.choice([0, 0.002, 0.01, 0.05]))
        connection.close()
    elif kind == "wrong":
        wrong: Any = draw.choice(
            [b"{", b"\xff", {}, {"prompt": "x", "n": 0}, {"prompt": "x", "tempo": 1}, {"prompt": [999]}]
        )
        status, answer = server.post(COMPLETIONS, wrong)
        assert status == 400 and "message" in answer["error"]
    elif kind == "large":
        assert server.post(COMPLETIONS, b" " * (2**20 + 1))[0] == 413
    else:
        status, answer = server.post(COMPLETIONS, body | {"prompt": PROMPTS[:3], "n": 2, "seed": 1})
        assert status == 200 and len(answer["choices"]) == 6
    return kind


@pytest.mark.slow
def test_after_a_thousand_mixed_requests_every_place_is_free_and_memory_is_flat(tmp_path: Path) -> None:
    port = free_port()
    checkpoint = write_language_model(tmp_path / "model")
    command = [str(ROOT / "tests" / "serve" / "serve_watched.py"), str(checkpoint), str(port), str(CACHE)]
    with running(command, port, tmp_path / "log") as server:
        alone = {}
        for prompt in PROMPTS:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
            alone[prompt] = server.post(COMPLETIONS, body)[1]["choices"][0]["text"]

        def measured() -> dict[str, float]:
            pids = {"worker": server.worker_pid(), "API server": server.api_pid(), "main": server.process.pid}
            sizes = {f"{name}, MiB": resident_bytes(pid) / 2**20 for name, pid in pids.items()}
            return sizes | {f"{name}, files": len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}

        kinds: Counter[str] = Counter()
        sizes = []
        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for first in range(0, NUM_REQUESTS, NUM_REQUESTS // 4):
                seeds = range(first, first + NUM_REQUESTS // 4)
                kinds.update(pool.map(lambda seed: mixed(server, seed, alone), seeds))
                stats = server.settled(running=0, queued=0, free_places=2)
                time.sleep(0.5)
                sizes.append(measured())
        print(f"\n{NUM_REQUESTS} requests in {time.monotonic() - begun:.1f} s: {dict(kinds)}\n{stats}")
        for name in sizes[0]:
            print(f"{name:20}", *(f"{size[name]:9.1f}" for size in sizes))
        assert stats["accepted"] == stats["finished"] + stats["cancelled"] and stats["failed"] == 0
        for name, size in sizes[-1].items():
            assert size <= sizes[0][name] + 8, f"{name} grew: {[each[name] for each in sizes]}"
        assert "Traceback" not in server.said()
