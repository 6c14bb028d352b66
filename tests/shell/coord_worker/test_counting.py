"""Real workers count the words of a text; the journal says what counts, and every line counts once per epoch."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from strata.coord.core.facts import WorkerJoined, WorkerLost
from tests.shell.coord_worker.running import Program, Site, acked, counted, every_sample, every_word, site

LINES: Final = 300
EXAMPLE: Final = Path(__file__).parents[3] / "examples/count_words/count_words.py"
EPOCHS: Final = 2
ELASTIC: Final = {"elastic": True}


async def start(found: Site, workers: int, program: str = "count", **given: object) -> list[Program]:
    files = found.corpus(LINES)
    return [
        await found.start(program, f"w{number}", files=files, epochs=EPOCHS, shard_size=7, **given)  # type: ignore[arg-type]
        for number in range(workers)
    ]


async def check(found: Site, programs: Iterable[Program]) -> set[int]:
    """Every line once per epoch, in the journal and in what the workers counted; the leases that count."""
    samples, leases = acked(await found.facts())
    assert samples == every_sample(EPOCHS, LINES)
    assert counted(programs, leases) == every_word(EPOCHS, LINES)
    return leases


async def test_four_workers_count_every_line_once_per_epoch(tmp_path: Path) -> None:
    async with site(tmp_path, min_workers="4") as found:
        programs = await start(found, 4)
        assert await asyncio.gather(*(each.end() for each in programs)) == [0, 0, 0, 0]
        assert sorted(each.all("joined")[0]["rank"] for each in programs) == [0, 1, 2, 3]
        await check(found, programs)


async def test_what_a_killed_worker_had_not_acked_is_read_by_others(tmp_path: Path) -> None:
    async with site(tmp_path, min_workers="2", heartbeat_interval_s="0.5") as found:
        others = await start(found, 2, join=ELASTIC, hold_at=4)
        victim = await found.start(
            "count", "victim", join=ELASTIC, files=found.corpus(LINES), epochs=EPOCHS, shard_size=7, hold_at=2
        )
        for each in (victim, *others):
            await each.event("held")
        victim.signal(signal.SIGKILL)
        for each in others:
            each.release()
        assert await asyncio.gather(*(each.end() for each in others)) == [0, 0]
        await victim.end()
        leases = await check(found, (victim, *others))
        # Two shards were read to their end and acked by asking for more; the third was half read.
        assert len([event for event in victim.all("shard") if event["lease_id"] in leases]) == 2


async def test_workers_do_not_notice_that_the_coordinator_was_killed_and_started_again(tmp_path: Path) -> None:
    async with site(tmp_path, min_workers="3", heartbeat_interval_s="0.5") as found:
        held = await start(found, 2, hold_at=3)
        busy = await found.start("count", "busy", files=found.corpus(LINES), epochs=EPOCHS, shard_size=7)
        for each in held:
            await each.event("held")
        await busy.event("shard")
        await found.coordinator.kill()
        await found.coordinator.start()
        await found.coordinator.serving()
        for each in held:
            each.release()
        programs = [*held, busy]
        assert await asyncio.gather(*(each.end() for each in programs)) == [0, 0, 0]
        await check(found, programs)
        facts = await found.facts()
        assert len([fact for fact in facts if isinstance(fact, WorkerJoined)]) == 3
        assert {fact.cause for fact in facts if isinstance(fact, WorkerLost)} == {"left"}
        for each in programs:
            assert each.all("finished")[0]["incarnation"] == each.all("joined")[0]["incarnation"]


async def test_a_worker_that_froze_past_its_eviction_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path, heartbeat_interval_s="0.4") as found:
        (other,) = await start(found, 1, join=ELASTIC, hold_at=2)
        frozen = await found.start(
            "count", "frozen", join=ELASTIC, files=found.corpus(LINES), epochs=EPOCHS, shard_size=7, hold_at=2
        )
        await asyncio.gather(other.event("held"), frozen.event("held"))
        frozen.signal(signal.SIGSTOP)
        other.release()
        # The other one can only finish with the shard that was taken from the frozen one.
        assert await other.end() == 0
        frozen.release()
        frozen.signal(signal.SIGCONT)
        assert await frozen.end() == 1
        (error,) = frozen.all("error")
        assert (error["code"], error["reason"]) == ("stale", "evicted")
        leases = await check(found, (other, frozen))
        assert frozen.all("shard")[-1]["lease_id"] not in leases


async def test_a_worker_that_may_rejoin_drops_the_shard_it_lost_and_goes_on(tmp_path: Path) -> None:
    async with site(tmp_path, heartbeat_interval_s="0.4") as found:
        (other,) = await start(found, 1, join=ELASTIC, hold_at=2)
        frozen = await found.start(
            "count",
            "frozen",
            join=ELASTIC | {"rejoin": True},
            files=found.corpus(LINES),
            epochs=EPOCHS,
            shard_size=7,
            hold_at=2,
        )
        await asyncio.gather(other.event("held"), frozen.event("held"))
        frozen.signal(signal.SIGSTOP)
        await found.lost("frozen")
        frozen.release()
        frozen.signal(signal.SIGCONT)
        await frozen.event("lost")
        other.release()
        assert [await other.end(), await frozen.end()] == [0, 0]
        assert frozen.all("finished")[0]["incarnation"] != frozen.all("joined")[0]["incarnation"]
        await check(found, (other, frozen))


async def test_the_blocking_and_the_async_worker_do_the_same(tmp_path: Path) -> None:
    read = []
    for program in ("count", "count-async"):
        folder = tmp_path / program
        folder.mkdir()
        async with site(folder) as found:
            (worker,) = await start(found, 1, program)
            assert await worker.end() == 0
            await check(found, [worker])
            read.append([(event["epoch"], event["start"], event["end"]) for event in worker.all("shard")])
    assert read[0] == read[1]
    assert len(read[0]) == EPOCHS * -(-LINES // 7)


async def test_the_example_counts_every_word(tmp_path: Path) -> None:
    async with site(tmp_path) as found:
        files, out = found.corpus(LINES), tmp_path / "counts"
        running = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                str(EXAMPLE),
                *("--epochs", "2", "--shard-size", "20", "--out", str(out), *files),
                # Else the first may be done before the second has started, and a finished job refuses it.
                env={
                    "STRATA_WORKER_ADDRESS": found.coordinator.address,
                    "STRATA_WORKER_ID": f"w{number}",
                    "STRATA_WORKER_WAIT_FOR": "2",
                },
                stdout=asyncio.subprocess.DEVNULL,
            )
            for number in range(2)
        ]
        assert [await each.wait() for each in running] == [0, 0]
        words: Counter[str] = Counter()
        for path in out.iterdir():
            words.update(json.loads(path.read_text("utf-8")))
        assert words == every_word(2, LINES)
