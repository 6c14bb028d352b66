"""Let other tasks run without letting time pass: for asserting that something has *not* happened."""

from __future__ import annotations

import asyncio


async def turns(count: int = 25) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
