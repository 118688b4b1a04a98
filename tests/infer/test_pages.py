"""Pages: each is free, held or kept, at all times; what is found holds what was asked for; no page is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxml.infer.pages import Pages

SIZE = 2
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=9)
ACTIONS = st.lists(st.tuples(st.sampled_from(["come", "go", "forget"]), TEXTS, st.integers(0, 9)), max_size=40)


@given(ACTIONS)
def test_every_page_is_in_one_place_and_what_is_found_is_what_was_written(actions):
    """Texts come, are written and made known, and go, in any order; `contents` is what the device would hold."""
    pages = Pages(7, SIZE)
    contents: dict[int, tuple[int, ...]] = {}
    held: list[tuple[list[int], list[int]]] = []
    for action, text, which in actions:
        if action == "come":
            found = pages.match(text)
            assert len(found) * SIZE < len(text), "the last token is always computed"
            assert [contents[page] for page in found] == [
                tuple(text[i * SIZE : i * SIZE + SIZE]) for i in range(len(found))
            ]
            taken = pages.take(pages.num_needed(len(text)) - len(found))
            if taken is None:
                pages.release(found)
                continue
            mine = found + taken
            assert not set(taken) & {page for _, others in held for page in others}, "a page that another holds"
            for index in range(len(found), len(mine)):
                contents[mine[index]] = tuple(text[index * SIZE : index * SIZE + SIZE])
            held.append((text, pages.share(text, mine)))
            known = [contents[page] for page in held[-1][1]]
            assert known == [tuple(text[i : i + SIZE]) for i in range(0, len(text), SIZE)]
        elif held:
            text, mine = held.pop(which % len(held))
            if action == "forget":
                pages.forget(mine)
            pages.release(mine)
            if action == "forget":
                assert pages.match(text) == []
        everybody = {page for _, mine in held for page in mine}
        assert pages.num_held == len(everybody)
        assert pages.num_available == 7 - len(everybody)
    for _, mine in held:
        pages.release(mine)
    assert (pages.num_held, pages.num_available) == (0, 7)
    everything = pages.take(7)
    assert everything is not None
    assert sorted(everything) == list(range(1, 8))
    assert pages.num_kept == 0


def test_the_text_that_was_let_go_longest_ago_makes_room_first_and_from_its_end():
    pages = Pages(4, SIZE)
    for text in ([1, 1, 2, 2], [3, 3, 4, 4]):
        taken = pages.take(2)
        assert taken is not None
        pages.release(pages.share(text, taken))
    assert pages.take(1) is not None
    assert len(pages.match([1, 1, 2, 2, 9])) == 1, "its last page was taken, its first is still known"
    assert len(pages.match([3, 3, 4, 4, 9])) == 2


def test_another_salt_is_another_text():
    pages = Pages(4, SIZE)
    taken = pages.take(1)
    assert taken is not None
    pages.share([1, 1], taken, salt="adapter a")
    assert pages.match([1, 1, 2], salt="adapter b") == []
    assert pages.match([1, 1, 2], salt="adapter a") == taken


def test_more_than_there_is_is_refused_and_changes_nothing():
    pages = Pages(3, SIZE)
    kept = pages.take(1)
    assert kept is not None
    pages.release(pages.share([1, 1], kept))
    assert pages.take(4) is None
    assert (pages.num_available, pages.num_kept) == (3, 1)
