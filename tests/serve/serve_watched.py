"""`serve.launch.serve` of a language model, whose engine also counts the modules that serving must not import.

For tests: `python serve_watched.py CHECKPOINT PORT CACHE`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxml.infer.request import Event
from jaxml.serve.engine_loop import OpenCheckpoint
from jaxml.serve.launch import engine_app

TRAINING = ("grain", "jaxml.train", "jaxml.data", "jaxml.recipes")


@dataclass(frozen=True)
class OpenWatched:
    """`OpenCheckpoint`, with `training_modules` among the engine's counts."""

    inner: OpenCheckpoint

    def __call__(self, emit: Callable[[list[Event]], None], on_stuck: Callable[[], None]) -> tuple[Any, dict[str, Any]]:
        engine, card = self.inner(emit, on_stuck)
        counts = engine.stats

        def stats() -> dict[str, int]:
            imported = [name for name in sys.modules if name.startswith(TRAINING)]
            return {**counts(), "training_modules": len(imported)}

        engine.stats = stats  # type: ignore[method-assign]
        return engine, card


if __name__ == "__main__":
    path, port, cache = sys.argv[1:]
    opened = OpenWatched(OpenCheckpoint(path, "small", max_batch=2, max_queue=64, cache_dir=cache))
    sys.exit(engine_app({"small": opened}).run(port=int(port)))
