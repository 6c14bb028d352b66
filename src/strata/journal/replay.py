"""Reads a stream from a position to its head (`replay`), or on as it grows (`tail`)."""

from __future__ import annotations

from collections.abc import AsyncIterator

from strata.base.errors import Code, StrataError
from strata.journal.port import Batch, Journal


async def replay(journal: Journal, stream: str, after: int = 0) -> AsyncIterator[Batch]:
    """Every committed batch after a position, up to the head as it is when reached; a gap is CORRUPT, never skipped."""
    position = after
    while page := await journal.read(stream, position):
        for batch in page:
            if batch.first != position + 1:
                raise StrataError(
                    Code.CORRUPT,
                    f"stream {stream!r} has a gap: after position {position} comes {batch.first}",
                    stream=stream,
                )
            position = batch.last
            yield batch


async def tail(journal: Journal, stream: str, after: int = 0, *, wait_s: float = 10.0) -> AsyncIterator[Batch]:
    """Yields batches as `replay` does, but waits for more at the head, for ever. GONE if a truncation overtook the
    reader."""
    position = after
    while True:
        async for batch in replay(journal, stream, position):
            position = batch.last
            yield batch
        await journal.wait_for_growth(stream, position, wait_s)
