"""A text classifier behind LitServe's hooks: `POST /v1/classify`.

Reads `errors`, `infer.predict`, `serve.predict_loop`, `serve.private` and `serve.worker`; `launch` serves it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from litserve import LitAPI

from jaxml.errors import Faults, RequestError
from jaxml.serve.predict_loop import PredictLoop
from jaxml.serve.private import Private
from jaxml.serve.worker import reported

if TYPE_CHECKING:
    from jaxml.infer.predict import Prediction, TextClassifier

PATH = "/v1/classify"
FIELDS = ("input", "model")
MAX_TEXTS = 256


class ClassifyAPI(LitAPI):
    """{"input": text or [texts]} to {"model": name, "results": [{"label": name, "probabilities": {name: p}}]}.

    max_batch: texts that are computed together, however they are spread over requests. cache_dir: where compiled
    programs are kept ("": nowhere).
    """

    def __init__(self, path: str, name: str, max_batch: int, private: Private, cache_dir: str = ""):
        super().__init__(max_batch_size=max_batch, api_path=PATH, loop=PredictLoop(private))
        self.path, self.name, self.num_rows, self.cache_dir = path, name, max_batch, cache_dir
        self._private = private
        self._classifier: TextClassifier | None = None

    def setup(self, device: str) -> None:
        """In the worker: open the checkpoint and compile. A failure is told to the main process, and ends this one."""
        with reported(self._private):
            from jaxml.devices.start import tune_allocator, use_compilation_cache
            from jaxml.infer.predict import TextClassifier

            tune_allocator()
            if self.cache_dir:
                use_compilation_cache(self.cache_dir)
            self._classifier = TextClassifier.open(self.path, self.num_rows)
            self._classifier.warm_up()

    # LitServe makes FastAPI's parameters of the annotations of `request` and of what `encode_response` returns: none here.
    def decode_request(self, request) -> list[np.ndarray]:  # type: ignore[override]
        """The token ids of each text of a body. Raises RequestError with every fault."""
        texts = texts_of(request, self.name)
        return [self._opened.encode(text, f"input[{number}]") for number, text in enumerate(texts)]

    def predict(self, x: Any) -> Any:  # type: ignore[override]
        """The predictions of each request (of the only one, where requests are not batched)."""
        requests = x if self.max_batch_size > 1 else [x]
        every = iter(self._opened.predict_encoded([row for rows in requests for row in rows]))
        answers = [[next(every) for _ in rows] for rows in requests]
        return answers if self.max_batch_size > 1 else answers[0]

    def encode_response(self, output: list[Prediction]):  # type: ignore[override]
        return {"model": self.name, "results": [dataclasses.asdict(prediction) for prediction in output]}

    @property
    def _opened(self) -> TextClassifier:
        assert self._classifier is not None, "LitServe calls setup first"
        return self._classifier


def texts_of(body: Any, name: str) -> list[str]:
    """The texts of a parsed JSON body. Raises RequestError with every fault of it; texts are not repeated there."""
    faults = Faults(RequestError)
    if not isinstance(body, dict):
        got, todo = type(body).__name__, 'send {"input": "some text"}'
        raise RequestError("the body", expected="a JSON object", got=got, todo=todo)
    for field in body:
        if field not in FIELDS:
            expected = f"one of {', '.join(FIELDS)}"
            faults.add(str(field)[:60], expected=expected, got="an unknown field", todo="leave it out")
    if body.get("model") not in (None, name):
        got, todo = repr(body["model"])[:60], "correct the name, or leave it out"
        faults.add("model", expected=repr(name), got=got, todo=todo)
    given = body.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        got = "nothing" if given is None else f"{type(given).__name__}"
        faults.add("input", expected="a text, or a list of texts", got=got, todo="send at least one text")
    elif len(texts) > MAX_TEXTS:
        got, todo = f"{len(texts)} texts", "send several requests"
        faults.add("input", expected=f"at most {MAX_TEXTS} texts", got=got, todo=todo)
    faults.raise_if_any()
    return texts  # type: ignore[return-value]
