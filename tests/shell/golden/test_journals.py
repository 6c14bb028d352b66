"""Journals of earlier versions are replayed to the same state, and go on from there."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.coord.core.inputs import CreateJob
from strata.coord.core.job_config import JobConfig
from strata.journal import sqlite
from strata.journal.encoding import checksum_of, pack
from strata.journal.open import open_journal
from strata.journal.port import Journal
from strata.journal.replay import replay
from strata.journal.replica import Machine, Replica
from strata.train.core.client_commands import OpenSession
from strata.train.core.inputs import ClientCommand
from tests.shell.golden.folder import JournalMeaning, contains, read_meaning, unpack
from tests.shell.golden.journal_files import LEASE_S, machine_of
from tests.support.manual_clock import ManualClock


@dataclass(frozen=True)
class Opened:
    name: str
    file: Path
    meaning: JournalMeaning
    machine: Machine[Any, Any, Any]

    async def open(self) -> Journal:
        return await open_journal(f"sqlite:{self.file}", ManualClock(), create=False)

    def change(self, statement: str, *values: Any) -> None:
        with closing(sqlite3.connect(self.file, isolation_level=None)) as db:
            db.execute(statement, values)

    async def refusal(self, stream: str) -> StrataError:
        """What a process that leads this stream says."""
        with pytest.raises(StrataError) as refused:
            async with await self.open() as journal:
                await Replica(journal, stream, self.machine, ManualClock()).lead("later", LEASE_S)
        return refused.value

    async def replayed(self, journal: Journal) -> Any:
        """The state after all facts, without any snapshot."""
        state = self.machine.initial()
        async for batch in replay(journal, self.meaning.stream, 0):
            for fact in batch.facts:
                state = self.machine.apply(state, fact)
        return state


@pytest.fixture(params=["coordinator", "server"])
def opened(part: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Opened:
    """A copy of one of the journals."""
    name = request.param
    meaning = read_meaning(part, dict[str, JournalMeaning])[name]
    return Opened(name, unpack(part / f"{name}.db.gz", tmp_path), meaning, machine_of(name, meaning.rules))


async def test_all_facts_from_the_first_to_the_last_build_the_state_that_was_saved(opened: Opened) -> None:
    async with await opened.open() as journal:
        state = await opened.replayed(journal)
        saved = await journal.load_snapshot(opened.meaning.stream)
    assert saved is not None
    assert (saved.position, hashlib.sha256(saved.state).hexdigest()) == (
        opened.meaning.position,
        opened.meaning.digest,
    )
    now = msgspec.msgpack.decode(opened.machine.save(state))
    recorded = {name: value for name, value in msgspec.msgpack.decode(saved.state).items() if value or name in now}
    assert contains(now, recorded), "a state leaves out nothing but fields that are empty"
    assert opened.machine.save(state) == opened.machine.save(opened.machine.load(saved.state))


async def test_a_compacted_journal_is_read_from_its_snapshot_on(opened: Opened) -> None:
    async with await opened.open() as journal:
        replica = Replica(journal, opened.meaning.compacted, opened.machine, ManualClock())
        await replica.catch_up()
        assert replica.position == opened.meaning.position
        assert opened.machine.save(replica.state) == opened.machine.save(await opened.replayed(journal))


@pytest.mark.parametrize("stream", ["stream", "compacted"])
async def test_a_leader_of_this_version_goes_on_with_it(opened: Opened, stream: str) -> None:
    name = getattr(opened.meaning, stream)
    request: Any = CreateJob("next", JobConfig())
    if opened.name == "server":
        request = ClientCommand("next", OpenSession("next"), 2e9)
    async with await opened.open() as journal:
        replica = Replica(journal, name, opened.machine, ManualClock())
        await replica.lead("later", LEASE_S)
        await replica.submit(request)
        saved = opened.machine.save(replica.state)
    async with await opened.open() as journal:
        follower = Replica(journal, name, opened.machine, ManualClock())
        await follower.catch_up()
        assert (follower.position, opened.machine.save(follower.state)) == (opened.meaning.position + 1, saved)


@pytest.mark.parametrize(
    ("number", "message"), [(0, "is not a journal"), (sqlite._SCHEMA_VERSION + 1, "of a newer version")]
)
async def test_a_file_with_another_number_is_refused(opened: Opened, number: int, message: str) -> None:
    opened.change(f"PRAGMA user_version = {number}")
    refused = await opened.refusal(opened.meaning.stream)
    assert message in refused.message
    assert refused.hint


async def test_a_fact_that_this_version_does_not_know_is_refused_by_its_name(opened: Opened) -> None:
    tag, version = ("accepted", "an earlier") if opened.name == "server" else ("Unheard", "another")
    blob, checksum = pack([msgspec.msgpack.encode({"type": tag})])
    last = "last = (SELECT max(last) FROM journal_batch)"
    opened.change(
        f"UPDATE journal_batch SET facts = ?, checksum = ? WHERE stream = ? AND {last}",
        *(blob, checksum, opened.meaning.compacted),
    )
    refused = await opened.refusal(opened.meaning.compacted)
    assert refused.code is Code.UNSUPPORTED
    assert f"the journal holds a fact {tag!r} of {version} version" in refused.message


async def test_a_state_with_another_number_is_refused(opened: Opened) -> None:
    async with await opened.open() as journal:
        saved = await journal.load_snapshot(opened.meaning.stream)
    assert saved is not None
    state = msgspec.msgpack.encode({**msgspec.msgpack.decode(saved.state), "format": 1})
    opened.change(
        "UPDATE journal_snapshot SET state = ?, checksum = ? WHERE stream = ?",
        *(state, checksum_of(state), opened.meaning.stream),
    )
    refused = await opened.refusal(opened.meaning.stream)
    assert refused.code is Code.UNSUPPORTED
    assert "the journal holds a snapshot of another version" in refused.message
