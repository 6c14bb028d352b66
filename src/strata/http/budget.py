"""The memory budget of bodies under way: 512 MiB in all, a share for each caller, a wait of 10 s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from strata.base.errors import Code, StrataError

TOTAL: Final = 512 << 20
JSON_COST: Final = 16
"""What a byte of JSON may become in memory: a number of two characters is an entry of a list and an object."""
WAIT_S: Final = 10.0


class BodyBudget:
    """`largest` is a body that must fit into the share of a caller."""

    def __init__(self, total: int = TOTAL, *, largest: int = 0, wait_s: float = WAIT_S) -> None:
        self.share = max(total // 2, largest)
        self.total = max(total, 2 * self.share)
        self.wait_s = wait_s
        self._held = 0
        self._held_by: dict[str, int] = {}
        self._freed = asyncio.Event()

    @property
    def held(self) -> int:
        return self._held

    @contextmanager
    def reserve(self, caller: str) -> Iterator[BodyReservation]:
        """Reserve for one body of this caller: nothing at first, and released at the end."""
        reservation = BodyReservation(self, caller)
        try:
            yield reservation
        finally:
            self._charge(caller, -reservation.size)

    def fits(self, caller: str, more: int) -> bool:
        return self._held + more <= self.total and self._held_by.get(caller, 0) + more <= self.share

    async def wait(self, caller: str, more: int) -> None:
        until_s = time.monotonic() + self.wait_s
        while not self.fits(caller, more):
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    await self._freed.wait()
            except TimeoutError:
                raise StrataError(
                    Code.EXHAUSTED, "bodies that are under way leave no room for this one", hint="send it again"
                ) from None
        self._charge(caller, more)

    def shrink(self, caller: str, less: int) -> None:
        self._charge(caller, -less)

    def _charge(self, caller: str, size: int) -> None:
        self._held += size
        left = self._held_by.get(caller, 0) + size
        if left:
            self._held_by[caller] = left
        else:
            self._held_by.pop(caller, None)
        if size < 0:
            self._freed.set()
            self._freed = asyncio.Event()


class BodyReservation:
    """The bytes that one body holds of the budget."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self.size = 0

    async def resize(self, size: int) -> None:
        """Wait until the budget has so much; EXHAUSTED if it does not in time."""
        if size > self.size:
            await self._budget.wait(self._caller, size - self.size)
            self.size = size
        else:
            self.shrink(size)

    def shrink(self, size: int) -> None:
        """Hold at most so many bytes from now on."""
        if size < self.size:
            self._budget.shrink(self._caller, self.size - size)
            self.size = size
