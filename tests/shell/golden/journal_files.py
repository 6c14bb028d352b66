"""The journals of the coordinator and of the training server, in SQLite files as their processes write them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from strata.coord.core import facts as coordinator_facts
from strata.coord.core.machine import CoordMachine, decode_fact
from strata.journal.port import Snapshot
from strata.journal.replica import Machine
from strata.journal.sqlite import SqliteJournal
from strata.train.core import facts as training_facts
from strata.train.core.machine import TrainMachine
from strata.train.core.state import Rules
from tests.shell.golden import coordinator_history, training_history
from tests.shell.golden.folder import JournalMeaning, pack, write_meaning
from tests.support.manual_clock import ManualClock

LEASE_S: Final = 10.0
Batches = Sequence[Sequence[bytes]]


@dataclass(frozen=True)
class Stream:
    name: str
    batches: Batches
    machine: Machine[Any, Any, Any]
    rules: Mapping[str, Any]

    @property
    def compacted(self) -> str:
        return f"{self.name}-compacted"


def write_journals(folder: Path, scratch: Path) -> None:
    streams = {"coordinator": _coordinator_stream(), "server": _server_stream()}
    write_meaning(
        folder, {name: asyncio.run(_write(folder, scratch / f"{name}.db", each)) for name, each in streams.items()}
    )


def machine_of(name: str, rules: Mapping[str, Any]) -> Machine[Any, Any, Any]:
    return CoordMachine() if name == "coordinator" else TrainMachine(Rules(**rules))


def _coordinator_stream() -> Stream:
    batches = coordinator_history.coordinator_history()
    _require_all(coordinator_facts.Fact, [decode_fact(fact) for batch in batches for fact in batch])
    return Stream(coordinator_history.STREAM, batches, machine_of("coordinator", {}), {})


def _server_stream() -> Stream:
    batches, rules = training_history.training_history(), training_history.RULES
    _require_all(training_facts.Fact, [training_facts.decode(fact) for batch in batches for fact in batch])
    return Stream(training_history.STREAM, batches, machine_of("server", rules), rules)


def _require_all(union: Any, written: Sequence[Any]) -> None:
    missing = set(get_args(union)) - set(map(type, written))
    assert not missing, f"the history has no {', '.join(sorted(each.__name__ for each in missing))}"


async def _write(folder: Path, file: Path, stream: Stream) -> JournalMeaning:
    middle = len(stream.batches) // 2
    async with await SqliteJournal.open(file, ManualClock()) as journal:
        whole = await _append(journal, stream, stream.name, len(stream.batches))
        covered = await _append(journal, stream, stream.compacted, middle)
        epoch = (await journal.lead(stream.compacted, "compactor", LEASE_S)).epoch
        await journal.truncate(stream.compacted, epoch, covered.position)
    pack(file, folder)
    return JournalMeaning(
        stream=stream.name,
        compacted=stream.compacted,
        position=whole.position,
        digest=hashlib.sha256(whole.state).hexdigest(),
        rules=stream.rules,
    )


async def _append(journal: SqliteJournal, stream: Stream, name: str, snapshot_after: int) -> Snapshot:
    """Appends all batches under two leaders, and saves the state after so many of them."""
    machine, saved = stream.machine, None
    state, position, epoch = machine.initial(), 0, 0
    for number, batch in enumerate(stream.batches):
        if number in (0, len(stream.batches) // 3):
            epoch = (await journal.lead(name, f"leader-{number}", LEASE_S)).epoch
            await journal.resign(name, epoch)
        position = await journal.append(name, epoch, position, batch)
        for fact in batch:
            state = machine.apply(state, fact)
        if number + 1 == snapshot_after:
            saved = Snapshot(position, epoch, machine.save(state))
            await journal.save_snapshot(name, epoch, saved)
    assert saved is not None
    return saved
