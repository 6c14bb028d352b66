"""Uploads checkpoints to object storage after they are saved, fetches them when local files are gone, and deletes
copies that nothing refers to.

The manifests in the store say what it has. Nothing about it is journaled: a new leader lists the store, uploads what is
missing, and deletes what no checkpoint refers to.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.core.checkpoint_retention import retained_folders
from strata.train.core.state import run_folder
from strata.train.orchestrator.state_store import StateStore
from strata.train.settings import ServerSettings

if TYPE_CHECKING:
    from strata.train.checkpoints.object_store import CheckpointStore

_log = log.get(__name__)


class CheckpointReplicator:
    def __init__(self, store: StateStore, objects: CheckpointStore, folder: Path, staging: Path) -> None:
        self._store = store
        self._objects = objects
        self._folder = folder
        self._staging = staging
        self._present: set[str] | None = None
        """Checkpoints in the object store, complete or not; None before they were listed."""
        self._complete: set[str] = set()
        self._damaged: set[str] = set()
        """Checkpoints whose local files are damaged: there is nothing to upload."""

    async def run_once(self) -> None:
        if self._present is None:
            self._complete, partial = await self._objects.names()
            self._present = self._complete | partial
        wanted, retained = self._wanted(), retained_folders(self._store.state)
        # After reading the state: facts that are not durable may never be.
        await self._store.wait_durable()
        for name in sorted(wanted - self._complete - self._damaged):
            await self._upload(name, self._present)
        for name in sorted(filter(self._is_ours, self._present - retained)):
            # A later leader may have uploaded one of the same name.
            await self._store.confirm_leadership()
            if name not in retained_folders(self._store.state):
                _log.info("replicated_checkpoint_deleted", name=name)
                await self._objects.delete(name)
                self._complete.discard(name)
                self._present.discard(name)

    def _wanted(self) -> set[str]:
        return {checkpoint.path for checkpoint in self._store.state.checkpoints.values()}

    async def _upload(self, name: str, present: set[str]) -> None:
        present.add(name)
        try:
            await self._objects.put(self._folder / name, name)
        except StrataError as error:
            if error.code not in (Code.NOT_FOUND, Code.CORRUPT):
                raise
            # Deleted a moment ago, or damaged. The loop continues with the others.
            self._damaged.add(name)
            _log.warning("checkpoint_not_replicated", name=name, reason=str(error))
            return
        self._complete.add(name)
        _log.info("checkpoint_replicated", name=name)

    def _is_ours(self, name: str) -> bool:
        """It belongs to a run that the journal knows. A server that lost its data must not lose the replicas too."""
        return name.partition("/")[0] in map(run_folder, self._store.state.models)

    async def fetch(self, name: str) -> None:
        """Bring the files of a checkpoint back before the ranks read it. If they are nowhere, the ranks report it."""
        if (self._folder / name).exists():
            return
        try:
            fetched = await self._objects.fetch(name, self._folder / name, self._staging / name.replace("/", "-"))
        except (StrataError, OSError) as error:
            # UNAVAILABLE is retried; after any other error a new operation fails with this message. A full disk is no
            # reason for this process to end either.
            code, reason = Code.NOT_FOUND, str(error)
            if isinstance(error, StrataError):
                code, reason = Code.UNAVAILABLE if error.code is Code.UNAVAILABLE else code, error.message
            raise StrataError(code, f"cannot bring back {name}: {reason}") from error
        if fetched:
            _log.info("checkpoint_fetched", name=name)


def open_replicator(settings: ServerSettings, store: StateStore) -> CheckpointReplicator | None:
    if not settings.checkpoints.storage:
        return None
    # The object-store client is an optional extra: a server without object storage runs without it.
    from strata.train.checkpoints.object_store import open_store

    objects = open_store(settings.checkpoints, settings.server.name)
    return CheckpointReplicator(store, objects, settings.checkpoint_folder, settings.fetched)
