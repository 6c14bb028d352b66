"""A job of the kind `server` on its host: the folder of its data, the hub's key, and the address that it writes.

The folder outlives the attempts: a server that is started again on this host continues with its journal and its
checkpoints. The process gets everything as settings of `strata serve` (`STRATA_SERVER_…`), so that its own settings
need nothing for the fleet.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet import wire
from strata.fleet.agent.attempt_folder import AttemptPaths, JobUser, make_passable
from strata.fleet.agent.path_names import server_name
from strata.fleet.artifacts.files import Tree, open_regular
from strata.fleet.wire import LeaseGiven

ADDRESS_FILE: Final = "address.json"
KEY_FILE: Final = "front.key"
_MAX_ADDRESS: Final = 16_384


class ServerAddress(msgspec.Struct, frozen=True):
    """What a server writes to STRATA_SERVER_ADDRESS_FILE when it is ready, and again when its address changes."""

    address: str
    """`unix:` and the path of a socket below STRATA_SERVER_DATA."""
    models: tuple[str, ...] = ()
    """The names of its base model."""


def data_folder(work: Path, job_id: str) -> Path:
    return work / "servers" / server_name(job_id)


def prepare_server(lease: LeaseGiven, paths: AttemptPaths, work: Path, job_user: JobUser | None) -> dict[str, str]:
    """Create the folders of a server and its key; the variables that name them."""
    data = data_folder(work, lease.job_id)
    data.parent.mkdir(exist_ok=True)
    make_passable(data.parent)
    data.mkdir(mode=0o700, exist_ok=True)
    paths.server.mkdir(mode=0o700)
    key = paths.server / KEY_FILE
    key.touch(mode=0o600)
    key.write_text(f"{lease.front_key}\n")
    if job_user is not None:
        for path in (data, paths.server, key):
            os.lchown(path, job_user.uid, job_user.gid)
    return {
        "STRATA_SERVER_DATA": str(data),
        "STRATA_SERVER_PORT": "0",
        "STRATA_SERVER_ADDRESS_FILE": str(paths.server / ADDRESS_FILE),
        "STRATA_SERVER_FRONT_KEY_FILE": str(key),
    }


def read_publication(
    lease: LeaseGiven, paths: AttemptPaths, work: Path, *, advertise: str, uid: int | None
) -> wire.PublishRequest | None:
    """Where the server of this attempt serves; None as long as it has not said so.

    `advertise` is the URL of a TLS proxy in front of it, in the place of the address that the server wrote.
    """
    try:
        with open_regular(Tree(paths.folder, (paths.server.name,), uid=uid), ADDRESS_FILE) as file:
            written = msgspec.json.decode(file.read(_MAX_ADDRESS), type=ServerAddress)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StrataError(Code.INVALID, f"the address that the server wrote cannot be read: {error}") from error
    if not advertise:
        _check_address(written.address, data_folder(work, lease.job_id))
    request = {"epoch": lease.epoch, "address": advertise or written.address, "models": written.models}
    try:
        return msgspec.convert(request, wire.PublishRequest)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, f"the hub cannot take the server's address: {error}") from error


def _check_address(address: str, data: Path) -> None:
    """The hub opens what is named here, with more rights than the job has: it must be the job's own."""
    kind, _, path = address.partition(":")
    if kind != "unix" or ".." in path.split("/") or not path.startswith(f"{data}/"):
        raise StrataError(
            Code.INVALID,
            f"a server serves the hub on a Unix socket below {data}, not at {address[:200]!r}",
            hint="or set agent.advertise to the URL of a TLS proxy in front of it",
        )
