"""What snapshots of the models make superfluous is let go: facts of the journal, payload files, older snapshots.

All of it follows from facts that are durable before anything is removed, and can be done again: a process that dies in
the midst leaves only files and facts that nobody asks for, and the next one removes them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.failpoint import failpoint
from strata.journal.port import Journal
from strata.train.core import facts, ops
from strata.train.core.snapshots import due
from strata.train.core.state import TrainState
from strata.train.orchestrator.history import position_of, still_there
from strata.train.orchestrator.ledger import Ledger
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings

LOOK_S: Final = 5.0
"""How often it is looked whether time alone makes a snapshot due."""
_log = log.get(__name__)


class Trimming:
    def __init__(self, settings: ServerSettings, journal: Journal, ledger: Ledger) -> None:
        self._settings = settings
        self._journal = journal
        self._ledger = ledger
        self._payloads = Payloads(settings.payloads)
        self._trimmed: tuple[int, ...] | None = None
        """The snapshots there were the last time; None before the first: whoever led before may have left something."""
        self._young_until_s = 0.0
        """Payloads were left because they were too young; by then they are not."""

    async def run_once(self) -> None:
        """At the start, after each snapshot, and when what was too young then is old enough."""
        if self._trimmed is not None:
            await self._wait()
        ledger, now_s = self._ledger, self._ledger.clock.wall_s()
        if due(ledger.state, now_s) is not None:
            ledger.changed.set()
        there = tuple(each.number for each in ledger.state.snapshots)
        if there == self._trimmed and not 0 < self._young_until_s <= now_s:
            return
        folders = await asyncio.to_thread(_named, self._settings.snapshot_folder)
        kept, last = _kept(ledger.state)
        cut, needed = ledger.state.cut, set(_referred_to(ledger.state))
        # After all of this was seen: what is not durable may never have been, and somebody else may lead meanwhile.
        await ledger.confirm()
        kept |= _kept(ledger.state)[0]
        await asyncio.to_thread(_remove, [each for each, of in folders if of not in kept and _number(of) <= last])
        if cut:
            await self._let_go(cut, needed, now_s)
        self._trimmed = there

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._ledger.covered.wait()
        except TimeoutError:
            return
        self._ledger.covered.clear()

    async def _let_go(self, cut: int, needed: set[str], now_s: float) -> None:
        """`needed` is known by facts that are durable; what was asked for since is added."""
        stream = self._settings.stream
        position = await position_of(self._journal, stream, cut)
        async for _, fact in still_there(self._journal, stream, position or 0):
            needed.update(_of(fact))
        needed.update(_referred_to(self._ledger.state))
        if position is not None:
            await self._ledger.save_through(position)
            failpoint("train.orchestrator.before_cut")
            await self._journal.truncate(stream, self._ledger.generation, position)
        failpoint("train.orchestrator.before_payloads_go")
        grace_s = self._settings.snapshots.payload_grace_s
        gone, young = await asyncio.to_thread(self._payloads.forget_all_but, needed, now_s - grace_s)
        self._young_until_s = now_s + grace_s if young else 0.0
        _log.info("let go of what a snapshot covers", dispatches=cut, payloads=gone, payloads_too_young=young)


def _of(fact: facts.Fact) -> Iterator[str]:
    if isinstance(fact, facts.Accepted):
        yield from _payload(fact.operation)


def _referred_to(state: TrainState) -> Iterator[str]:
    """By operations that wait or run, by results that can be asked for, and by what snapshots say was pending."""
    for future in state.futures:
        yield from _payload(future.operation)
        yield from _payload(future.result)
    for snapshot in (*state.snapshots, state.snapshotting):
        for operation in snapshot.pending.values() if snapshot is not None else ():
            yield from _payload(operation)


def _payload(holder: ops.Operation | ops.Result | None) -> Iterator[str]:
    payload = getattr(holder, "payload", None)
    if isinstance(payload, ops.Stored):
        yield payload.sha256


def _kept(state: TrainState) -> tuple[set[str], int]:
    """Names of folders that stay, and the last dispatch that we know of: later ones belong to whoever leads then."""
    names = {each.name for each in state.snapshots}
    if state.snapshotting is not None:
        names.add(state.snapshotting.name)
    return names, state.dispatched


def _named(above: Path) -> list[tuple[Path, str]]:
    """The folders of snapshots, also of those that nobody finished, and the names that they have or would have."""
    found = (
        [(each, each.name.removeprefix(".").removesuffix(".part")) for each in above.iterdir()]
        if above.is_dir()
        else []
    )
    return sorted((each, name) for each, name in found if name.partition("-")[0].isdecimal())


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        failpoint("train.orchestrator.before_snapshot_goes")
        shutil.rmtree(folder, ignore_errors=True)
