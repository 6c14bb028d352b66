"""Tells the hub where a `server` job serves, by its socket or through a relay."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.fleet.agent import identity
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.prepare import HostContext
from strata.fleet.agent.retry import ThreadPools, run_in
from strata.fleet.agent.server_job import ADDRESS_FILE, data_folder
from strata.fleet.agent.server_relay import RelayTarget, ServerRelay, own_address
from strata.fleet.artifacts.files import Tree, open_regular
from strata.fleet.wire.leases import LeaseGiven, PublishRequest

_MAX_ADDRESS: Final = 16_384
_log = log.get(__name__)


class ServerAddress(msgspec.Struct, frozen=True):
    """What a server writes to STRATA_SERVER_ADDRESS_FILE when it is ready, and again when its address changes."""

    address: str
    """`unix:` and the path of a socket below STRATA_SERVER_DATA."""
    models: tuple[str, ...] = ()
    """The names of its base model."""


class ServerPublisher:
    """Publishes the server of one attempt while it runs."""

    def __init__(self, lease: LeaseGiven, paths: AttemptPaths, host: HostContext, pools: ThreadPools) -> None:
        self._lease = lease
        self._paths = paths
        self._host = host
        self._pools = pools
        self._published: PublishRequest | None = None
        self._relay: ServerRelay | None = None
        """Relays to a server that the hub reaches from another machine."""
        self._not_published = ""
        """Why the hub has not taken the address, to be logged once."""

    async def publish(self) -> None:
        """Tell the hub where the server serves, once for each address. A hub that is away is told at the next poll."""
        lease, work = self._lease, self._host.settings.work_folder
        try:
            found = await run_in(
                self._pools.work, lambda: read_publication(lease, self._paths, work, uid=self._host.uid)
            )
            if self._relay is not None:
                self._relay.reload()
            if found is None or found == self._published:
                return
            await run_in(self._pools.work, self._host.hub.publish, lease, await self._reachable(found))
        except (StrataError, OSError) as error:
            if str(error) != self._not_published:
                _log.warning("server_not_published", job=lease.job_id, reason=str(error))
            self._not_published = str(error)
            return
        self._published = found
        _log.info("server_published", job=lease.job_id, epoch=lease.epoch, models=list(found.models))

    async def _reachable(self, found: PublishRequest) -> PublishRequest:
        """The same server, at an address that the hub reaches: for one on another machine, that of a relay."""
        settings = self._host.settings
        if self._host.is_local:
            return found
        data = data_folder(settings.work_folder, self._lease.job_id)
        target = RelayTarget(data, found.address.removeprefix(f"unix:{data}/"))
        if self._relay is None or self._relay.target != target:
            files = await run_in(self._pools.work, identity.serving_files, settings.state_folder)
            if files is None:
                raise StrataError(Code.UNAVAILABLE, "the hub has not given this host a certificate for servers yet")
            await self.close()
            url = identity.load_membership(settings.state_folder).url
            host = settings.advertise or await run_in(self._pools.work, own_address, url)
            self._relay = await ServerRelay.open(files, target, host)
        return msgspec.structs.replace(found, address=self._relay.address)

    async def close(self) -> None:
        if self._relay is not None:
            await self._relay.close()
            self._relay = None


def read_publication(lease: LeaseGiven, paths: AttemptPaths, work: Path, *, uid: int | None) -> PublishRequest | None:
    """Returns where the server of this attempt serves on this host; None as long as it has not said so."""
    try:
        with open_regular(Tree(paths.folder, (paths.server.name,), uid=uid), ADDRESS_FILE) as file:
            written = msgspec.json.decode(file.read(_MAX_ADDRESS), type=ServerAddress)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StrataError(Code.INVALID, f"the address that the server wrote cannot be read: {error}") from error
    _check_address(written.address, data_folder(work, lease.job_id))
    request = {"epoch": lease.epoch, "address": written.address, "models": written.models}
    try:
        return msgspec.convert(request, PublishRequest)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, f"the hub cannot take the server's address: {error}") from error


def _check_address(address: str, data: Path) -> None:
    """The hub opens what is named here, with more rights than the job has: it must be the job's own."""
    kind, _, path = address.partition(":")
    if kind != "unix" or ".." in path.split("/") or not path.startswith(f"{data}/"):
        raise StrataError(
            Code.INVALID, f"a server serves the hub on a Unix socket below {data}, not at {address[:200]!r}"
        )
