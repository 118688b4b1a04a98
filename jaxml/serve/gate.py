"""What the main process and the API processes agree on, and the names under which the guard leaves things in a request's scope.

Reads no other jaxml file; `lifecycle` makes the `Gate`, `serve.guard` asks it, the endpoints read the scope.
"""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Awaitable, Callable, Mapping

# The states of a server: restarting while its worker is started again, draining until the last answer, ending when the
# processes are gone.
STARTING, READY, RESTARTING, DRAINING, ENDING = "starting", "ready", "restarting", "draining", "ending"
_STATES = (STARTING, READY, RESTARTING, DRAINING, ENDING)

# What the guard leaves in the scope for the endpoints: the parsed JSON body; a future that is done when the client has left
# (or has its answer); whose request it is; what that may still ask for; who wants to know what becomes of it.
BODY, LEFT = "jaxml.body", "jaxml.left"
CALLER, ACCOUNT, WATCHED = "jaxml.caller", "jaxml.account", "jaxml.watched"

Stats = Mapping[str, Mapping[str, float]]
# The counts of each model that is served.
Details = Callable[[], Awaitable[Stats]]


class Gate:
    """What the main process and the API processes, its forks, agree on through shared memory.

    `state`: set by the main process alone. `inside`: requests that were let in and have not been answered to the end.
    `has_answered`: an API process of ours was asked by the main process whether it is ready. `secret`: by which that, which
    has no key, is known.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        context = multiprocessing.get_context("fork")
        self._state = context.Value("i", 0)
        self._inside = context.Value("q", 0)
        self._has_answered = context.Value("b", 0)

    @property
    def state(self) -> str:
        return _STATES[self._state.value]

    @state.setter
    def state(self, state: str) -> None:
        self._state.value = _STATES.index(state)

    @property
    def inside(self) -> int:
        return self._inside.value

    @property
    def has_answered(self) -> bool:
        return bool(self._has_answered.value)

    def answered(self) -> None:
        self._has_answered.value = 1

    def enter(self) -> None:
        with self._inside:
            self._inside.value += 1

    def leave(self) -> None:
        with self._inside:
            self._inside.value -= 1
