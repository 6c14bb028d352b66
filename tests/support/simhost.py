"""What a simulated machine has of its own: a disk that tears and a clock that is wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

from tests.support.simloop import SimLoop

_EPOCH_S: Final = 1_700_000_000.0


class SimDisk:
    """An append-only file that forgets what was not synced, or keeps a part of it, when its process crashes."""

    def __init__(self, rng: random.Random, sync_s: float, power_cut: Callable[[], None]) -> None:
        self._rng = rng
        self._sync_s = sync_s
        self._power_cut = power_cut
        """Called in the middle of every sync; may crash the process there, where it hurts most."""
        self._content = bytearray()
        self._synced = 0

    def read(self) -> bytes:
        return bytes(self._content)

    def write(self, data: bytes) -> None:
        self._content += data

    async def sync(self) -> None:
        until = len(self._content)
        await self._spin()
        self._synced = max(self._synced, until)

    async def _spin(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, 1.0) * self._sync_s)
        self._power_cut()
        await asyncio.sleep(self._rng.uniform(0.1, 1.0) * self._sync_s)

    async def replace(self, data: bytes) -> None:
        await self._spin()
        self._content[:] = data
        self._synced = len(data)

    def cut(self, length: int) -> None:
        del self._content[length:]
        self._synced = min(self._synced, length)

    def crash(self) -> None:
        """Of the bytes not synced a prefix survives; the file may have grown before its bytes came: zeros."""
        unsynced = len(self._content) - self._synced
        kept = self._synced + self._rng.choice([0, self._rng.randint(0, unsynced), max(unsynced - 4, 0), unsynced])
        wait_for_growth = self._rng.choice([kept, self._rng.randint(kept, len(self._content)), len(self._content)])
        self._content[kept:] = bytes(wait_for_growth - kept)
        self._synced = len(self._content)


class SimClock:
    """A process's own idea of the time: its wall clock is off by some seconds, and may jump."""

    def __init__(self, loop: SimLoop, offset_s: float) -> None:
        self._loop = loop
        self.offset_s = offset_s

    def wall_s(self) -> float:
        return _EPOCH_S + self._loop.time() + self.offset_s

    def monotonic_s(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
