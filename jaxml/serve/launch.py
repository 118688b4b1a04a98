"""What is served where: checkpoints by what their manifests say they are, or a researcher's own LitAPI.

Reads `checkpoint.folders`, `serve.address`, `serve.lifecycle`, `serve.service_config`, what stands at the door (`serve.guard`,
`serve.keys`, `serve.metrics`, `serve.operations`, `serve.rates`) and the file of what is served; `cli.serve` calls `serve` and
`serve_config`, scripts `jaxml.serve.app`. Nothing here imports jax: the process that runs it forks.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from litserve import LitAPI

from jaxml.checkpoint.folders import find_checkpoint, read_manifest, resolve
from jaxml.errors import ConfigError, Faults, JaxmlError
from jaxml.infer.request import Deadlines
from jaxml.serve.address import check_address, check_operations, listen
from jaxml.serve.classify import PATH as CLASSIFY_PATH
from jaxml.serve.classify import ClassifyAPI
from jaxml.serve.endpoints import ROUTES, EngineSpec
from jaxml.serve.engine_loop import EngineAPI, EngineLoop, OpenCheckpoint, OpenEngine
from jaxml.serve.gate import Details
from jaxml.serve.guard import Door
from jaxml.serve.keys import KeyRing
from jaxml.serve.lifecycle import require_no_backend, run
from jaxml.serve.metrics import Metrics
from jaxml.serve.operations import Operations
from jaxml.serve.predict_loop import PredictLoop
from jaxml.serve.private import Private
from jaxml.serve.rates import DEFAULT_TIER, Rates, Tier
from jaxml.serve.request_log import RequestLog
from jaxml.serve.served import Limits
from jaxml.serve.service_config import DRAIN_S, HOST, MAX_BATCH, MAX_QUEUE, PORT, ModelConfig, ServiceConfig

MAX_BODY_BYTES = 4 * 2**20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Access:
    """Who may ask, how much, and who may watch; the fields as in `service_config.ServiceConfig`.

    keys: the file ("": everybody may ask). operations: (host, port), or None for nowhere.
    """

    keys: str = ""
    tiers: tuple[Tier, ...] = (DEFAULT_TIER,)
    operations: tuple[str, int] | None = None
    price_per_device_hour: float = 0.0
    request_log: str = ""

    def ring(self) -> KeyRing | None:
        """The keys that are accepted. Raises ConfigError for a file that is not usable."""
        return KeyRing(Path(self.keys), {tier.name: tier.lanes for tier in self.tiers}) if self.keys else None

    def log(self) -> RequestLog | None:
        """Where each request gets a line."""
        if not self.request_log:
            return None
        return RequestLog.to_stderr() if self.request_log == "-" else RequestLog.to_file(Path(self.request_log))


@dataclass(frozen=True)
class App:
    """Something that can be served. `run` blocks until the server was stopped.

    models: what clients call them. routes: path to method. build: makes the LitAPI, given the directory that the server's
    processes share; details_of: what `/health/ready` asks of it.
    """

    models: tuple[str, ...]
    routes: Mapping[str, str]
    build: Callable[[Private], LitAPI]
    details_of: Callable[[LitAPI], Details | None] = lambda lit_api: None
    max_body_bytes: int = MAX_BODY_BYTES
    accepts_forms: bool = False

    @property
    def name(self) -> str:
        return ", ".join(self.models)

    def run(
        self,
        host: str = HOST,
        port: int = PORT,
        *,
        drain_s: float = DRAIN_S,
        allow_remote: bool = False,
        access: Access = Access(),
    ) -> int:
        """Serve on this address until SIGTERM or SIGINT; returns the exit code.

        drain_s: how long running requests may go on after the first signal; a second one ends them. allow_remote: needed
        for a host other than 127.0.0.1 where there are no keys. Call it under `if __name__ == "__main__":`, because the
        worker imports the script again. Raises ServeError, ConfigError for keys that cannot be used, or what opening the
        checkpoint raised; no process is left.
        """
        keys = access.ring()
        check_address(host, port, allow_remote=allow_remote, has_keys=keys is not None)
        if access.operations is not None:
            check_operations(*access.operations, allow_remote=allow_remote)
        require_no_backend()
        with contextlib.ExitStack() as stack:
            operations = None
            if access.operations is not None:
                operations = Operations(stack.enter_context(listen(access.operations)))

            def door_of(lit_api: LitAPI) -> Door:
                details = self.details_of(lit_api)
                return Door(
                    routes=self.routes,
                    max_body_bytes=self.max_body_bytes,
                    metrics=Metrics(self.models if details else (), access.price_per_device_hour, log=access.log()),
                    accepts_forms=self.accepts_forms,
                    details=details,
                    keys=keys,
                    rates=Rates(access.tiers),
                    operations=operations,
                )

            return run(
                self.build,
                door_of,
                address=(host, port),
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
    access: Access = Access(),
) -> int:
    """Serve the checkpoint at `path` until a signal; returns the exit code. Arguments as in `app` and `App.run`."""
    check_address(host, port, allow_remote=allow_remote, has_keys=bool(access.keys))
    served = app(path, name=name, max_batch=max_batch, max_queue=max_queue, cache_dir=cache_dir)
    return served.run(host, port, drain_s=drain_s, allow_remote=allow_remote, access=access)


def serve_config(config: ServiceConfig, *, allow_remote: bool = False, cache_dir: str = "") -> int:
    """Serve all that a service.toml describes until a signal; returns the exit code.

    Raises CheckpointError or ConfigError with the faults of all models at once, and what `App.run` raises.
    """
    check_address(config.host, config.port, allow_remote=allow_remote, has_keys=bool(config.keys))
    operations = (config.operations.host, config.operations.port) if config.operations is not None else None
    access = Access(config.keys, config.tiers, operations, config.price_per_device_hour, config.request_log)
    served = config_app(config, cache_dir)
    return served.run(config.host, config.port, drain_s=config.drain_s, allow_remote=allow_remote, access=access)


def config_app(config: ServiceConfig, cache_dir: str = "") -> App:
    """What a service.toml describes: language models in one worker, on one device. Raises as `serve_config`."""
    opens: dict[str, OpenEngine] = {}
    faults = Faults(ConfigError)
    for model in config.models:
        try:
            opened = _language_model(model, cache_dir)
        except JaxmlError as error:
            named = model.name or model.path
            faults.found += [replace(fault, failed=f"model {named}: {fault.failed}") for fault in error.faults]
            continue
        if opened.name in opens:
            todo = "give one of them another name"
            faults.add("models", expected="different names", got=f"{opened.name} twice", todo=todo)
        opens[opened.name] = opened
    faults.raise_if_any()
    return engine_app(opens, config.limits, config.deadlines)


def _language_model(model: ModelConfig, cache_dir: str) -> OpenCheckpoint:
    path, name, has_labels = _found(model.path, model.name)
    if has_labels:
        todo = "serve it by itself: jaxml serve PATH"
        raise ConfigError("path", expected="a language model", got="a classifier", todo=todo)
    return OpenCheckpoint(
        path,
        name,
        model.max_batch,
        model.max_queue,
        cache_dir,
        mode=model.mode,
        cache_bytes=model.cache_mib * 2**20,
        watchdog_s=model.watchdog_s,
    )


def _found(path: str | os.PathLike[str], name: str) -> tuple[str, str, bool]:
    """(step directory, name, whether it is a classifier). The step is settled here: a newer one that appears before the
    worker opens it is not served."""
    directory, step = find_checkpoint(path)
    manifest = read_manifest(resolve(directory), step)
    name = _checked_name(name or str(manifest.experiment.get("name") or "model"), name == "")
    return os.path.join(directory, str(step)), name, bool(manifest.labels)


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
    path, name, has_labels = _found(served, name)
    if has_labels:
        routes = {CLASSIFY_PATH: "POST"}
        return App((name,), routes, lambda private: ClassifyAPI(path, name, max_batch, private, cache_dir))
    return engine_app({name: OpenCheckpoint(path, name, max_batch, max_queue, cache_dir)})


def engine_app(opens: Mapping[str, OpenEngine], limits: Limits = Limits(), deadlines: Deadlines = Deadlines()) -> App:
    """Language models by name, behind the engines that are opened in one worker."""

    def build(private: Private) -> LitAPI:
        return EngineAPI(spec=EngineSpec(private, limits, deadlines), loop=EngineLoop(private, opens))

    def details_of(lit_api: LitAPI) -> Details | None:
        return lit_api.spec.details if isinstance(lit_api.spec, EngineSpec) else None

    return App(tuple(opens), ROUTES, build, details_of, limits.body_bytes)


def _own_app(lit_api: LitAPI, name: str) -> App:
    def build(private: Private) -> LitAPI:
        lit_api.loop = PredictLoop(private)
        return lit_api

    if lit_api.spec is not None:
        todo = "leave it out: the paths of language models are served from a checkpoint"
        raise ConfigError(f"spec of {name}", expected="none", got=type(lit_api.spec).__name__, todo=todo)
    return App((name,), {str(lit_api.api_path): "POST"}, build, accepts_forms=True)


def _checked_name(name: str, is_derived: bool = False) -> str:
    """The name, if it may stand for a model. An experiment's own name is made into one."""
    if is_derived:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip(".-_") or "model"
    if not NAME.fullmatch(name):
        expected = "1 to 64 letters, digits, dots, hyphens or underscores, the first a letter or a digit"
        raise ConfigError("name", expected=expected, got=repr(name)[:80], todo="pass another --name")
    return name
