"""Who is next: requests that wait, in lanes with ageing, and tenants that share a lane by tokens. Pure Python.

Reads `infer.request`; `infer.scheduler` asks it. Time is an argument (seconds of any clock that does not go back).

A lane is chosen by its oldest request: the time at which it came plus the lane's handicap, the smallest first. So a
request of a slow lane waits at most its handicap longer than one of a fast lane that came at the same time. Within the
lane the tenant is next who was given the fewest tokens, and of its requests the oldest (the virtual token counter of Sheng
et al. 2024, arXiv:2401.00588: a tenant who comes back starts at the least count of those who wait). A step's cost does
not depend on the number of requests that wait.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jaxml.infer.request import LANES, Lane

# Seconds by which a request of a lane may be overtaken by those of the first lane.
HANDICAP_S: dict[Lane, float] = {"interactive": 0.0, "normal": 2.0, "batch": 60.0}

T = TypeVar("T")


@dataclass
class _Waiting(Generic[T]):
    item: T
    tenant: str
    came_s: float


@dataclass
class _LaneQueue(Generic[T]):
    by_age: OrderedDict[str, _Waiting[T]] = field(default_factory=OrderedDict)
    by_tenant: dict[str, OrderedDict[str, _Waiting[T]]] = field(default_factory=dict)
    # (tokens when it was put there, number of the entry, tenant), one a tenant; counts only grow, so an entry that is out
    # of date is too small, comes up too early, and is put right then, as is that of a tenant who no longer waits.
    order: list[tuple[int, int, str]] = field(default_factory=list)
    ordered: set[str] = field(default_factory=set)


class Queues(Generic[T]):
    """Items that wait, each with an id of its own.

    >>> queues = Queues()
    >>> for number, (lane, tenant) in enumerate([("batch", "a"), ("normal", "a"), ("normal", "b"), ("interactive", "c")]):
    ...     queues.push(f"{tenant}{number}", number, lane=lane, tenant=tenant, came_s=0.0)
    >>> queues.charge("a", 100)
    >>> [queues.pop() for _ in range(4)]
    [3, 2, 1, 0]
    """

    def __init__(self) -> None:
        self._lanes: dict[Lane, _LaneQueue[T]] = {lane: _LaneQueue() for lane in LANES}
        self._lane_of: dict[str, Lane] = {}
        self._tokens: Counter[str] = Counter()
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, id: str) -> bool:
        return id in self._lane_of

    def num_in(self, lane: Lane) -> int:
        """Items that wait in a lane."""
        return len(self._lanes[lane].by_age)

    def push(self, id: str, item: T, *, lane: Lane, tenant: str, came_s: float, is_back: bool = False) -> None:
        """Add an item behind those of its lane and tenant; `is_back`: it was taken before and goes in front of them."""
        queue = self._lanes[lane]
        waiting = _Waiting(item, tenant, came_s)
        mine = queue.by_tenant.get(tenant)
        if mine is None:
            self._lift(tenant)
            mine = queue.by_tenant[tenant] = OrderedDict()
            if tenant not in queue.ordered:
                queue.ordered.add(tenant)
                heapq.heappush(queue.order, self._entry(tenant))
        self._lane_of[id] = lane
        for places in (queue.by_age, mine):
            places[id] = waiting
            if is_back:
                places.move_to_end(id, last=False)

    def peek(self) -> T | None:
        """The item that `pop` would give; None when nothing waits."""
        found = self._next()
        return None if found is None else found[1].item

    def pop(self) -> T | None:
        """Take the next item out; None when nothing waits."""
        found = self._next()
        if found is None:
            return None
        self.remove(found[0])
        return found[1].item

    def remove(self, id: str) -> T | None:
        """Take an item out, wherever it is; None when it does not wait."""
        lane = self._lane_of.pop(id, None)
        if lane is None:
            return None
        queue = self._lanes[lane]
        waiting = queue.by_age.pop(id)
        mine = queue.by_tenant[waiting.tenant]
        del mine[id]
        if not mine:
            del queue.by_tenant[waiting.tenant]  # Its entry in `order` is dropped when it comes up.
        return waiting.item

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Note that a tenant was given tokens (of a prompt or of an answer)."""
        self._tokens[tenant] += num_tokens

    def clear(self) -> list[T]:
        """Take everything out, lane by lane, the oldest first."""
        items = [waiting.item for lane in self._lanes.values() for waiting in lane.by_age.values()]
        self._lanes = {lane: _LaneQueue() for lane in LANES}
        self._lane_of.clear()
        return items

    def _next(self) -> tuple[str, _Waiting[T]] | None:
        best: tuple[float, _LaneQueue[T]] | None = None
        for lane, queue in self._lanes.items():
            if queue.by_age:
                due_s = next(iter(queue.by_age.values())).came_s + HANDICAP_S[lane]
                if best is None or due_s < best[0]:
                    best = (due_s, queue)
        if best is None:
            return None
        tenant = self._least(best[1])
        return next(iter(best[1].by_tenant[tenant].items()))

    def _least(self, queue: _LaneQueue[T]) -> str:
        """The tenant with the fewest tokens of those who wait in a lane, where one does."""
        while True:
            tokens, _, tenant = queue.order[0]
            if tenant not in queue.by_tenant:
                heapq.heappop(queue.order)
                queue.ordered.discard(tenant)
            elif tokens < self._tokens[tenant]:
                heapq.heapreplace(queue.order, self._entry(tenant))
            else:
                return tenant

    def _entry(self, tenant: str) -> tuple[int, int, str]:
        """Of tenants with as many tokens, the one is next whose entry is oldest."""
        self._num_entries += 1
        return self._tokens[tenant], self._num_entries, tenant

    def _lift(self, tenant: str) -> None:
        """A tenant who was away has no claim to the tokens of that time."""
        waiting = [queue for queue in self._lanes.values() if queue.by_tenant]
        if waiting and not any(tenant in queue.by_tenant for queue in waiting):
            least = min(self._tokens[self._least(queue)] for queue in waiting)
            self._tokens[tenant] = max(self._tokens[tenant], least)


class Deadlines:
    """Ids and the times at which something about them is due.

    >>> due = Deadlines()
    >>> due.add(5.0, "a")
    >>> due.add(2.0, "b")
    >>> due.next_s, due.pop(4.0), due.pop(4.0)
    (2.0, 'b', None)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    @property
    def next_s(self) -> float | None:
        """When the next one is due; None when nothing is."""
        return self._heap[0][0] if self._heap else None

    def add(self, at_s: float, id: str) -> None:
        heapq.heappush(self._heap, (at_s, id))

    def pop(self, now_s: float) -> str | None:
        """The next id that is due by now; None when there is none. An id may come up that has ended since."""
        return heapq.heappop(self._heap)[1] if self._heap and self._heap[0][0] <= now_s else None
