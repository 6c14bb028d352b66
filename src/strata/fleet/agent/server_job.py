"""A `server` job on its host: the data folder that outlives attempts, its ownership file, restoring and sealing copies,
the front key, and the names of these files.

The folder outlives the attempts: a server that is started again on this host continues with its journal and its
checkpoints. Copies of it come home to the hub, made by the server while it runs and by the agent when it has ended, so
that it can continue on another host. Every folder and every copy says whose work it has: an attempt continues with
what the last attempt that has served left behind, or its clients learn what was lost.

The process gets everything as settings of `strata serve` (`STRATA_SERVER_…`), so that its own settings need nothing for
the fleet.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from strata.base.atomic import write_file
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.attempt_folder import AttemptPaths, JobUser, make_passable, remove_folder
from strata.fleet.agent.path_names import artifact_id, server_name
from strata.fleet.agent.privsep import run_with_input
from strata.fleet.agent.privsep_worker import UnpackArchive
from strata.fleet.artifacts.files import Tree, open_regular
from strata.fleet.wire.leases import LeaseGiven

ADDRESS_FILE: Final = "address.json"
KEY_FILE: Final = "front.key"
STATE_FILE: Final = "fleet.json"
COPIES: Final = "copies"
"""A folder in the data folder: consistent copies of it that the server makes while it runs. They are named like
checkpoints."""
_MAX_STATE: Final = 65_536
_NO_LIMIT: Final = 2**63 - 1


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """`fleet.json` in the data folder, and so in every copy of it: whose work it has."""

    epochs: tuple[int, ...] = ()
    """The attempts that worked on it one after the other, from the one on that had served last."""
    ended: bool = False
    """The last of them has ended, so nothing of its work is missing."""
    lost: str = ""
    """What a host took with it that was lost before, in words; clients may still ask for it."""

    def continues(self, served_epoch: int) -> bool:
        """Says whether it has the work of the attempt that has served last. One that never served told nobody
        anything."""
        return not served_epoch or served_epoch in self.epochs


@dataclass(frozen=True, slots=True)
class StateSource:
    """Where the state of a server comes from that is not on this host."""

    fetch: Callable[[str], Iterable[bytes]]
    """An artifact as a tar file."""
    describe: Callable[[str], str]
    """When it was made, for people."""


def data_folder(work: Path, job_id: str) -> Path:
    return work / "servers" / server_name(job_id)


def data_tree(work: Path, job_id: str, uid: int | None) -> Tree:
    return Tree(work, ("servers", server_name(job_id)), uid=uid)


def prepare_server(
    lease: LeaseGiven, paths: AttemptPaths, work: Path, job_user: JobUser | None, source: StateSource
) -> dict[str, str]:
    """Create the folders of a server, with its state, and its key; the variables that name them."""
    data = data_folder(work, lease.job_id)
    data.parent.mkdir(exist_ok=True)
    make_passable(data.parent)
    state = _provide_state(lease, work, job_user, source)
    paths.server.mkdir(mode=0o700)
    key = paths.server / KEY_FILE
    key.touch(mode=0o600)
    key.write_text(f"{lease.front_key}\n")
    for path in (paths.server, key):
        _give(path, job_user)
    return {
        "STRATA_SERVER_DATA": str(data),
        "STRATA_SERVER_PORT": "0",
        "STRATA_SERVER_ADDRESS_FILE": str(paths.server / ADDRESS_FILE),
        "STRATA_SERVER_FRONT_KEY_FILE": str(key),
        **({"STRATA_SERVER_LOST": state.lost} if state.lost else {}),
    }


def _provide_state(lease: LeaseGiven, work: Path, job_user: JobUser | None, source: StateSource) -> ServerState:
    """The state in the data folder: what is there if it is the newest, else that of the last copy."""
    data, uid = data_folder(work, lease.job_id), None if job_user is None else job_user.uid
    state = _read_state(Tree(work, ("servers", data.name), uid=uid))
    if state is None or not state.continues(lease.served_epoch):
        state = _restore(lease, data, job_user, source)
    # Of an attempt that ended without being saved; its name may come again.
    shutil.rmtree(data / COPIES, ignore_errors=True)
    epochs = (*(epoch for epoch in state.epochs if epoch >= lease.served_epoch and epoch != lease.epoch), lease.epoch)
    state = msgspec.structs.replace(state, epochs=epochs, ended=False)
    _write_state(data, state, job_user)
    return state


def _restore(lease: LeaseGiven, data: Path, job_user: JobUser | None, source: StateSource) -> ServerState:
    """Replace the data folder by the last copy, or by an empty one. The old one is stale: it never serves again."""
    restored = data.with_name(f"{data.name}.restored")
    remove_folder(restored)
    restored.mkdir(mode=0o700)
    _give(restored, job_user)
    if lease.checkpoint:
        archive = source.fetch(artifact_id(lease.checkpoint))
        request = UnpackArchive(target=str(restored), max_bytes=_NO_LIMIT, max_members=_NO_LIMIT, private=True)
        run_with_input(request, job_user, archive)
    uid = None if job_user is None else job_user.uid
    state = _read_state(Tree(restored.parent, (restored.name,), uid=uid)) or ServerState()
    if lease.served_epoch and not (state.ended and state.continues(lease.served_epoch)):
        copy = "without a copy: what it had is lost"
        if lease.checkpoint:
            copy = f"from a copy of {source.describe(lease.checkpoint)}: what is newer is lost"
        state = msgspec.structs.replace(state, lost=f"this server continues on another host {copy}")
    failpoint("agent.server.restored")
    remove_folder(data)
    restored.rename(data)
    return state


def seal_state(lease: LeaseGiven, work: Path, job_user: JobUser | None) -> bool:
    """Says in the data folder that the process has ended. False if there is no state of this attempt."""
    uid = None if job_user is None else job_user.uid
    state = _read_state(data_tree(work, lease.job_id, uid))
    if state is None or lease.epoch not in state.epochs:
        return False
    data = data_folder(work, lease.job_id)
    shutil.rmtree(data / COPIES, ignore_errors=True)
    _write_state(data, msgspec.structs.replace(state, ended=True), job_user)
    return True


def _read_state(tree: Tree) -> ServerState | None:
    """None if there is none; INVALID if the job has put something else there."""
    try:
        with open_regular(tree, STATE_FILE) as file:
            return msgspec.json.decode(file.read(_MAX_STATE), type=ServerState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StrataError(Code.INVALID, f"{STATE_FILE} of the server cannot be read: {error}") from error


def _write_state(data: Path, state: ServerState, job_user: JobUser | None) -> None:
    write_file(data / STATE_FILE, msgspec.json.encode(state))
    _give(data / STATE_FILE, job_user)


def _give(path: Path, job_user: JobUser | None) -> None:
    if job_user is not None:
        os.lchown(path, job_user.uid, job_user.gid)
