"""Kill the writer at every failpoint, kill the database under it, lose its replies: what was acknowledged stays."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import pytest

from strata.base.clock import SystemClock
from strata.journal.open import open_journal
from strata.journal.replica import Replica
from tests.shell.journal.tally import Tally
from tests.shell.journal.writer_process import WIDTH
from tests.support.postgres import PostgresServer
from tests.support.proxy import ChaosProxy

ROOT = Path(__file__).parents[3]
READY_S = 5.0
"""A database that is back must be in use again within this time."""
SHORT_S = 2.0
"""A lease that a successor need not wait for long."""
LONG_S = 10.0
"""A lease that no fault of these tests outlasts: nobody else is there to take it."""
WRITER = Path(__file__).with_name("writer_process.py")


def failpoints() -> list[str]:
    """Every failpoint named in the source of the journal and of the thread it runs SQLite in."""
    files = [*sorted((ROOT / "src/strata/journal").glob("*.py")), ROOT / "src/strata/database/sqlite.py"]
    source = "".join(path.read_text() for path in files)
    return sorted(set(re.findall(r'failpoint\("([^"]+)"\)', source)))


def reached_with(database: str) -> list[str]:
    other = {"sqlite": "postgres", "postgres": "sqlite"}[database]
    return [name for name in failpoints() if f".{other}." not in name]


async def start_writer(
    database: str, holder: str, *failpoint: str, lease_s: float = SHORT_S
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(WRITER),
        database,
        holder,
        str(lease_s),
        *failpoint,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )


async def acknowledged(writer: asyncio.subprocess.Process) -> int:
    """The highest number a finished writer printed whole."""
    assert writer.stdout is not None
    printed = await writer.stdout.read()
    return max((int(line) for line in printed.split(b"\n")[:-1]), default=0)


async def stored(database: str) -> int:
    """Where the tally is. Reading it checks that it has neither gap nor repetition."""
    async with await open_journal(database, SystemClock(), create=False) as journal:
        replica: Replica[int, None, int] = Replica(journal, "tally", Tally(), SystemClock())
        if await journal.streams():
            await replica.catch_up()
        return replica.state


async def survives_a_kill(database: str, failpoint: str, skip: int) -> None:
    async with asyncio.timeout(60):
        writer = await start_writer(database, f"{failpoint}-{skip}", failpoint, str(skip))
        told = await acknowledged(writer)
        assert await writer.wait() == -signal.SIGKILL, f"{failpoint} was not reached"
        assert await stored(database) >= told
        again = await start_writer(database, f"{failpoint}-{skip}-again", "journal.replica.after_commit", "20")
        told = await acknowledged(again)
        await again.wait()
        assert told > 0, "nobody could go on after the crash"
        assert await stored(database) >= told


@pytest.mark.proves("Nothing acknowledged is lost, nothing is there twice, when the writer is killed")
@pytest.mark.parametrize("failpoint", reached_with("sqlite"))
async def test_sqlite_keeps_every_acknowledged_fact_when_killed_at(failpoint: str, tmp_path: Path) -> None:
    for skip in (0, 3):
        # The lead is taken once in a life of this writer.
        if skip and failpoint.endswith("after_lead"):
            continue
        await survives_a_kill(f"sqlite:{tmp_path}/journal.db", failpoint, skip)


@pytest.mark.parametrize("failpoint", reached_with("postgres"))
async def test_postgres_keeps_every_acknowledged_fact_when_killed_at(failpoint: str, postgres_url: str) -> None:
    await survives_a_kill(postgres_url, failpoint, 0 if failpoint.endswith("after_lead") else 3)


@pytest.mark.proves(
    "The journal loses nothing that it confirmed when PostgreSQL is killed under load, and is in use again within 5 s"
)
async def test_postgres_killed_under_load_loses_nothing_it_confirmed(own_postgres_server: PostgresServer) -> None:
    database = own_postgres_server.create_database()
    writer = await start_writer(database, "under-load", lease_s=LONG_S)
    assert writer.stdout is not None
    told = 0
    async with asyncio.timeout(90):
        for _ in range(3):
            told = await read_beyond(writer, told + 200)
            await asyncio.to_thread(own_postgres_server.kill)
            await asyncio.to_thread(own_postgres_server.start)
            async with asyncio.timeout(READY_S):
                told = await read_beyond(writer, told + WIDTH)
        told = await read_beyond(writer, told + 200)
        writer.kill()
        told = max(told, await acknowledged(writer))
    await writer.wait()
    assert await stored(database) >= told


async def read_beyond(writer: asyncio.subprocess.Process, number: int) -> int:
    """Read until the writer has confirmed this number."""
    assert writer.stdout is not None
    told = 0
    while told < number:
        line = await writer.stdout.readline()
        assert line, "the writer ended"
        told = max(told, int(line))
    return told


async def test_terminated_backends_are_only_a_hiccup(own_postgres_server: PostgresServer) -> None:
    database = own_postgres_server.create_database()
    writer = await start_writer(database, "hiccup", lease_s=LONG_S)
    told = 0
    async with asyncio.timeout(60):
        for _ in range(5):
            told = await read_beyond(writer, told + 100)
            await asyncio.to_thread(own_postgres_server.terminate_backends, database)
        told = await read_beyond(writer, told + 100)
        writer.kill()
        told = max(told, await acknowledged(writer))
    await writer.wait()
    assert await stored(database) >= told


async def test_replies_lost_after_the_commit_double_nothing(own_postgres_server: PostgresServer) -> None:
    """The server commits, the answer vanishes, the connection breaks: the writer repeats and is recognised."""
    database = own_postgres_server.create_database()
    async with ChaosProxy("127.0.0.1", own_postgres_server.port) as proxy, asyncio.timeout(60):
        through = database.replace(f":{own_postgres_server.port}", f":{proxy.port}")
        async with await open_journal(through, SystemClock()) as journal:
            replica: Replica[int, None, int] = Replica(journal, "tally", Tally(), SystemClock())
            await replica.lead("lost-replies", 60.0)
            for _ in range(5):
                await asyncio.gather(*(replica.submit(None) for _ in range(10)))
                proxy.swallow_replies()
                doubtful = [asyncio.create_task(replica.submit(None)) for _ in range(10)]
                await proxy.swallowed(at_least=1)
                proxy.cut()
                proxy.heal()
                await asyncio.gather(*doubtful)
            assert replica.state == 100
    assert await stored(database) == 100


async def test_a_standby_takes_over_from_a_killed_leader(postgres_url: str) -> None:
    async with asyncio.timeout(60):
        leader = await start_writer(postgres_url, "first")
        told = await read_beyond(leader, 100)
        standby = await start_writer(postgres_url, "second")
        told = await read_beyond(leader, told + 100)
        leader.kill()
        told = max(told, await acknowledged(leader))
        await leader.wait()
        assert await read_beyond(standby, told + 100) > told
        standby.kill()
        await acknowledged(standby)
        await standby.wait()


@pytest.mark.proves("A leader that was frozen and wakes up can write nothing")
async def test_a_frozen_leader_that_wakes_up_can_write_nothing(postgres_url: str) -> None:
    async with asyncio.timeout(60):
        leader = await start_writer(postgres_url, "zombie")
        await read_beyond(leader, 100)
        leader.send_signal(signal.SIGSTOP)
        standby = await start_writer(postgres_url, "successor")
        told = await read_beyond(standby, 300)
        leader.send_signal(signal.SIGCONT)
        await acknowledged(leader)
        assert await leader.wait() != 0, "a deposed writer ends with an error"
        told = await read_beyond(standby, told + 100)
        standby.kill()
        told = max(told, await acknowledged(standby))
        await standby.wait()
        assert await stored(postgres_url) >= told
