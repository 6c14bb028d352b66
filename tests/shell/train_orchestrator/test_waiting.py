"""What a dispatch needs may be out of reach for a while: that is waited for, and nothing else is."""

from __future__ import annotations

import asyncio

import pytest

from strata.base.errors import Code, StrataError
from strata.train.orchestrator.request_processor import RETRY_S, retry_unavailable
from tests.support.manual_clock import ManualClock


class Store:
    def __init__(self, code: Code, times: int) -> None:
        self.code = code
        self.left = times

    async def read(self) -> str:
        if self.left:
            self.left -= 1
            raise StrataError(self.code, "the object store does not answer")
        return "content"


async def test_what_is_out_of_reach_is_tried_again_until_it_is_there() -> None:
    clock, store = ManualClock(), Store(Code.UNAVAILABLE, 3)
    reading = asyncio.create_task(retry_unavailable(store.read, clock, 60.0))
    await clock.advance(3 * RETRY_S)
    assert await reading == "content"


async def test_what_stays_out_of_reach_fails_when_the_time_of_an_operation_is_over() -> None:
    clock, store = ManualClock(), Store(Code.UNAVAILABLE, 1000)
    reading = asyncio.create_task(retry_unavailable(store.read, clock, 60.0))
    await clock.advance(59.0)
    assert not reading.done()
    await clock.advance(2 * RETRY_S)
    with pytest.raises(StrataError, match="does not answer"):
        await reading


@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.CORRUPT])
async def test_what_is_lost_is_not_waited_for(code: Code) -> None:
    with pytest.raises(StrataError) as lost:
        await retry_unavailable(Store(code, 1).read, ManualClock(), 60.0)
    assert lost.value.code is code
