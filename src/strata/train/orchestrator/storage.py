"""Copies of all checkpoints in object storage: put there after they are saved, brought back where the files are gone.

What is there is told by its manifests. Nothing is remembered: a process that starts lists them, puts what is missing,
and deletes what no checkpoint has any more.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.core.retention import kept_folders
from strata.train.core.state import run_folder
from strata.train.orchestrator.ledger import Ledger
from strata.train.settings import ServerSettings

if TYPE_CHECKING:
    from strata.train.store.objects import ObjectStore

_log = log.get(__name__)


class Storage:
    def __init__(self, ledger: Ledger, store: ObjectStore, folder: Path, beside: Path) -> None:
        self._ledger = ledger
        self._store = store
        self._folder = folder
        self._beside = beside
        self._there: set[str] | None = None
        """Those in the store, whole or not; None before they were listed."""
        self._whole: set[str] = set()
        self._useless: set[str] = set()
        """Damaged here: there is nothing to copy."""

    async def run_once(self) -> None:
        if self._there is None:
            self._whole, parts = await self._store.names()
            self._there = self._whole | parts
        wanted, kept = self._wanted(), kept_folders(self._ledger.state)
        # After they were looked up: what is not durable may never have been.
        await self._ledger.settled()
        for name in sorted(wanted - self._whole - self._useless):
            await self._put(name, self._there)
        for name in sorted(filter(self._is_ours, self._there - kept)):
            # Whoever leads after us may have put one of the same name.
            await self._ledger.confirm()
            if name not in kept_folders(self._ledger.state):
                _log.info("deleting what no checkpoint has any more", name=name)
                await self._store.delete(name)
                self._whole.discard(name)
                self._there.discard(name)

    def _wanted(self) -> set[str]:
        return {each.path for each in self._ledger.state.checkpoints.values()}

    async def _put(self, name: str, there: set[str]) -> None:
        there.add(name)
        try:
            await self._store.put(self._folder / name, name)
        except StrataError as error:
            if error.code not in (Code.NOT_FOUND, Code.CORRUPT):
                raise
            # Deleted a moment ago, or damaged. The loop goes on with the others.
            self._useless.add(name)
            _log.warning("a checkpoint was not copied", name=name, reason=str(error))
            return
        self._whole.add(name)
        _log.info("a checkpoint is in the object store", name=name)

    def _is_ours(self, name: str) -> bool:
        """Of a run that there are facts of, imports too. A server that lost its data must not lose the copies."""
        return name.partition("/")[0] in map(run_folder, self._ledger.state.models)

    async def bring(self, name: str) -> None:
        """Before the ranks are told to read it. If it is nowhere, they say so."""
        if (self._folder / name).exists():
            return
        try:
            found = await self._store.fetch(name, self._folder / name, self._beside / name.replace("/", "-"))
        except (StrataError, OSError) as error:
            # UNAVAILABLE is waited for; after anything else an operation that is new fails with these words. The disk
            # may be full here, and that is no reason for this process to end either.
            code, reason = Code.NOT_FOUND, str(error)
            if isinstance(error, StrataError):
                code, reason = Code.UNAVAILABLE if error.code is Code.UNAVAILABLE else code, error.message
            raise StrataError(code, f"cannot bring back {name}: {reason}") from error
        if found:
            _log.info("brought a checkpoint back from the object store", name=name)


def open_storage(settings: ServerSettings, ledger: Ledger) -> Storage | None:
    if not settings.kept.storage:
        return None
    # The client of object stores is an extra of its own: a server without one does without.
    from strata.train.store.objects import open_store

    store = open_store(settings.kept, settings.server.name)
    return Storage(ledger, store, settings.checkpoints, settings.fetched)
