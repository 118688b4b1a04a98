"""LitServe's hooks in batches: each request gets its own answer, or its own error, and an idle loop does nothing."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from typing import Any

import pytest
from fastapi import HTTPException
from litserve import LitAPI
from litserve.utils import LitAPIStatus

from jaxml.errors import ConfigError, RequestError
from jaxml.serve.predict_loop import SENTINEL, PredictLoop, Refusal, answer, take


class Squares(LitAPI):
    """Squares numbers; some numbers go wrong in one hook or another."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.sizes: list[int] = []

    def decode_request(self, request: Any, context: dict[str, Any]) -> int:
        context["asked"] = request
        if request == "bad":
            raise RequestError("n", expected="a number", got="bad", todo="send one")
        if request == "secret":
            raise ValueError("secret")
        return int(request)

    def predict(self, x: Any) -> Any:
        inputs = x if self.max_batch_size > 1 else [x]
        self.sizes.append(len(inputs))
        if 13 in inputs:
            raise ZeroDivisionError("13")
        outputs = [number * number for number in inputs]
        return outputs if self.max_batch_size > 1 else outputs[0]

    def encode_response(self, output: int, context: dict[str, Any]) -> Any:
        if output == 100:
            raise HTTPException(418, "no tens")
        return {"asked": context["asked"], "square": output}


def api(max_batch_size: int) -> Squares:
    made = Squares(max_batch_size=max_batch_size, loop=PredictLoop())
    made.pre_setup()
    return made


class Transport:
    """LitServe's, without its processes: what is sent must be possible to pickle."""

    def __init__(self) -> None:
        self.sent: dict[str, tuple[Any, str, int]] = {}

    def send(self, item: Any, consumer_id: int) -> None:
        uid, (data, status, _, _) = pickle.loads(pickle.dumps(item))
        self.sent[uid] = (data, status, consumer_id)


def served(lit_api: LitAPI, payloads: list[Any]) -> dict[str, tuple[Any, str, int]]:
    """What the loop sends for payloads that wait before it begins."""
    requests: Any = queue.Queue()
    for number, payload in enumerate(payloads):
        requests.put((0, str(number), 0.0, payload))
    transport = Transport()
    loop = threading.Thread(target=lit_api.loop, args=(lit_api, "cpu", 0, requests, transport, {}, None), daemon=True)
    loop.start()
    deadline = time.monotonic() + 5
    while len(transport.sent) < len(payloads) and time.monotonic() < deadline:
        time.sleep(0.002)
    requests.put(SENTINEL)
    loop.join(5)
    assert not loop.is_alive()
    return transport.sent


@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_answers_do_not_depend_on_how_requests_are_batched(max_batch_size: int) -> None:
    assert answer(api(max_batch_size), ["2", "3", "4"]) == [
        {"asked": text, "square": int(text) ** 2} for text in ("2", "3", "4")
    ]


def test_what_waits_is_taken_together_up_to_the_batch_size() -> None:
    lit_api = api(4)
    sent = served(lit_api, [str(number) for number in range(6)])
    assert {uid: data["square"] for uid, (data, _, _) in sent.items()} == {str(n): n * n for n in range(6)}
    assert lit_api.sizes == [4, 2]


@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_an_error_is_a_plain_record_for_its_request_alone(max_batch_size: int) -> None:
    sent = served(api(max_batch_size), ["2", "bad", "13", "10"])
    assert sent["0"] == ({"asked": "2", "square": 4}, LitAPIStatus.OK, 0)
    errors = {uid: data for uid, (data, status, _) in sent.items() if status == LitAPIStatus.ERROR}
    assert {uid: (error.status_code, type(error)) for uid, error in errors.items()} == {
        "1": (400, HTTPException),
        "2": (500, HTTPException),
        "3": (418, HTTPException),
    }
    assert "expected: a number" in errors["1"].detail and errors["3"].detail == "no tens"


def test_the_message_of_an_unexpected_error_is_neither_sent_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    (refusal,) = answer(api(1), ["secret"])
    assert refusal == Refusal(500, "the task failed (ValueError); the server's log says where")
    assert "secret" not in refusal.message and "in decode_request" in caplog.text
    assert 'ValueError("secret")' in caplog.text, "the line of the program is shown"


def test_an_answer_that_cannot_be_pickled_is_an_error_of_that_request() -> None:
    class Lambdas(LitAPI):
        def predict(self, x: Any) -> Any:
            return (lambda: x) if x == "f" else x

    sent = served(Lambdas(loop=PredictLoop()), ["f", "g"])
    assert sent["0"][1] == LitAPIStatus.ERROR and sent["0"][0].status_code == 500
    assert sent["1"] == ("g", LitAPIStatus.OK, 0)


def test_a_batch_of_another_length_than_its_inputs_is_refused() -> None:
    class Short(LitAPI):
        def predict(self, x: Any) -> Any:
            return [1]

    lit_api = Short(max_batch_size=4, loop=PredictLoop())
    lit_api.pre_setup()
    # Alone each has the right length, so each is answered.
    assert answer(lit_api, ["a", "b"]) == [1, 1]


def test_batches_have_one_context_a_request() -> None:
    class Contexts(LitAPI):
        def decode_request(self, request: Any, context: dict[str, Any]) -> Any:
            context["id"] = request
            return request

        def predict(self, x: Any, context: list[dict[str, Any]]) -> Any:
            return [item["id"] for item in context]

    lit_api = Contexts(max_batch_size=2, loop=PredictLoop())
    lit_api.pre_setup()
    assert answer(lit_api, ["a", "b"]) == ["a", "b"]


def test_the_sentinel_ends_the_loop_also_behind_requests() -> None:
    requests: Any = queue.Queue()
    requests.put((0, "a", 0.0, {}))
    requests.put(SENTINEL)
    assert take(requests, 4) is None


@pytest.mark.parametrize("field", ["stream", "enable_async"])
def test_an_api_that_does_not_answer_in_one_pass_is_refused(field: str) -> None:
    class Whatever(LitAPI):
        async def predict(self, x: Any) -> Any:
            return x

        async def decode_request(self, request: Any) -> Any:
            return request

        async def encode_response(self, output: Any) -> Any:
            return output

    lit_api = Whatever(loop=PredictLoop(), **{field: True})
    with pytest.raises(ConfigError, match=field) as refused:
        lit_api.loop.pre_setup(lit_api)
    assert [fault.failed for fault in refused.value.faults[1:]] == [
        f"Whatever.{hook}" for hook in ("decode_request", "predict", "encode_response")
    ]
