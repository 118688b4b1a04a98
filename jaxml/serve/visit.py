"""One request as the endpoints see it: what the guard has left in its scope, and whom they tell of it.

Reads `infer.request` and `serve.gate`'s names; `serve.endpoints` makes one for each request. The caller, the account and the
watch are there where the service has keys, rates and metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from jaxml.infer.request import LANES, Event, Lane
from jaxml.serve.gate import ACCOUNT, BODY, CALLER, LEFT, WATCHED


class Visit:
    """body: the JSON that was sent. left: done when the client has left, or has its answer. tenant: whose request it is.
    lanes: those that it may use.
    """

    def __init__(self, scope: MutableMapping[str, Any]):
        self.body: Any = scope.get(BODY)
        self.left: asyncio.Future[None] = scope[LEFT]
        caller = scope.get(CALLER)
        self.tenant: str = caller.tenant if caller is not None else ""
        self.lanes: tuple[Lane, ...] = getattr(caller, "lanes", LANES)
        self._account, self._watched = scope.get(ACCOUNT), scope.get(WATCHED)
        self._num_spent: Callable[[], int] = lambda: 0

    def asked(self, model: str, num_prompt_tokens: int, num_choices: int, num_allowed_tokens: int) -> None:
        """What was asked, once it is known to be right. Raises RateLimitError when the tenant has no tokens left for it.

        What is not used of the allowed tokens is given back at the end.
        """
        if self._watched is not None:
            self._watched.model = model
            self._watched.asked(num_prompt_tokens, num_choices)
        if self._account is not None:
            account = self._account
            account.admit(num_allowed_tokens)
            self.left.add_done_callback(lambda _: account.settle(self._num_spent()))

    def started(self, num_spent: Callable[[], int]) -> None:
        """The engine has taken it. num_spent: tokens that it has cost so far, asked at the end."""
        self._num_spent = num_spent

    def event(self, event: Event) -> None:
        """The engine said something."""
        if self._watched is not None:
            self._watched.event(event)
