"""The opponent in serving: LitServe's own prediction loop over jaxml's `LanguageModel`, one request at a time.

`serve_rows` starts it as a server. It takes the fields that the load sends and answers in OpenAI's shape, no more.

    python benchmarks/litserve_plain.py CHECKPOINT --port 8000 [--stream] [--cache DIR]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import litserve

from jaxml.infer.request import GREEDY, FinishReason

PATH = "/v1/completions"


class Whole(litserve.LitAPI):
    """Answers that come at once."""

    def __init__(self, checkpoint: str, cache: str, stream: bool = False):
        super().__init__(api_path=PATH, stream=stream)
        self._checkpoint, self._cache = checkpoint, cache

    def setup(self, device: str) -> None:
        """In the worker: open the model, and compile what an answer needs before the server is ready."""
        from jaxml.devices.start import tune_allocator, use_compilation_cache
        from jaxml.infer.language_model import LanguageModel

        tune_allocator()
        if self._cache:
            use_compilation_cache(self._cache)
        self.model = LanguageModel.open(self._checkpoint)
        self.model.generate("Once", GREEDY, max_tokens=64)

    def predict(self, x: dict[str, Any], **kwargs: Any) -> Any:
        """The answer to the request's body."""
        answer = self.model.generate(x["prompt"], GREEDY, max_tokens=x["max_tokens"])
        return choice(answer.text, answer.finish_reason)


class Streamed(Whole):
    """Answers that come as server-sent events."""

    def predict(self, x: dict[str, Any], **kwargs: Any) -> Iterator[dict[str, Any]]:
        """The answer as it comes."""
        for event in self.model.stream(x["prompt"], GREEDY, max_tokens=x["max_tokens"]):
            yield choice(event.text, event.finish_reason)

    def encode_response(self, output: Iterator[dict[str, Any]], **kwargs: Any) -> Iterator[str]:
        """Each part as an event."""
        for part in output:
            yield f"data: {json.dumps(part)}\n\n"


def choice(text: str, reason: FinishReason | None) -> dict[str, Any]:
    """A completion with one choice."""
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--cache", default="")
    args = parser.parse_args()
    api = Streamed(args.checkpoint, args.cache, True) if args.stream else Whole(args.checkpoint, args.cache)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=False)
    server.run(host="127.0.0.1", port=args.port, generate_client_file=False, log_level="error")


if __name__ == "__main__":
    main()
