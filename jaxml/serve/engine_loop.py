"""The engine inside LitServe's worker: our LitLoop opens the checkpoint, warms up, and serves the engine on a socket.

Reads `infer.engine`, `infer.language_model`, `devices.start`, `serve.engine_server`, `serve.private` and `serve.worker`;
`launch` hands it to LitServe. LitServe's request queue is never touched: tokens do not cross its pickling queues
(architecture, format D).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from litserve import LitAPI
from litserve.loops import LitLoop

from jaxml.serve.engine_server import Emit, EngineLike, EngineServer
from jaxml.serve.private import Private
from jaxml.serve.worker import reported

# Builds an engine that reports to the callback, and the card that says what is served (`endpoints.Served.from_card`). It
# is pickled.
OpenEngine = Callable[[Emit], tuple[EngineLike, dict[str, Any]]]


@dataclass(frozen=True)
class OpenCheckpoint:
    """Opens the engine of a language model's checkpoint. `cache_dir`: where compiled programs are kept ("": nowhere)."""

    path: str
    name: str
    max_batch: int
    max_queue: int
    cache_dir: str = ""

    def __call__(self, emit: Emit) -> tuple[EngineLike, dict[str, Any]]:
        """Raises CheckpointError: nothing usable at `path`, a probe that is not reproduced, no tokenizer."""
        from jaxml.devices.start import tune_allocator, use_compilation_cache
        from jaxml.infer.engine import Engine, EngineSpec
        from jaxml.infer.language_model import LanguageModel

        tune_allocator()
        if self.cache_dir:
            use_compilation_cache(self.cache_dir)
        model = LanguageModel.open(self.path)
        tokenizer = model.opened.require_tokenizer()
        engine = Engine(model, EngineSpec(max_batch=self.max_batch, max_queue=self.max_queue), emit=emit)
        card = {
            "name": self.name,
            "context_length": model.context_length,
            "created": int(time.time()),
            "tokenizer": tokenizer.files(),
        }
        return engine, card


class EngineAPI(LitAPI):
    """What LitServe wants to see of a model; all of it happens in the loop and in the spec's endpoints."""

    def setup(self, device: str) -> None:
        """Nothing: LitServe would print a traceback of what fails here, and go on waiting."""


class EngineLoop(LitLoop):
    """Runs in the worker until the main process ends it."""

    def __init__(self, private: Private, open_engine: OpenEngine):
        super().__init__()
        self._private = private
        self._open_engine = open_engine

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
        with reported(self._private):
            asyncio.run(self._run())

    async def _run(self) -> None:
        server = EngineServer()
        engine, card = self._open_engine(server.emit)
        engine.warm_up()
        await server.listen(self._private.socket, engine, card)
        engine.start()
        self._private.write_card({"name": card["name"]})
        await asyncio.Event().wait()
