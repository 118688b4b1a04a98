"""Which pages of the cache belong to whom, and which prompts they already hold. Pure Python: no arrays, no clock.

Reads nothing; `infer.scheduler` owns one for its model. A page has room for `page_size` consecutive tokens of one text. A
full page can be shared: its contents depend on all tokens up to its end and on nothing else, so it is known by
(parent page, its tokens), and the first page of a text by (salt, its tokens). Whoever holds a page holds all pages before
it, so no page is given away while one that follows from it is known. Page 0 belongs to nobody: it takes the writes of
padding. Prefix sharing after Zheng et al. 2023 (SGLang, arXiv:2312.07104), pages after Kwon et al. 2023 (vLLM,
arXiv:2309.06180).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

NO_PAGE = 0

Key = tuple[Hashable, tuple[int, ...]]


class Pages:
    """`num_pages` pages of `page_size` tokens, besides page 0.

    A page is free, or held by texts (a count), or kept: held by nobody and known, until room is needed. The page that was
    let go longest ago is given away first.

    >>> pages = Pages(4, page_size=2)
    >>> first = pages.take(2)
    >>> first = pages.share([7, 8, 9, 10, 11], first)
    >>> pages.release(first)
    >>> pages.match([7, 8, 9, 12]), pages.num_held, pages.num_kept
    ([1], 1, 1)
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages, 0, -1))
        self._holders = [0] * (num_pages + 1)
        self._kept: OrderedDict[int, None] = OrderedDict()  # in the order in which they were let go
        self._known: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._children: dict[int, set[int]] = {}

    @property
    def num_kept(self) -> int:
        """Pages that nobody holds and that are still known."""
        return len(self._kept)

    @property
    def num_held(self) -> int:
        """Pages that some text holds."""
        return self.num_pages - self.num_available

    @property
    def num_available(self) -> int:
        """Pages that `take` could give: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    def num_needed(self, num_tokens: int) -> int:
        """Pages that so many tokens of one text fill."""
        return -(-num_tokens // self.page_size)

    def match(self, tokens: Sequence[int], salt: Hashable = "") -> list[int]:
        """Hold the known pages that a text begins with. Never that of the last token: it has to be computed, for it
        gives the logits that follow."""
        found: list[int] = []
        parent: Hashable = (salt,)
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            page = self._known.get((parent, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            found.append(page)
            parent = page
        for page in found:
            self._hold(page)
        return found

    def take(self, count: int) -> list[int] | None:
        """Hold `count` pages with contents that mean nothing; None, and nothing changes, when there are not so many."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._forget(next(iter(self._kept)))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, tokens: Sequence[int], pages: Sequence[int], salt: Hashable = "") -> list[int]:
        """Make the full pages of a text known, once they are written: `pages` hold `tokens` (all of them, or those whose
        keys and values are there). Returns the pages that the text holds from now on: where a page with these tokens was
        known already, that one instead of its own."""
        held = list(pages)
        parent: Hashable = (salt,)
        for index in range(len(tokens) // self.page_size):
            page = held[index]
            key = (parent, tuple(tokens[index * self.page_size : (index + 1) * self.page_size]))
            known = self._known.get(key)
            if known is None:
                self._known[key], self._key_of[page] = page, key
                if index:
                    self._children.setdefault(held[index - 1], set()).add(page)
            elif known != page:
                self._hold(known)
                self._let_go(page)
                held[index] = known
            parent = held[index]
        return held

    def release(self, pages: Iterable[int]) -> None:
        """Let go of a text's pages, in the order of the text. Those that are known are kept."""
        for page in reversed(list(pages)):
            self._let_go(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Make these pages, and all that follow from them, unknown: what is in them must not be used by new texts."""
        for page in pages:
            if page in self._key_of:
                self._forget(page)

    def _hold(self, page: int) -> None:
        self._kept.pop(page, None)
        self._holders[page] += 1

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def _forget(self, page: int) -> None:
        for child in list(self._children.get(page, ())):
            self._forget(child)
        self._children.pop(page, None)
        key = self._key_of.pop(page)
        del self._known[key]
        if isinstance(key[0], int):
            self._children[key[0]].discard(page)
        if page in self._kept:
            del self._kept[page]
            self._free.append(page)
