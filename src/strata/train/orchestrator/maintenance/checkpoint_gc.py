"""Deletes checkpoint files that no fact and no replay refers to, and puts imported ones in place.

There is no list of files to remove. A sweep compares the folder with the state. One that was interrupted is simply run
again, and it also removes what overwritten, failed and replayed saves have left.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, get_args

from strata.base import log
from strata.base.atomic import exchange_folders, sync_folder
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.checkpoints import checkpoint
from strata.train.core import ops
from strata.train.core.checkpoint_retention import retained_folders
from strata.train.core.client_commands import ImportCheckpoint
from strata.train.core.inputs import ClientCommand, Decision, DeleteExpiredCheckpoints
from strata.train.core.state import IMPORTED, TrainState, folder_of, is_name, run_folder
from strata.train.orchestrator.state_store import StateStore
from strata.train.settings import ServerSettings

KINDS: Final = get_args(ops.WeightsKind)
_log = log.get(__name__)


class CheckpointGc:
    def __init__(self, store: StateStore, settings: ServerSettings) -> None:
        self._store = store
        self._folder = settings.checkpoint_folder
        self._imports = settings.imports
        self._staged = settings.staged
        self._arriving: set[str] = set()
        """Folders of imports that are in place, or on the way there, and not in the journal yet."""
        self._importing = asyncio.Lock()

    async def run_once(self) -> None:
        await self.delete_expired()
        await self.sweep()

    async def delete_expired(self) -> None:
        """Delete checkpoints beyond their TTL or in excess. A request that reads checkpoints after this sees none."""
        decision = await self._store.commit(DeleteExpiredCheckpoints(self._store.clock.wall_s()))
        for folder in decision.deleted_folders:
            failpoint("train.orchestrator.checkpoint_let_go")
            await self.remove(folder)

    async def sweep(self) -> None:
        """Remove every unneeded folder, unless a replay runs: its ranks may load a checkpoint that they just saved."""
        if not self._store.replayed or not self._folder.exists():
            return
        folders = await asyncio.to_thread(lambda: list(_candidates(self._folder)))
        runs = {run_folder(model_id) for model_id in self._store.state.models}
        # A folder of an unknown run was put there by hand, and stays.
        candidates = ((folder, folder.partition("/")[0]) for folder in folders)
        await self.remove(*(folder for folder, run in candidates if run in runs or run.startswith(IMPORTED)))

    async def remove(self, *folders: str) -> None:
        """Remove those of the folders that nothing needs.

        A later leader may have saved a checkpoint of the same name, and a fact that is not durable may never be. So
        leadership is confirmed after the folders were listed and checked, they are checked once more, and they are
        renamed before anything else happens.
        """
        unneeded = self._unneeded(folders)
        if not unneeded:
            return
        await self._store.confirm_leadership()
        renamed: list[Path] = []
        for folder in self._unneeded(unneeded):
            doomed = _rename_for_removal(self._folder / folder)
            failpoint("train.orchestrator.checkpoint_out_of_place")
            if doomed is not None:
                _log.info("checkpoint_files_removed", folder=folder)
                renamed.append(doomed)
        for doomed in renamed:
            await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)

    def _unneeded(self, folders: Sequence[str]) -> list[str]:
        # Most commands delete nothing, and what is retained takes a look at every checkpoint.
        if not folders or not self._store.replayed:
            return []
        state = self._store.state
        retained = retained_folders(state) | self._arriving
        return [folder for folder in folders if folder not in retained and not _is_being_saved(state, folder)]

    async def import_checkpoint(self, tenant: str, command: ImportCheckpoint) -> Decision:
        """Make a checkpoint of uploaded files. Idempotent: the same again is the same checkpoint."""
        if not all(map(is_name, (command.import_id, command.run_id, command.name))):
            raise StrataError(Code.INVALID, f"{command.name!r} cannot name a checkpoint: use letters, digits and . _ -")
        target = folder_of(command.save())
        parent, _, name = target.rpartition("/")
        temporary = f"{parent}/.{name}.{command.import_id}.arriving"
        staged = self._imports / command.import_id / self._staged
        # One at a time: a client may retry a request that is still running.
        async with self._importing:
            self._arriving |= {target, temporary}
            try:
                await asyncio.to_thread(_put_in_place, staged, self._folder / temporary, self._folder / target)
                failpoint("train.orchestrator.import_in_place")
                return await self._store.commit(ClientCommand(tenant, command, self._store.clock.wall_s()))
            finally:
                self._arriving -= {target, temporary}


def _rename_for_removal(folder: Path) -> Path | None:
    """The new path. Under its own name a checkpoint is whole or absent, even if its removal is interrupted."""
    if folder.name.startswith("."):
        return folder
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.gone")
    try:
        return folder.rename(doomed)
    except OSError as error:
        _log.warning("checkpoint_files_not_removed", folder=str(folder), reason=str(error))
        return None


def _candidates(parent: Path) -> Iterator[str]:
    """Every folder in the place of a checkpoint, half written and half removed ones too."""
    for run in sorted(parent.iterdir()):
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield from (f"{run.name}/{kind}/{path.name}" for path in (run / kind).iterdir())


def _is_being_saved(state: TrainState, folder: str) -> bool:
    """A rank may be writing it at this moment."""
    parent, _, name = folder.rpartition("/")
    paths = [saved.path for saved in state.saving.values()] + [each.path for each in state.dispatches.values()]
    saving = (path.rpartition("/") for path in paths)
    return any(saving_parent == parent and name.startswith(f".{own}.") for saving_parent, _, own in saving)


def _put_in_place(staged: Path, temporary: Path, target: Path) -> None:
    """Verify the files and rename them into place, durably. An existing target has the same digest in its name."""
    if not _is_whole(target):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The API server may remove its staged files after a timeout: they are verified where it cannot.
        with contextlib.suppress(FileNotFoundError):
            staged.rename(temporary)
        try:
            checkpoint.read(temporary)
            failpoint("train.orchestrator.import_checked")
            if target.exists():
                exchange_folders(temporary, target)
            else:
                temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    for parent in target.parents[:4]:
        sync_folder(parent)


def _is_whole(folder: Path) -> bool:
    try:
        checkpoint.read(folder)
    except StrataError:
        return False
    return True
