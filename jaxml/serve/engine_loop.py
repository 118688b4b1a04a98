"""The engines inside LitServe's worker: our LitLoop opens the checkpoints, warms up, and serves the engines on a socket.

Reads `errors`, `infer.engine`, `infer.language_model`, `devices.start`, `serve.engine_server`, `serve.private` and `serve.worker`;
`launch` hands it to LitServe. LitServe's request queue is never touched: tokens do not cross its pickling queues
(architecture, format D).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from litserve import LitAPI
from litserve.loops import LitLoop

from jaxml.errors import JaxmlError
from jaxml.serve.engine_server import Emit, EngineLike, EngineServer, Hosted
from jaxml.serve.private import Private
from jaxml.serve.worker import reported

OnStuck = Callable[[], None]
# Builds an engine that reports to the callbacks, and the card that says what is served (`served.Served.from_card`). It is
# pickled.
OpenEngine = Callable[[Emit, OnStuck], tuple[EngineLike, dict[str, Any]]]

# How long the last events of an engine that is stuck have to leave.
FLUSH_S = 0.5


@dataclass(frozen=True)
class OpenCheckpoint:
    """Opens the engine of a language model's checkpoint.

    cache_dir: where compiled programs are kept ("": nowhere). The rest as in `infer.engine.EngineSpec` (None: its own).
    """

    path: str
    name: str
    max_batch: int
    max_queue: int
    cache_dir: str = ""
    mode: Literal["fast", "invariant"] = "fast"
    cache_bytes: int | None = None
    watchdog_s: float | None = None

    def __call__(self, emit: Emit, on_stuck: OnStuck) -> tuple[EngineLike, dict[str, Any]]:
        """Raises CheckpointError: nothing usable at `path`, a probe that is not reproduced, no tokenizer."""
        from jaxml.devices.start import tune_allocator, use_compilation_cache
        from jaxml.infer.engine import Engine, EngineSpec
        from jaxml.infer.language_model import LanguageModel
        from jaxml.models.spec import DecoderSpec

        tune_allocator()
        if self.cache_dir:
            use_compilation_cache(self.cache_dir)
        model = LanguageModel.open(self.path)
        decoder = model.bound.spec
        assert isinstance(decoder, DecoderSpec)
        tokenizer = model.opened.require_tokenizer()
        given: dict[str, Any] = {"cache_bytes": self.cache_bytes, "watchdog_s": self.watchdog_s}
        given = {name: value for name, value in given.items() if value is not None}
        spec = EngineSpec(self.mode, self.max_batch, self.max_queue, **given)
        card = {
            "name": self.name,
            "context_length": model.context_length,
            "created": int(time.time()),
            "tokenizer": tokenizer.files(),
            "has_embeddings": True,
            "embedding_size": decoder.width,
        }
        return Engine(model, spec, emit=emit, on_stuck=on_stuck), card


class EngineAPI(LitAPI):
    """What LitServe wants to see of a model; all of it happens in the loop and in the spec's endpoints."""

    def setup(self, device: str) -> None:
        """Nothing: LitServe would print a traceback of what fails here, and go on waiting."""


class EngineLoop(LitLoop):
    """Runs in the worker until the main process ends it, or an engine is stuck. opens: how, by the model's name."""

    def __init__(self, private: Private, opens: Mapping[str, OpenEngine]):
        super().__init__()
        self._private = private
        self._opens = dict(opens)

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
        """The signature is LitServe's; the queue and the transport are left alone."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        with reported(self._private):
            loop, stuck = asyncio.get_running_loop(), asyncio.Event()
            server = EngineServer()

            def on_stuck() -> None:
                loop.call_soon_threadsafe(stuck.set)

            # Of a device's memory each takes what its spec says; one compilation cache serves them all.
            hosted = [_opened(name, each, server.emit, on_stuck) for name, each in self._opens.items()]
            await server.listen(self._private.socket, hosted)
            for each in hosted:
                each.engine.start()
            self._private.write_card({"models": [each.name for each in hosted]})
            await stuck.wait()
            await asyncio.sleep(FLUSH_S)
            got, todo = "one that does not come back", "if steps may be that slow, raise watchdog_s; see the log above"
            raise JaxmlError("a step of the engine", expected="one that ends", got=got, todo=todo)


def _opened(name: str, open_engine: OpenEngine, emit: Emit, on_stuck: OnStuck) -> Hosted:
    """A model that is ready to start. An error on the way names it."""
    try:
        engine, card = open_engine(emit, on_stuck)
        engine.warm_up()
    except JaxmlError as error:
        faults = [replace(fault, failed=f"model {name}: {fault.failed}") for fault in error.faults]
        raise type(error).from_faults(faults) from error
    return Hosted(engine, card)
