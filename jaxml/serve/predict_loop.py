"""LitServe's hooks for tasks that answer in one pass, batched by what is waiting, without polling.

Reads `errors`, `serve.private` and `serve.worker`; `classify` and `launch` use it for classifiers and for a user's own
LitAPI. LitServe's own batched loop polls (0.99 of a core while idle) and lets one bad request fail its neighbours.

An error never crosses to the API process as the exception that it was, which may not be possible to pickle: it goes as
a status and a message. Only what is raised to be read by clients (HTTPException, jaxml's errors) keeps its message.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Any

from fastapi import HTTPException
from litserve import LitAPI
from litserve.loops import LitLoop
from litserve.utils import LitAPIStatus, LoopResponseType, PickleableHTTPException

from jaxml.errors import ConfigError, Faults, JaxmlError
from jaxml.serve.private import Private

logger = logging.getLogger(__name__)

HOOKS = ("decode_request", "batch", "predict", "unbatch", "encode_response")
NOT_PLAIN = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
# What LitServe puts into a request queue to end a loop.
SENTINEL = (None, None, None, None)


@dataclass(frozen=True)
class Refusal:
    """Why one request gets no answer: an HTTP status, and what its client is told."""

    status: int
    message: str


class PredictLoop(LitLoop):
    """Takes what is waiting, at most `max_batch_size` requests, and answers it together.

    private: where the worker says that it is ready (None: nowhere, under a plain LitServer).
    """

    def __init__(self, private: Private | None = None):
        super().__init__()
        self._private = private

    def pre_setup(self, lit_api: LitAPI, spec: Any = None) -> None:
        """Raises ConfigError for a LitAPI that does not answer in one pass."""
        faults = Faults(ConfigError)
        owner, todo = type(lit_api).__name__, "let it return its answer: parts of answers are for language models"
        for name in ("stream", "enable_async"):
            if getattr(lit_api, name):
                faults.add(f"{name} of {owner}", expected="False", got="True", todo=todo)
        for hook in HOOKS:
            function = getattr(lit_api, hook)
            if any(test(function) for test in NOT_PLAIN):
                faults.add(f"{owner}.{hook}", expected="a plain function", got="async, or a generator", todo=todo)
        faults.raise_if_any()

    def __call__(
        self,
        lit_api: LitAPI,
        device: str,
        worker_id: int,
        request_queue: Any,
        transport: Any,
        workers_setup_status: Any,
        callback_runner: Any,
    ) -> None:
        """Runs in LitServe's worker, after `lit_api.setup`, until the sentinel."""
        if self._private is not None:
            self._private.write_card({})
        while (taken := take(request_queue, lit_api.max_batch_size)) is not None:
            answers = answer(lit_api, [payload for *_, payload in taken])
            for (queue_id, uid, _, _), given in zip(taken, answers, strict=True):
                self._put(transport, queue_id, uid, given)

    def _put(self, transport: Any, queue_id: int, uid: str, given: Any) -> None:
        status: Any = LitAPIStatus.OK  # a string, and LitServe calls it a LitAPIStatus
        try:
            pickle.dumps(given)
        except Exception as error:  # whatever a value's own __reduce__ raises
            given = _refusal(error, "encode_response")
        if isinstance(given, Refusal):
            status, given = LitAPIStatus.ERROR, PickleableHTTPException(given.status, given.message)
        self.put_response(transport, queue_id, uid, given, status, LoopResponseType.REGULAR)


def take(request_queue: Any, most: int) -> list[tuple[int, str, float, Any]] | None:
    """Waits for a request, then takes those that wait behind it. None for the sentinel: the server stops."""
    taken = [request_queue.get()]
    # The queue is in another process: asking for its size first spares the idle case an exception across processes.
    for _ in range(min(most - 1, request_queue.qsize())):
        try:
            taken.append(request_queue.get_nowait())
        except Empty:
            break
    return None if SENTINEL in taken else taken


def answer(lit_api: LitAPI, payloads: Sequence[Any]) -> list[Any]:
    """The encoded answer to each payload, or a Refusal for it alone. Calls the hooks as LitServe does: `batch` and
    `unbatch` where `max_batch_size` is above 1."""
    contexts: list[dict[str, Any]] = [{} for _ in payloads]
    answers: list[Any] = [
        _tried(lit_api.decode_request, payload, context=context)
        for payload, context in zip(payloads, contexts, strict=True)
    ]
    decoded = [index for index, value in enumerate(answers) if not isinstance(value, Refusal)]
    outputs = _predicted(lit_api, [answers[index] for index in decoded], [contexts[index] for index in decoded])
    for index, output in zip(decoded, outputs, strict=True):
        if not isinstance(output, Refusal):
            output = _tried(lit_api.encode_response, output, context=contexts[index])
        answers[index] = output
    return answers


def _predicted(lit_api: LitAPI, inputs: list[Any], contexts: list[dict[str, Any]]) -> list[Any]:
    """The output for each input. When a batch fails, each of it is tried alone."""
    if lit_api.max_batch_size == 1:
        return [_tried(lit_api.predict, x, context=context) for x, context in zip(inputs, contexts, strict=True)]
    if not inputs:
        return []
    outputs = _tried(lambda: _predict_batch(lit_api, inputs, contexts))
    if not isinstance(outputs, Refusal):
        return outputs
    if len(inputs) == 1:
        return [outputs]
    return [
        output for x, context in zip(inputs, contexts, strict=True) for output in _predicted(lit_api, [x], [context])
    ]


def _predict_batch(lit_api: LitAPI, inputs: list[Any], contexts: list[dict[str, Any]]) -> list[Any]:
    batch = _call(lit_api.batch, inputs, context=contexts)
    outputs = list(_call(lit_api.unbatch, _call(lit_api.predict, batch, context=contexts), context=contexts))
    if len(outputs) != len(inputs):
        raise ConfigError(
            f"{type(lit_api).__name__}.predict and unbatch",
            expected=f"one output for each of {len(inputs)} inputs",
            got=str(len(outputs)),
            todo="return a list as long as the batch",
        )
    return outputs


def _tried(hook: Callable[..., Any], *arguments: Any, **context: Any) -> Any:
    """What the hook returns, or a Refusal."""
    try:
        return _call(hook, *arguments, **context)
    except Exception as error:
        return _refusal(error, getattr(hook, "__name__", "predict"))


def _call(hook: Callable[..., Any], *arguments: Any, context: Any = None) -> Any:
    """Hooks may ask for the request's context, as LitServe documents: one dict, or in a batch a list of them."""
    if "context" in inspect.signature(hook).parameters:
        return hook(*arguments, context=context)
    return hook(*arguments)


def _refusal(error: Exception, hook: str) -> Refusal:
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail))
    if isinstance(error, JaxmlError) and error.exit_code == 2:
        return Refusal(400, str(error))
    # The message of any other error may hold what the client sent; where it happened does not.
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed: %s\n%s", hook, type(error).__name__, where)
    return Refusal(500, f"the task failed ({type(error).__name__}); the server's log says where")
