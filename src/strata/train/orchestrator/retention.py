"""The files of checkpoints follow the facts: what no fact and no replay can ask for is removed, imports come in.

There is no list of what is to be removed. A sweep compares the folder with the state, so one that was broken off,
by whatever, is simply done again, and takes with it what overwritten, failed and replayed saves have left.
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
from strata.train.core import inputs, messages, ops
from strata.train.core.retention import kept_folders
from strata.train.core.state import IMPORTED, TrainState, folder_of, is_name, run_folder
from strata.train.orchestrator.ledger import Ledger
from strata.train.settings import ServerSettings

KINDS: Final = get_args(ops.WeightsKind)
_log = log.get(__name__)


class Retention:
    def __init__(self, ledger: Ledger, settings: ServerSettings) -> None:
        self._ledger = ledger
        self._folder = settings.checkpoints
        self._imports = settings.imports
        self._staged = settings.staged
        self._arriving: set[str] = set()
        """Folders of imports that are in place, or on the way there, and not in the journal yet."""
        self._importing = asyncio.Lock()

    async def run_once(self) -> None:
        await self.retain()
        await self.sweep()

    async def retain(self) -> None:
        """Whoever looks at checkpoints after this sees none whose time is over."""
        outcome = await self._ledger.commit(inputs.Retain(self._ledger.clock.wall_s()))
        assert isinstance(outcome.reply, inputs.Retained)
        for folder in outcome.reply.gone:
            failpoint("train.orchestrator.checkpoint_let_go")
            await self.remove(folder)

    async def sweep(self) -> None:
        """Ranks that catch up may find a checkpoint and load it a moment later: then nothing is touched."""
        if not self._ledger.caught_up or not self._folder.exists():
            return
        found = await asyncio.to_thread(lambda: list(_candidates(self._folder)))
        known = {run_folder(model_id) for model_id in self._ledger.state.models}
        # One that nobody here ever heard of was put there by hand, and stays.
        ours = ((each, each.partition("/")[0]) for each in found)
        await self.remove(*(each for each, run in ours if run in known or run.startswith(IMPORTED)))

    async def remove(self, *found: str) -> None:
        """Those of them, all seen before, that nothing needs.

        Whoever leads after us may have saved one of the same name, and what is not durable may never have been. So it
        is confirmed that we lead, after they were seen and judged, and they are out of place before anything else is
        done. A moment before, there was perhaps no save of it, or other ranks: each is judged once more.
        """
        unneeded = self._unneeded(found)
        if not unneeded:
            return
        await self._ledger.confirm()
        gone: list[Path] = []
        for each in self._unneeded(unneeded):
            aside = _out_of_place(self._folder / each)
            failpoint("train.orchestrator.checkpoint_out_of_place")
            if aside is not None:
                _log.info("removing files that no checkpoint has any more", folder=each)
                gone.append(aside)
        for aside in gone:
            await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)

    def _unneeded(self, found: Sequence[str]) -> list[str]:
        if not self._ledger.caught_up:
            return []
        state = self._ledger.state
        kept = kept_folders(state) | self._arriving
        return [each for each in found if each not in kept and not _is_being_saved(state, each)]

    async def take(self, tenant: str, asked: messages.ImportCheckpoint) -> None:
        """Make a checkpoint of what was uploaded. The same again is the same checkpoint."""
        if not all(map(is_name, (asked.import_id, asked.run_id, asked.name))):
            raise StrataError(Code.INVALID, f"{asked.name!r} cannot name a checkpoint: use letters, digits and . _ -")
        create = ops.CreateModel(asked.run_id, asked.base_model, asked.lora)
        operation = ops.SaveWeights(
            asked.run_id, 0, "weights", asked.name, ttl_s=asked.ttl_s, user_metadata=asked.user_metadata
        )
        place = folder_of(operation)
        above, _, name = place.rpartition("/")
        beside = f"{above}/.{name}.{asked.import_id}.arriving"
        staged = self._imports / asked.import_id / self._staged
        # One after the other: a question may be asked again while it is answered.
        async with self._importing:
            self._arriving |= {place, beside}
            try:
                await asyncio.to_thread(_put_in_place, staged, self._folder / beside, self._folder / place)
                failpoint("train.orchestrator.import_in_place")
                given = inputs.ImportCheckpoint(tenant, create, operation, self._ledger.clock.wall_s())
                await self._ledger.commit(given)
            finally:
                self._arriving -= {place, beside}


def _out_of_place(folder: Path) -> Path | None:
    """Where it is now. At its place it is whole or not there at all, even if its removal is broken off."""
    if folder.name.startswith("."):
        return folder
    gone = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.gone")
    try:
        return folder.rename(gone)
    except OSError as error:
        _log.warning("the files of a checkpoint were not removed", folder=str(folder), reason=str(error))
        return None


def _candidates(folder: Path) -> Iterator[str]:
    """Everything that lies where checkpoints lie, also what is half written or half removed."""
    for run in sorted(folder.iterdir()):
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield from (f"{run.name}/{kind}/{each.name}" for each in (run / kind).iterdir())


def _is_being_saved(state: TrainState, found: str) -> bool:
    """A rank may be writing it at this moment."""
    above, _, name = found.rpartition("/")
    saving = (each.path.rpartition("/") for each in state.saving.values())
    return any(parent == above and name.startswith(f".{own}.") for parent, _, own in saving)


def _put_in_place(staged: Path, beside: Path, place: Path) -> None:
    """Whole, checked and on the disk. What is there already has the same digest in its name, and must be whole too."""
    if not _is_whole(place):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Out of the reach of whoever staged it and tires of waiting: it is checked where nobody takes files away.
        with contextlib.suppress(FileNotFoundError):
            staged.rename(beside)
        try:
            checkpoint.read(beside)
            failpoint("train.orchestrator.import_checked")
            if place.exists():
                exchange_folders(beside, place)
            else:
                beside.rename(place)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    for above in place.parents[:4]:
        sync_folder(above)


def _is_whole(folder: Path) -> bool:
    try:
        checkpoint.read(folder)
    except StrataError:
        return False
    return True
