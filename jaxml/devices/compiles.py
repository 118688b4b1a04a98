"""How many programs JAX has compiled, counted where it happens.

Reads nothing; `infer.engine` proves with it that nothing compiles once it is warm.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import cache

import jax

# Once for every program that is handed to the backend, also where the persistent cache has it.
EVENT = "/jax/core/compile/backend_compile_duration"


def num_compiled() -> int:
    """Programs that this thread has had compiled since the first call in this process."""
    return _counts()[threading.get_ident()]


@cache
def _counts() -> Counter[int]:
    counts: Counter[int] = Counter()

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event == EVENT:
            counts[threading.get_ident()] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    return counts
