"""Who is next: lanes with ageing, tenants by tokens, the oldest first, and nobody for ever last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxml.infer.queueing import HANDICAP_S, Deadlines, Queues
from jaxml.infer.request import LANES


def push(queues: Queues, id: str, lane: str = "normal", tenant: str = "a", came_s: float = 0.0, is_back=False) -> None:
    queues.push(id, id, lane=lane, tenant=tenant, came_s=came_s, is_back=is_back)  # type: ignore[arg-type]


def drained(queues: Queues) -> list[str]:
    return [queues.pop() for _ in range(len(queues))]


def test_a_fast_lane_overtakes_until_the_slow_one_has_waited_its_handicap():
    queues: Queues = Queues()
    push(queues, "batch", "batch", came_s=0.0)
    push(queues, "normal", "normal", came_s=1.0)
    push(queues, "early", "interactive", came_s=HANDICAP_S["batch"] - 1)
    push(queues, "late", "interactive", came_s=HANDICAP_S["batch"] + 1)
    assert drained(queues) == ["normal", "early", "batch", "late"]


def test_a_tenant_with_many_requests_does_not_hold_up_one_with_few():
    """By tokens: after each request of 100 tokens the other one is next, and one of 300 counts as three."""
    queues: Queues = Queues()
    for index in range(6):
        push(queues, f"many{index}", tenant="many", came_s=index)
    for index in range(2):
        push(queues, f"few{index}", tenant="few", came_s=10 + index)
    order = []
    for _ in range(8):
        id = queues.pop()
        order.append(id)
        queues.charge("few" if id.startswith("few") else "many", 300 if id == "few0" else 100)
    assert order == ["many0", "few0", "many1", "many2", "few1", "many3", "many4", "many5"]


def test_who_was_away_has_no_claim_to_the_tokens_of_that_time():
    """One who comes for the first time starts level with those who wait, not ten requests ahead of them."""
    queues: Queues = Queues()
    push(queues, "a0", tenant="a")
    queues.charge("a", 1000)
    for index in range(10):
        push(queues, f"b{index}", tenant="b")
    order = []
    for _ in range(11):
        order.append(queues.pop())
        queues.charge(order[-1][0], 100)
    assert order.index("a0") <= 1


def test_what_was_sent_back_is_next_again():
    queues: Queues = Queues()
    for id in ("first", "second"):
        push(queues, id)
    assert queues.pop() == "first"
    push(queues, "first", is_back=True)
    assert drained(queues) == ["first", "second"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(LANES),
            st.sampled_from("abc"),
            st.sampled_from(["push", "pop", "remove"]),
            st.integers(0, 50),
        ),
        max_size=60,
    )
)
def test_nothing_is_lost_and_a_tenant_is_served_in_order(actions):
    queues: Queues = Queues()
    waiting: dict[str, tuple[str, str]] = {}
    for time, (lane, tenant, action, number) in enumerate(actions):
        if action == "push":
            push(queues, str(time), lane, tenant, float(time))
            waiting[str(time)] = (lane, tenant)
        elif action == "remove" and waiting:
            id = list(waiting)[number % len(waiting)]
            assert queues.remove(id) == id
            assert queues.remove(id) is None
            del waiting[id]
        elif action == "pop":
            first = queues.peek()
            assert queues.pop() == first
            if first is None:
                assert not waiting
            else:
                older = [id for id, of in waiting.items() if of == waiting[first] and int(id) < int(first)]
                assert not older
                del waiting[first]
                queues.charge(tenant, number)
        assert len(queues) == len(waiting)
        assert {lane: queues.num_in(lane) for lane in LANES} == {
            lane: sum(of[0] == lane for of in waiting.values()) for lane in LANES
        }
    assert sorted(drained(queues)) == sorted(waiting)


def test_a_tenant_who_comes_and_goes_leaves_nothing_behind():
    """One entry a tenant in the order of a lane, however often it was empty in between."""
    queues: Queues = Queues()
    push(queues, "stays", tenant="stays")
    for index in range(100):
        push(queues, str(index), tenant="passes")
        queues.remove(str(index))
    assert len(queues._lanes["normal"].order) <= 2


def test_deadlines_come_up_in_their_order_and_not_before():
    due = Deadlines()
    for at_s, id in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
        due.add(at_s, id)
    assert (due.pop(0.9), due.pop(2.5), due.pop(2.5), due.pop(2.5), due.next_s) == (None, "a", "b", None, 3.0)
