"""A member of a gang on its host: the coordinator's token and its renewal, the command that starts its workers (join
timeout one day), and fetching parts of checkpoints from other hosts.

The token lies in a folder of the agent: the job's user can read it and replace nothing there. Heartbeats renew it, and
workers read the file again when the coordinator rejects the token they have.

Where the hosts share no storage, the agent uploads the checkpoints that are committed (`strata.coord.worker`), and
downloads the parts that a worker names in a file in `.wanted`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from strata.base import log
from strata.base.atomic import write_file
from strata.base.errors import Code, StrataError
from strata.fleet.agent.attempt_folder import AttemptPaths, JobUser, make_passable, remove_folder
from strata.fleet.agent.path_names import PathName, parts_name
from strata.fleet.agent.privsep import run_with_input
from strata.fleet.agent.retry import BACKOFF, ThreadPools, run_in, wait_or_timeout
from strata.fleet.agent.settings import SandboxSettings
from strata.fleet.agent.trainer_source import unpack_request
from strata.fleet.artifacts.files import Tree, open_folder, open_regular
from strata.fleet.client.artifact_transfer import download_as_tar
from strata.fleet.wire.leases import GangLease, LeaseGiven

if TYPE_CHECKING:
    from strata.fleet.agent.prepare import HostContext

TOKEN_FILE: Final = "worker.token"  # noqa: S105 - the name of a file
CA_FILE: Final = "ca.pem"
WANTED: Final = ".wanted"
_MAX_WANTED: Final = 4 << 20
_NO_LIMIT: Final = 2**63 - 1
_NEW_FILE: Final = ".new"
FETCH_EVERY_S: Final = 1.0
JOIN_TIMEOUT_S: Final = 86_400
"""How long a member waits for the least number of others: a host that replaces a lost one may take its time."""
_RUN: Final = "from strata.cli.main import main; main()"
_log = log.get(__name__)


def prepare_member(
    lease: LeaseGiven, paths: AttemptPaths, job_user: JobUser | None, sandbox: SandboxSettings
) -> dict[str, str]:
    """Create the folder with token and authority; the variables that name them."""
    gang = _access(lease)
    if sandbox.mode != "off" and sandbox.network == "none":
        raise StrataError(
            Code.PRECONDITION,
            'agent.sandbox.network = "none" lets no member of a gang reach the others',
            hint='"allow" with the networks of the hosts and of the coordinator, or "host"',
        )
    paths.gang.mkdir(mode=0o700)
    variables = {}
    if gang.ca_pem:
        _write(paths.gang / CA_FILE, gang.ca_pem, job_user)
        variables["STRATA_WORKER_TLS_CA"] = str(paths.gang / CA_FILE)
    if gang.token:
        write_token(paths, gang.token, job_user)
        variables["STRATA_WORKER_TOKEN_FILE"] = str(paths.gang / TOKEN_FILE)
    if gang.checkpoint_root:
        variables["STRATA_WORKER_CHECKPOINT_ROOT"] = f"{gang.checkpoint_root.rstrip('/')}/{gang.job}"
    else:
        variables |= _create_store(paths, job_user)
    if job_user is not None:
        make_passable(paths.gang)
    return variables


def _create_store(paths: AttemptPaths, job_user: JobUser | None) -> dict[str, str]:
    """The folders of checkpoints that this agent uploads and downloads; the variables that name them."""
    paths.fetched.mkdir(mode=0o700)
    paths.parts.mkdir(mode=0o700, parents=True)
    if job_user is not None:
        make_passable(paths.fetched)
        os.lchown(paths.parts, job_user.uid, job_user.gid)
    return {
        "STRATA_WORKER_CHECKPOINT_ROOT": str(paths.parts),
        "STRATA_WORKER_FETCHED_CHECKPOINTS": str(paths.fetched),
    }


class _WantedParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parts: dict[str, str]


def wanted_parts(paths: AttemptPaths, uid: int | None) -> Iterator[tuple[PathName, Mapping[str, str]]]:
    """Yields what the workers wait for: the name of each request, and digests by the names of parts."""
    tree = Tree(paths.folder, (*paths.parts.relative_to(paths.folder).parts, WANTED), uid=uid)
    try:
        with open_folder(tree) as entries:
            files = [entry.name for entry in entries]
    except FileNotFoundError:
        return
    for wanted in files:
        name = parts_name(wanted)
        if name is None or (paths.fetched / name).is_dir():
            continue
        try:
            # A worker that waits no longer removes its file.
            with suppress(FileNotFoundError), open_regular(tree, wanted) as file:
                yield name, msgspec.json.decode(file.read(_MAX_WANTED), type=_WantedParts).parts
        except (OSError, msgspec.DecodeError) as error:
            raise StrataError(Code.INVALID, f"{WANTED}/{wanted} of the gang cannot be read: {error}") from error


def put_fetched(
    paths: AttemptPaths,
    name: PathName,
    artifacts: Sequence[str],
    fetch: Callable[[str], Iterable[bytes]],
    job_user: JobUser | None,
) -> None:
    """Unpack these artifacts into one folder, which appears as a whole. An earlier recovery needs its own no longer."""
    for earlier in paths.fetched.iterdir():
        remove_folder(earlier)
    # While it is there, workers wait longer.
    downloading = paths.fetched / f".{name}"
    downloading.mkdir(mode=0o700)
    if job_user is not None:
        os.lchown(downloading, job_user.uid, job_user.gid)
    try:
        for artifact in artifacts:
            request = unpack_request(downloading, max_bytes=_NO_LIMIT, max_members=_NO_LIMIT)
            run_with_input(request, job_user, fetch(artifact))
    except BaseException:
        remove_folder(downloading)
        raise
    downloading.rename(paths.fetched / name)


class RunningMember:
    """Renews the token of a member whose workers run, and downloads the checkpoints that they wait for."""

    def __init__(self, lease: LeaseGiven, paths: AttemptPaths, host: HostContext, pools: ThreadPools) -> None:
        self._lease = lease
        self._gang = _access(lease)
        self._paths = paths
        self._host = host
        self._pools = pools
        self._token_at_s: float | None = None
        """When this agent renewed the token last."""

    def needs_token(self, now_s: float) -> bool:
        """Says whether the workers need another token soon; the age of theirs is unknown at first."""
        if not self._gang.token:
            return False
        return self._token_at_s is None or now_s - self._token_at_s > self._gang.token_s / 3

    async def renew_token(self, token: str, now_s: float) -> None:
        try:
            await run_in(self._pools.work, write_token, self._paths, token, self._host.job_user)
        except OSError as error:
            # The next heartbeat brings another one.
            _log.warning("token_not_renewed", job=self._lease.job_id, reason=str(error))
            return
        self._token_at_s = now_s

    async def fetch_until(self, ended: asyncio.Event) -> None:
        """Download the parts of checkpoints that the workers wait for, as soon as all members have them uploaded."""
        failures = 0
        while not await wait_or_timeout(ended, BACKOFF.delay_s(failures, 0.5) if failures else FETCH_EVERY_S):
            try:
                await run_in(self._pools.work, self._fetch_parts)
                failures = 0
            except (StrataError, OSError) as error:
                failures += 1
                _log.warning("checkpoint_not_fetched", job=self._lease.job_id, reason=str(error))

    def _fetch_parts(self) -> None:
        hub, lease = self._host.hub, self._lease
        for name, parts in wanted_parts(self._paths, self._host.uid):
            artifacts = hub.find_parts(lease, parts)
            if artifacts:
                put_fetched(self._paths, name, artifacts, partial(download_as_tar, hub), self._host.job_user)
                _log.info("checkpoint_fetched", job=lease.job_id, epoch=lease.epoch, artifacts=len(artifacts))


def write_token(paths: AttemptPaths, token: str, job_user: JobUser | None) -> None:
    """Replace the token, in one step for those who read it."""
    _write(paths.gang / TOKEN_FILE, f"{token}\n", job_user)


def member_command(lease: LeaseGiven, paths: AttemptPaths, command: Sequence[str]) -> list[str]:
    """`python FILE …` as `strata gang run` of the same Python, with the place of this member in its gang."""
    gang, place = _access(lease), lease.spec.gang
    assert place is not None, "only a member of a gang has access to its coordinator"
    python, *program = command
    return [
        # Not with the folder of the trainer in its path: a file there must not take the place of a module of ours.
        *(python, "-P", "-c", _RUN, "gang", "run"),
        *("--coordinator", gang.coordinator, "--job", gang.job),
        *("--nnodes", f"{place.min_size}:{place.size}", "--nproc", str(place.workers_per_host)),
        *("--join-timeout", str(JOIN_TIMEOUT_S), "--finished-ok", "--data", str(paths.tmp / "gang")),
        *("--", *program),
    ]


def _access(lease: LeaseGiven) -> GangLease:
    if lease.gang is None:
        raise StrataError(
            Code.PRECONDITION,
            f"{lease.spec.label} is a member of a gang, and the hub has no coordinator for it",
            hint="set hub.coordinator, and update hub and agent to one version",
        )
    return lease.gang


def _write(path: Path, content: str, job_user: JobUser | None) -> None:
    temporary = path.parent / _NEW_FILE
    write_file(temporary, content.encode(), durable=False)
    if job_user is not None:
        os.lchown(temporary, job_user.uid, job_user.gid)
    temporary.replace(path)
