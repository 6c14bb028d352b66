"""A worker whose process lives and sends nothing: it stays a member. One that is frozen does not."""

from __future__ import annotations

import signal
from pathlib import Path

from strata.coord.core.facts import WorkerLost
from tests.shell.coord_worker.running import site

SILENCE_S = 1.0
"""Two missed heartbeats."""


async def test_a_worker_that_holds_the_gil_for_longer_than_it_may_be_silent_stays_a_member(tmp_path: Path) -> None:
    # The machine may stand still for a while: that must break no stream and end no leadership.
    async with site(tmp_path, ping_timeout_s=15, lease_s=20, heartbeat_interval_s="0.5", missed_beats="2") as found:
        worker = await found.start("hold-the-gil", "w", seconds=3 * SILENCE_S)
        await worker.event("held")
        worker.release()
        await worker.event("finished", within_s=25)
        assert await worker.end() == 0
        (joined,), (finished,) = worker.all("joined"), worker.all("finished")
        assert finished["incarnation"] == joined["incarnation"]
        lost = [fact.cause for fact in await found.facts() if isinstance(fact, WorkerLost)]
        assert lost == ["left"]


async def test_a_frozen_worker_is_evicted_when_it_answers_no_ping(tmp_path: Path) -> None:
    # One minute of silence would be allowed.
    async with site(tmp_path, ping_timeout_s=2, lease_s=20, heartbeat_interval_s="1", missed_beats="60") as found:
        worker = await found.start("hold-the-gil", "w", seconds=0)
        await worker.event("held")
        worker.signal(signal.SIGSTOP)
        await found.lost("w", within_s=30)
        worker.signal(signal.SIGCONT)
        lost = [fact.cause for fact in await found.facts() if isinstance(fact, WorkerLost)]
        assert lost == ["connection lost"]
