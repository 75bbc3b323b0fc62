"""Which pages of the key-value cache are in use. Holds no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.errors import CapacityError


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


class PageAllocator:
    """Hands out pages 1 .. pages - 1; page 0 is reserved for padded rows.

    The page freed last is handed out first, and a fresh allocator hands out ascending pages, so
    that memory that was never touched stays untouched for as long as possible.
    """

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise CapacityError(
                f"a key-value cache of {pages} pages holds no tokens: page 0 is reserved, "
                "so at least 2 are needed; free some memory"
            )
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))
        self._used: set[int] = set()

    @property
    def capacity(self) -> int:
        """Pages that can be handed out when none is in use."""
        return self.pages - 1

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, or CapacityError with nothing taken."""
        if count > len(self._free):
            raise CapacityError(
                f"{count} key-value pages asked for, {len(self._free)} of {self.capacity} are "
                "free; wait for running requests to finish, or ask for fewer tokens"
            )
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises ValueError, with nothing freed, for pages not in use."""
        returned = set(pages)
        stray = returned - self._used
        if stray or len(returned) != len(pages):
            raise ValueError(
                f"pages {sorted(stray) or list(pages)} freed twice or never handed out"
            )
        self._used -= returned
        self._free.extend(reversed(pages))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is exactly one of free, used or reserved."""
        free = set(self._free)
        problems = []
        if len(free) != len(self._free):
            problems.append("a page is in the free list twice")
        if free & self._used:
            problems.append(f"pages {sorted(free & self._used)} are both free and in use")
        if free | self._used != set(range(1, self.pages)):
            missing = set(range(1, self.pages)) - free - self._used
            extra = (free | self._used) - set(range(1, self.pages))
            problems.append(
                f"pages lost: {sorted(missing)}, pages that do not exist: {sorted(extra)}"
            )
        if problems:
            raise AssertionError("; ".join(problems))
