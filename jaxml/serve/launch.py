"""What is served where: a checkpoint by what its manifest says it is, or a researcher's own LitAPI.

Reads `checkpoint.folders`, `serve.address`, `serve.lifecycle`, and the file of what is served; `cli.serve` calls `serve`, scripts
`jaxml.serve.app`. Nothing here imports jax: the process that runs it forks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from litserve import LitAPI

from jaxml.checkpoint.folders import find_checkpoint, read_manifest, resolve
from jaxml.errors import ConfigError
from jaxml.serve.address import check_address
from jaxml.serve.classify import PATH as CLASSIFY_PATH
from jaxml.serve.classify import ClassifyAPI
from jaxml.serve.endpoints import ROUTES, EngineSpec
from jaxml.serve.engine_loop import EngineAPI, EngineLoop, OpenCheckpoint, OpenEngine
from jaxml.serve.gate import Details
from jaxml.serve.lifecycle import require_no_backend, run
from jaxml.serve.predict_loop import PredictLoop
from jaxml.serve.private import Private
from jaxml.serve.requests import Limits

HOST, PORT = "127.0.0.1", 8000
MAX_BATCH, MAX_QUEUE = 8, 256
DRAIN_S = 30.0
MAX_BODY_BYTES = 4 * 2**20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class App:
    """Something that can be served. `run` blocks until the server was stopped.

    name: what clients call the model. routes: path to method. build: makes the LitAPI, given the directory that the
    server's processes share; details_of: what `/health/ready` asks of it.
    """

    name: str
    routes: Mapping[str, str]
    build: Callable[[Private], LitAPI]
    details_of: Callable[[LitAPI], Details | None] = lambda lit_api: None
    max_body_bytes: int = MAX_BODY_BYTES
    accepts_forms: bool = False

    def run(self, host: str = HOST, port: int = PORT, *, drain_s: float = DRAIN_S, allow_remote: bool = False) -> int:
        """Serve on this address until SIGTERM or SIGINT; returns the exit code.

        drain_s: how long running requests may go on after the first signal; a second one ends them. allow_remote: needed
        for a host other than 127.0.0.1. Call it under `if __name__ == "__main__":`, because the worker imports the
        script again. Raises ServeError, or what opening the checkpoint raised; no process is left.
        """
        check_address(host, port, allow_remote=allow_remote)
        require_no_backend()
        return run(
            self.build,
            address=(host, port),
            routes=self.routes,
            details_of=self.details_of,
            max_body_bytes=self.max_body_bytes,
            accepts_forms=self.accepts_forms,
            drain_s=drain_s,
            say=lambda text: print(f"jaxml serve: {self.name}: {text}", file=sys.stderr, flush=True),
        )


def serve(
    path: str | os.PathLike[str],
    host: str = HOST,
    port: int = PORT,
    *,
    name: str = "",
    max_batch: int = MAX_BATCH,
    max_queue: int = MAX_QUEUE,
    drain_s: float = DRAIN_S,
    allow_remote: bool = False,
    cache_dir: str = "",
) -> int:
    """Serve the checkpoint at `path` until a signal; returns the exit code. Arguments as in `app` and `App.run`."""
    check_address(host, port, allow_remote=allow_remote)
    served = app(path, name=name, max_batch=max_batch, max_queue=max_queue, cache_dir=cache_dir)
    return served.run(host, port, drain_s=drain_s, allow_remote=allow_remote)


def app(
    served: str | os.PathLike[str] | LitAPI,
    *,
    name: str = "",
    max_batch: int = MAX_BATCH,
    max_queue: int = MAX_QUEUE,
    cache_dir: str = "",
) -> App:
    """What can be served: a run, checkpoints or step directory, or a LitAPI that answers in one pass.

    A language model is served at `/v1/completions` and `/v1/chat/completions`, a text classifier at `/v1/classify`, a
    LitAPI at its own `api_path`, batched by its own `max_batch_size`. name: what clients call the model ("": the
    experiment's name). max_batch: requests (a classifier: texts) that are computed together; max_queue: requests that
    may wait for that. cache_dir: where compiled programs are kept between starts ("": nowhere).
    Raises CheckpointError for a directory without a usable checkpoint, ConfigError for a name, or for numbers below 1.
    """
    for field, value in (("max_batch", max_batch), ("max_queue", max_queue)):
        if value < 1:
            raise ConfigError(field, expected="at least 1", got=str(value), todo="raise it")
    if isinstance(served, LitAPI):
        return _own_app(served, _checked_name(name or type(served).__name__))
    # The step is settled here: a newer one that appears before the worker opens it is not served.
    directory, step = find_checkpoint(served)
    manifest = read_manifest(resolve(directory), step)
    path = os.path.join(directory, str(step))
    name = _checked_name(name or str(manifest.experiment.get("name") or "model"), name == "")
    if manifest.labels:
        routes = {CLASSIFY_PATH: "POST"}
        return App(name, routes, lambda private: ClassifyAPI(path, name, max_batch, private, cache_dir))
    return engine_app(name, OpenCheckpoint(path, name, max_batch, max_queue, cache_dir))


def engine_app(name: str, open_engine: OpenEngine) -> App:
    """A language model behind the engine that `open_engine` opens in the worker."""

    def build(private: Private) -> LitAPI:
        return EngineAPI(spec=EngineSpec(private), loop=EngineLoop(private, open_engine))

    def details_of(lit_api: LitAPI) -> Details | None:
        return lit_api.spec.details if isinstance(lit_api.spec, EngineSpec) else None

    return App(name, ROUTES, build, details_of, Limits().body_bytes)


def _own_app(lit_api: LitAPI, name: str) -> App:
    def build(private: Private) -> LitAPI:
        lit_api.loop = PredictLoop(private)
        return lit_api

    if lit_api.spec is not None:
        todo = "leave it out: the paths of language models are served from a checkpoint"
        raise ConfigError(f"spec of {name}", expected="none", got=type(lit_api.spec).__name__, todo=todo)
    return App(name, {str(lit_api.api_path): "POST"}, build, accepts_forms=True)


def _checked_name(name: str, is_derived: bool = False) -> str:
    """The name, if it may stand for a model. An experiment's own name is made into one."""
    if is_derived:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip(".-_") or "model"
    if not NAME.fullmatch(name):
        expected = "1 to 64 letters, digits, dots, hyphens or underscores, the first a letter or a digit"
        raise ConfigError("name", expected=expected, got=repr(name)[:80], todo="pass another --name")
    return name
