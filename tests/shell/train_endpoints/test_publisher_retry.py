"""What goes wrong at an endpoint in a way that nobody foresaw is tried again, though no fact asks for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from strata.train.core import ops
from strata.train.endpoints.publisher import RETRY_S, Publisher
from tests.shell.train_orchestrator.leaders import leading, settings_in
from tests.support.manual_clock import ManualClock
from tests.support.memory_journal import MemoryJournal


async def test_a_task_that_ends_in_an_unforeseen_way_is_looked_at_again_after_a_pause(tmp_path: Path) -> None:
    clock = ManualClock()
    store = await leading(MemoryJournal(clock), clock)

    async def keep(result: ops.Result) -> ops.Result:
        return result

    async def fail() -> None:
        raise LookupError("nobody foresaw this")

    publisher = Publisher(settings_in(tmp_path), store, keep)
    running = asyncio.create_task(publisher.run())
    await clock.advance(0.0)
    publisher._start_task("push p", fail)
    await clock.advance(RETRY_S / 2)
    looked = asyncio.create_task(store.publishable.wait())
    await clock.advance(RETRY_S / 4)
    assert not looked.done()
    await clock.advance(RETRY_S / 2)
    assert looked.done()
    # And nothing is left when it is over, also of what ends in such a way just then.
    publisher._start_task("push q", fail)
    running.cancel()
    await asyncio.wait([running])
    assert {each for each in asyncio.all_tasks() if "push" in each.get_name() or each.get_name() == "again"} == set()
