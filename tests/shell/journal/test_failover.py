"""A PostgreSQL that is killed and whose standby is promoted: what a process saw committed is there, or it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.database.postgres import display_address
from strata.journal.postgres import PostgresJournal
from tests.support.postgres import PostgresServer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary, and a standby that it waits for at each commit."""
    with ExitStack() as stack:
        primary = stack.enter_context(PostgresServer())
        standby = PostgresServer()
        stack.callback(standby.close)
        standby.follow(primary)
        primary.wait_for_standby()
        yield primary, standby


def url_of(*servers: PostgresServer) -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"


async def fail_over(primary: PostgresServer, standby: PostgresServer) -> None:
    primary.kill()
    standby.promote()


async def refused(journal: PostgresJournal) -> None:
    for call in (journal.lead("s", "here", 60.0), journal.read("s", 0), journal.wait_for_growth("s", 9, 0.0)):
        with pytest.raises(StrataError, match="the database has lost facts of stream 's'") as caught:
            await call
        assert caught.value.code is Code.CORRUPT


@pytest.mark.proves(
    "When PostgreSQL dies and its synchronous standby is promoted, nothing confirmed is lost; a standby "
    "without all facts is refused"
)
async def test_nothing_is_lost_with_a_synchronous_standby(pair: tuple[PostgresServer, PostgresServer]) -> None:
    async with await PostgresJournal.open(url_of(*pair), SystemClock()) as journal:
        lead = await journal.lead("s", "here", 60.0)
        await journal.append("s", lead.epoch, 0, [b"a", b"b"])
        await fail_over(*pair)
        with pytest.raises(StrataError) as caught:
            await journal.append("s", lead.epoch, 2, [b"c"])
        assert caught.value.code is Code.UNAVAILABLE
        assert await journal.append("s", lead.epoch, 2, [b"c"]) == 3
        assert [fact for batch in await journal.read("s", 0) for fact in batch.facts] == [b"a", b"b", b"c"]


async def test_a_standby_that_had_not_received_everything_is_refused(
    pair: tuple[PostgresServer, PostgresServer],
) -> None:
    primary, standby = pair
    async with (
        await PostgresJournal.open(url_of(*pair), SystemClock()) as leader,
        await PostgresJournal.open(url_of(*pair), SystemClock()) as follower,
    ):
        lead = await leader.lead("s", "here", 0.0)
        await leader.append("s", lead.epoch, 0, [b"a"])
        standby.stop()
        primary.commit_alone()
        await leader.append("s", lead.epoch, 1, [b"lost"])
        assert len(await follower.read("s", 0)) == 2
        primary.kill()
        standby.start()
        standby.promote()
        with pytest.raises(StrataError) as caught:
            await leader.append("s", lead.epoch, 2, [b"c"])
        assert caught.value.code is Code.UNAVAILABLE
        with pytest.raises(StrataError, match="the database has lost facts"):
            await leader.append("s", lead.epoch, 2, [b"c"])
        await refused(leader)

        # One that knows nothing leads; then what it writes stands where the lost fact stood.
        async with await PostgresJournal.open(url_of(*pair), SystemClock()) as other:
            again = await other.lead("s", "there", 0.0)
            await other.append("s", again.epoch, 1, [b"other"])
            await other.append("s", again.epoch, 2, [b"more"])
        with pytest.raises(StrataError):
            await follower.read("s", 2)
        with pytest.raises(StrataError, match="the database has lost facts"):
            await follower.read("s", 2)
        with pytest.raises(StrataError, match="the database has lost facts"):
            await follower.lead("s", "here", 60.0)

        # The right database is back: what was refused is taken again.
        standby.kill()
        primary.start()
        with pytest.raises(StrataError) as caught:
            await leader.read("s", 0)
        assert caught.value.code is Code.UNAVAILABLE
        assert await leader.append("s", lead.epoch, 2, [b"c"]) == 3
        assert (await leader.lead("s", "here", 60.0)).head == 3


def test_an_address_with_several_servers_is_shown_without_its_password() -> None:
    shown = display_address("postgresql://me:hunter2@a:1,b/name?target_session_attrs=read-write")
    assert shown == "a:1,b:5432/name"
    assert display_address("postgresql:///name") == "local socket:5432/name"
