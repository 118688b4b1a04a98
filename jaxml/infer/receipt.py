"""A receipt: what an answer was made of, as plain values, and generating it again from that.

Reads `infer.decoding_model`, `infer.engine`, `infer.request` and `infer.scheduler`; the engine makes one for a request that
asks for it, `jaxml replay` reads one. It holds the prompt's and the answer's token ids, so it goes to the client alone.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax

from jaxml import __version__
from jaxml.errors import Fault, RequestError
from jaxml.infer.decoding_model import DecodingModel
from jaxml.infer.request import Event, Request, Sampling

if TYPE_CHECKING:
    from jaxml.infer.engine import EngineSpec
    from jaxml.infer.scheduler import Seat

FORMAT = 1


def receipt_of(model: DecodingModel, spec: EngineSpec, seat: Seat) -> dict[str, Any]:
    """The receipt of an answer that is complete.

    sampling: with the seed that was drawn where the request gave none. checkpoint: the seal of the manifest.
    """
    num_prompt = len(seat.request.prompt)
    sampling = dataclasses.asdict(dataclasses.replace(seat.request.sampling, seed=seat.seed))
    return {
        "format": FORMAT,
        **_circumstances(model),
        "engine": {"mode": spec.mode, "max_batch": spec.max_batch, "step_tokens": spec.step_tokens},
        "prompt": list(seat.request.prompt),
        "sampling": sampling,
        "tokens": seat.tokens[num_prompt : num_prompt + seat.progress.num_tokens],
    }


def replay(model: DecodingModel, receipt: Mapping[str, Any]) -> tuple[list[int], list[Event]]:
    """(tokens, events) of the same request, computed again as the receipt says.

    Raises RequestError: no receipt of ours, one of an engine that was not invariant, and one of another checkpoint,
    tokenizer, version or backend, each of them named.
    """
    from jaxml.infer.engine import Engine, EngineSpec

    _check(model, receipt)
    spec = EngineSpec(**receipt["engine"])
    request = Request("replay", tuple(receipt["prompt"]), Sampling.from_plain(receipt["sampling"]), wants_receipt=True)
    events: list[Event] = []
    has_ended = threading.Event()

    def note(new: list[Event]) -> None:
        events.extend(new)
        if any(event.finish_reason for event in new):
            has_ended.set()

    engine = Engine(model, spec, emit=note)
    engine.start()
    try:
        engine.submit(request)
        has_ended.wait()
    finally:
        engine.close()
    again = events[-1].receipt
    return ([] if again is None else again["tokens"]), events


def _circumstances(model: DecodingModel) -> dict[str, str]:
    return {
        "checkpoint": model.opened.manifest.seal,
        "tokenizer": "" if model.tokenizer is None else model.tokenizer.fingerprint,
        "jaxml": __version__,
        "jaxlib": version("jaxlib"),
        "backend": jax.default_backend(),
    }


def _check(model: DecodingModel, receipt: Mapping[str, Any]) -> None:
    needed = {"format", *_circumstances(model), "engine", "prompt", "sampling", "tokens"}
    if receipt.get("format") != FORMAT or set(receipt) != needed:
        raise RequestError(
            "receipt",
            expected=f"an object of format {FORMAT} with {', '.join(sorted(needed))}",
            got=f"format {receipt.get('format')!r} with {', '.join(sorted(receipt))[:200]}",
            todo="pass the `receipt` of an answer as the server gave it",
        )
    faults = [
        Fault(f"receipt.{name}", str(receipt[name]), here, "replay it with what it was made with")
        for name, here in _circumstances(model).items()
        if receipt[name] != here
    ]
    mode = receipt["engine"].get("mode")
    if mode != "invariant":
        todo = "serve with the invariant mode to get receipts that can be replayed"
        faults.append(Fault("receipt.engine.mode", "invariant", str(mode), todo))
    if faults:
        raise RequestError.from_faults(faults)
