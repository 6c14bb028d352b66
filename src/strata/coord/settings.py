"""Settings of the coordinator process, section `coordinator`, with defaults (address, database, partitions, leader
lease, snapshots, TLS), and checks that an exposed one is secured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.loopback import is_loopback_address
from strata.base.settings import Secret
from strata.coord.core.job_config import JobConfig
from strata.database.address import is_postgres

SECTION: Final = "coordinator"

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class ServerTls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files. With `client_ca` only clients with a certificate of that authority may connect; a token says which job
    and role they have."""

    certificate: Path
    """The certificate of this coordinator. It is needed beyond loopback."""
    key: Path
    """The private key of `certificate`."""
    client_ca: Path | None = None
    """The authority of clients' certificates; unset: clients need none."""
    ca: Path | None = None
    """The authority of the certificates of all coordinators; needed with several partitions, where they call each other
    with their own certificates."""


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    listen: str = "127.0.0.1:7070"
    """HOST:PORT; port 0 takes a free one."""
    database: str = "sqlite:coord.db"
    """The journal: `sqlite:PATH` or `postgresql://…`."""
    stream: str = "coord/0"
    """The name of the coordinator's stream in the journal."""
    partitions: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """All jobs are divided into so many parts, each with a leader of its own. The number is stored with the first start
    and cannot be changed. More than 1 needs PostgreSQL."""
    advertise: str = ""
    """HOST:PORT at which the other coordinators reach this one, with several partitions; empty: as `listen`."""
    lease_s: PositiveSeconds = 2.0
    """A standby takes over this long after the leader was last heard from, at the latest."""
    snapshot_every: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    """Facts between two snapshots."""
    metrics_listen: str = ""
    """HOST:PORT of `GET /metrics` for Prometheus; empty: there is none. It takes the token of an operator, and has the
    certificate of `tls`."""
    ping_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 15.0
    """A connection whose peer answers no ping for so long is broken: its process is frozen, or its machine is gone. A
    machine that stands still for less keeps its workers."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    """How long calls may take to finish when the process is told to end."""
    tls: ServerTls | None = None
    token_secret: Secret | None = None
    """Signs the tokens of jobs. Without it no call needs a token, which only a loopback address allows."""
    revoked_tokens: Path | None = None
    """A file with the ids of tokens that are refused before they expire, one on a line; read again when it changes."""
    backups: Path | None = None
    """The folder in which `strata backup` requests copies of the journal, which must be SQLite; `strata up` sets it."""
    log_format: Literal["json", "console"] | None = None
    """Unset: console on a terminal, JSON elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""
    job: JobConfig = JobConfig()
    """Settings of jobs that their first worker creates."""


def check_exposure(settings: CoordinatorSettings) -> None:
    """Reject an address that other machines reach in the clear, or without tokens."""
    advertise = settings.advertise if settings.partitions > 1 else ""
    for listen in filter(None, (settings.listen, settings.metrics_listen, advertise)):
        _check_address(settings, listen)


def check_partitioned(settings: CoordinatorSettings) -> None:
    """Reject settings with which several processes cannot share the jobs."""
    if settings.partitions == 1:
        return
    if not is_postgres(settings.database):
        raise StrataError(
            Code.INVALID,
            f"{settings.partitions} partitions need PostgreSQL: one process alone can use a SQLite database",
            hint="set coordinator.database to postgresql://…, or leave coordinator.partitions at 1",
        )
    host = settings.listen.rpartition(":")[0]
    if not settings.advertise and host in ("", "0.0.0.0", "[::]", "::"):  # noqa: S104 - compared, not bound
        raise StrataError(
            Code.INVALID,
            f"the other coordinators cannot reach this one at {settings.listen}",
            hint="set coordinator.advertise to the HOST:PORT at which they can",
        )
    if settings.tls is not None and settings.tls.ca is None:
        raise StrataError(
            Code.INVALID,
            "coordinators with several partitions call each other, and cannot check each other's certificates",
            hint="set coordinator.tls.ca to the authority that issued them",
        )


def _check_address(settings: CoordinatorSettings, listen: str) -> None:
    if is_loopback_address(listen):
        return
    if settings.tls is None:
        raise StrataError(
            Code.INVALID,
            f"{listen} can be reached from other machines, and everything would be sent in the clear",
            hint="set coordinator.tls.certificate and coordinator.tls.key, or listen on 127.0.0.1",
        )
    if settings.token_secret is None:
        raise StrataError(
            Code.INVALID,
            f"{listen} can be reached from other machines, and every caller would be operator of all jobs",
            hint="set coordinator.token_secret; a client certificate (tls.client_ca) names no job and no role",
        )
