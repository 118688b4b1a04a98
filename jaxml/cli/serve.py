"""`jaxml serve RUN_OR_CKPT` and `jaxml serve --config service.toml`: answer over HTTP until a signal. Reads `serve.launch`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.errors import ConfigError, Faults, require_extra

DESCRIPTION = """Serve a checkpoint (a run directory, its checkpoints folder, or one step's folder) over HTTP.

A language model answers at /v1/completions and /v1/chat/completions as OpenAI's API does, a text classifier at
/v1/classify; /v1/models, /health/live and /health/ready say what is there, and the page at / tries it out. One line with the
URL is printed when it is ready. SIGTERM or Ctrl-C: no new requests, running ones finish; a second one stops at once.

Several models, tenants, limits: write a service.toml (docs/serving.md) and pass it as --config, in place of the rest."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, then serve until a signal; returns the exit code of `serve.launch.serve`."""
    require_extra("litserve", "serve")
    require_extra("msgpack", "serve")
    from jaxml.serve import launch
    from jaxml.serve.service_config import read_config

    options = _options()
    given = options.parse_args(arguments)
    if given.config is not None:
        _require_alone(given, options)
        config = read_config(given.config)
        exit_code = launch.serve_config(config, allow_remote=given.allow_remote, cache_dir=cache_directory())
        return _stopped(exit_code)
    if given.path is None:
        todo = "jaxml serve runs/a, or jaxml serve --config service.toml"
        raise ConfigError("what to serve", expected="a checkpoint, or --config", got="neither", todo=todo)
    operations = None if given.operations_port is None else (launch.HOST, given.operations_port)
    access = launch.Access(
        given.keys, operations=operations, price_per_device_hour=given.price, request_log=given.request_log
    )
    exit_code = launch.serve(
        given.path,
        given.host,
        given.port,
        name=given.name,
        max_batch=given.max_batch,
        max_queue=given.max_queue,
        drain_s=given.drain_s,
        allow_remote=given.allow_remote,
        cache_dir=cache_directory(),
        access=access,
    )
    return _stopped(exit_code)


def _options() -> ArgumentParser:
    from jaxml.serve import launch

    options = parser("serve", DESCRIPTION)
    options.add_argument("path", metavar="RUN_OR_CKPT", nargs="?")
    options.add_argument("--config", type=Path, help="a service.toml; of the rest only --allow-remote goes with it")
    options.add_argument(
        "--host", default=launch.HOST, help="127.0.0.1 (default); others need --keys, or --allow-remote"
    )
    options.add_argument("--port", type=int, default=launch.PORT, help=f"1024 to 65535 (default {launch.PORT})")
    options.add_argument("--name", default="", help="what clients call the model (default: the experiment's name)")
    options.add_argument("--max-batch", type=int, default=launch.MAX_BATCH, help="requests that are computed together")
    options.add_argument("--max-queue", type=int, default=launch.MAX_QUEUE, help="requests that may wait for that")
    options.add_argument("--drain-s", type=float, default=launch.DRAIN_S, help="seconds to finish after a signal")
    options.add_argument("--keys", default="", help="a file of `jaxml keys`: only who has one of its keys may ask")
    options.add_argument("--operations-port", type=int, help="/metrics and health for who runs it, on 127.0.0.1")
    options.add_argument("--price", type=float, default=0.0, help="of an hour of the device: costs are shown then")
    options.add_argument("--request-log", default="", help="a file with a line for each request (-: standard error)")
    options.add_argument("--allow-remote", action="store_true", help="let other machines in without a key")
    return options


def _require_alone(given: Namespace, options: ArgumentParser) -> None:
    """Raises ConfigError for options that the file has a field for."""
    faults = Faults(ConfigError)
    for name, value in vars(given).items():
        if name not in ("config", "allow_remote") and value != options.get_default(name):
            written = "RUN_OR_CKPT" if name == "path" else f"--{name.replace('_', '-')}"
            faults.add(written, expected="nothing beside --config", got=str(value), todo="write it into the file")
    faults.raise_if_any()


def _stopped(exit_code: int) -> tuple[dict[str, Any], int]:
    return {"text": f"jaxml serve: stopped, exit code {exit_code}", "exit_code": exit_code}, exit_code
