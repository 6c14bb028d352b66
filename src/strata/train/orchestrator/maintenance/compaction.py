"""Truncates the journal and deletes payloads and older snapshots once a snapshot of the models covers them; looks every
5 s.

Everything that is removed follows from facts that are durable before. A process that dies in the middle leaves only
files and facts that nothing refers to, and the next one removes them.
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
from strata.train.core.snapshots import due_reason
from strata.train.core.state import TrainState
from strata.train.orchestrator.replay_reader import find_dispatch, retained_facts
from strata.train.orchestrator.state_store import StateStore
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings

CHECK_S: Final = 5.0
"""How often to check whether time alone makes a snapshot due."""
_log = log.get(__name__)


class Compaction:
    def __init__(self, settings: ServerSettings, journal: Journal, store: StateStore) -> None:
        self._settings = settings
        self._journal = journal
        self._store = store
        self._payloads = Payloads(settings.payloads)
        self._compacted: tuple[int, ...] | None = None
        """The snapshots at the last compaction; None before the first: an earlier leader may have left something."""
        self._retry_at_s = 0.0
        """When payloads that were within their grace period last time can be removed; 0 if there are none."""

    async def run_once(self) -> None:
        """Compact at the start, after each snapshot, and when a grace period ends."""
        if self._compacted is not None:
            await self._wait_for_snapshot()
        store, now_s = self._store, self._store.clock.wall_s()
        if due_reason(store.state, now_s) is not None:
            store.dispatchable.set()
        snapshots = tuple(snapshot.number for snapshot in store.state.snapshots)
        if snapshots == self._compacted and not 0 < self._retry_at_s <= now_s:
            return
        folders = await asyncio.to_thread(_snapshot_folders, self._settings.snapshot_folder)
        retained, last = _retained_names(store.state)
        truncate_through, referenced = store.state.truncated_through, set(_referenced_payloads(store.state))
        # After reading the state: facts that are not durable may never be, and another process may lead meanwhile.
        await store.confirm_leadership()
        retained |= _retained_names(store.state)[0]
        await asyncio.to_thread(
            _remove, [folder for folder, name in folders if name not in retained and _number(name) <= last]
        )
        if truncate_through:
            await self._truncate(truncate_through, referenced, now_s)
        self._compacted = snapshots

    async def _wait_for_snapshot(self) -> None:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._store.snapshot_committed.wait()
        except TimeoutError:
            return
        self._store.snapshot_committed.clear()

    async def _truncate(self, number: int, referenced: set[str], now_s: float) -> None:
        """Truncate the journal before this dispatch and remove payloads that nothing refers to.

        `referenced` follows from durable facts; payloads of operations that were accepted since are added.
        """
        stream = self._settings.stream
        position = await find_dispatch(self._journal, stream, number)
        async for _, fact in retained_facts(self._journal, stream, position or 0):
            referenced.update(_payloads_of_fact(fact))
        referenced.update(_referenced_payloads(self._store.state))
        if position is not None:
            await self._store.ensure_snapshot(position)
            failpoint("train.orchestrator.before_cut")
            await self._journal.truncate(stream, self._store.leader_epoch, position)
        failpoint("train.orchestrator.before_payloads_go")
        grace_s = self._settings.snapshots.payload_grace_s
        removed, young = await asyncio.to_thread(self._payloads.remove_unreferenced, referenced, now_s - grace_s)
        self._retry_at_s = now_s + grace_s if young else 0.0
        _log.info("journal_compacted", through_dispatch=number, payloads_removed=removed, payloads_in_grace=young)


def _payloads_of_fact(fact: facts.Fact) -> Iterator[str]:
    """Yields those of operations, which a replay repeats, and of results of passes, with which it is compared."""
    if isinstance(fact, facts.OperationAccepted):
        yield from _payload(fact.operation)
    elif isinstance(fact, facts.OperationFinished) and isinstance(fact.result, ops.PassDone):
        yield from _payload(fact.result)


def _referenced_payloads(state: TrainState) -> Iterator[str]:
    """Payloads of operations that wait or run, of results, and of operations that were pending at a snapshot."""
    for future in state.futures:
        yield from _payload(future.operation)
        yield from _payload(future.result)
    for snapshot in (*state.snapshots, state.snapshotting):
        for operation in snapshot.pending.values() if snapshot is not None else ():
            yield from _payload(operation)


def _payload(holder: ops.Operation | ops.Result | None) -> Iterator[str]:
    for payload in (getattr(holder, "payload", None), getattr(holder, "routing", None)):
        if isinstance(payload, ops.StoredPayload):
            yield payload.sha256


def _retained_names(state: TrainState) -> tuple[set[str], int]:
    """Names of the folders that stay, and the last dispatch that we know: later ones belong to a later leader."""
    names = {snapshot.name for snapshot in state.snapshots}
    if state.snapshotting is not None:
        names.add(state.snapshotting.name)
    return names, state.dispatched


def _snapshot_folders(parent: Path) -> list[tuple[Path, str]]:
    """The folders of snapshots, unfinished ones too, each with the name that it has when it is complete."""
    folders = (
        [(path, path.name.removeprefix(".").removesuffix(".part")) for path in parent.iterdir()]
        if parent.is_dir()
        else []
    )
    return sorted((path, name) for path, name in folders if name.partition("-")[0].isdecimal())


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        failpoint("train.orchestrator.before_snapshot_goes")
        shutil.rmtree(folder, ignore_errors=True)
