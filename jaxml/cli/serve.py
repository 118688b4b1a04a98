"""`jaxml serve RUN_OR_CKPT`: answer over HTTP until a signal. Reads `serve.launch`."""

from __future__ import annotations

from typing import Any

from jaxml.cli.experiment_file import cache_directory, parser
from jaxml.errors import require_extra

DESCRIPTION = """Serve a checkpoint (a run directory, its checkpoints folder, or one step's folder) over HTTP.

A language model answers at /v1/completions and /v1/chat/completions as OpenAI's API does, a text classifier at
/v1/classify; /v1/models, /health/live and /health/ready say what is there. One line with the URL is printed when it is
ready. SIGTERM or Ctrl-C: no new requests, running ones finish; a second one stops at once."""


def main(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Parse, then serve until a signal; returns the exit code of `serve.launch.serve`."""
    require_extra("litserve", "serve")
    require_extra("msgpack", "serve")
    from jaxml.serve import launch

    options = parser("serve", DESCRIPTION)
    options.add_argument("path", metavar="RUN_OR_CKPT")
    options.add_argument("--host", default=launch.HOST, help="127.0.0.1 (default); others need --allow-remote")
    options.add_argument("--port", type=int, default=launch.PORT, help=f"1024 to 65535 (default {launch.PORT})")
    options.add_argument("--name", default="", help="what clients call the model (default: the experiment's name)")
    options.add_argument("--max-batch", type=int, default=launch.MAX_BATCH, help="requests that are computed together")
    options.add_argument("--max-queue", type=int, default=launch.MAX_QUEUE, help="requests that may wait for that")
    options.add_argument("--drain-s", type=float, default=launch.DRAIN_S, help="seconds to finish after a signal")
    options.add_argument(
        "--allow-remote", action="store_true", help="let other machines in; there is no authentication"
    )
    given = options.parse_args(arguments)
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
    )
    return {"text": f"jaxml serve: stopped, exit code {exit_code}", "exit_code": exit_code}, exit_code
