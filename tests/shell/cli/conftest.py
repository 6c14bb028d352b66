"""A SQLite journal file with two streams, written through the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from strata.base.clock import SystemClock
from strata.journal.open import open_journal
from strata.journal.port import Journal, Snapshot

RAW = b"\xc1 is no msgpack"


async def _fill(store: Journal, facts: int) -> None:
    for stream in ("a", "b"):
        lead = await store.lead(stream, "writer-1", 10.0)
        encoded = [msgspec.msgpack.encode({"kind": "joined", "n": n, "raw": b"\x00"}) for n in range(1, facts)]
        half = len(encoded) // 2
        head = await store.append(stream, lead.epoch, 0, encoded[:half])
        head = await store.append(stream, lead.epoch, head, [*encoded[half:], RAW])
        await store.save_snapshot(stream, lead.epoch, Snapshot(half, lead.epoch, b"state"))


@pytest.fixture
def journal_file(tmp_path: Path) -> Callable[[int], Path]:
    """Call it with the number of facts per stream."""

    def make(facts: int) -> Path:
        path = tmp_path / "journal.db"

        async def write() -> None:
            async with await open_journal(str(path), SystemClock()) as store:
                await _fill(store, facts)

        asyncio.run(write())
        return path

    return make
