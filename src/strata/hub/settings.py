"""Settings of the hub, section `hub`, with defaults: port 8443, TLS, bucket, webhooks, retention, days that events and
metrics are kept, limits of connections.
"""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.loopback import is_loopback_address
from strata.base.settings import Secret
from strata.database.address import is_postgres
from strata.fleet.artifacts.retention import RetentionPolicy
from strata.fleet.core.lease import LEASE_S
from strata.fleet.core.requirement import SandboxLevel
from strata.fleet.core.reservation import RESERVE_AFTER_S, PreemptPolicy
from strata.http.anonymous import Networks
from strata.http.auth_failures import BURST
from strata.http.root import SEND_S

SECTION: Final = "hub"
SOCKET: Final = "hub.sock"
"""A socket in the data folder: where the hub's own user reaches it."""
PORT: Final = 8443

Positive = Annotated[float, msgspec.Meta(gt=0)]


class HubTlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's authority issues its certificate, unless `certificate` and `key` name PEM files of another one."""

    enabled: bool = False
    """Serve TLS. It is needed beyond loopback."""
    names: tuple[str, ...] = ()
    """DNS names and addresses under which hosts reach this hub; the machine's own name unless set."""
    certificate: Path | None = None
    """The certificate of another authority, PEM."""
    key: Path | None = None
    """The private key of `certificate`, PEM."""


class BucketSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Object storage for artifacts; without it they lie in the data folder."""

    name: str
    """The name of the bucket."""
    prefix: str = ""
    """Put before every key; empty: nothing."""
    endpoint: str = ""
    """URL of a store that is not AWS."""
    region: str = "us-east-1"
    """The region of the bucket."""
    access_key: str
    """The id of the access key."""
    secret_key: Secret
    """The secret of the access key."""


class BackupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Backups that a timer makes with `strata backup`, without a TARGET."""

    folder: Path
    """Where each backup gets a folder of its own, named after its time."""
    keep: Annotated[int, msgspec.Meta(ge=1)] = 7
    """How many complete ones stay; older ones are removed once a new one is complete."""
    max_age_hours: Positive = 30.0
    """When the newest complete one is older, or there is none, the hub needs attention."""

    def __post_init__(self) -> None:
        if not self.folder.expanduser().is_absolute():
            # The hub and the timer's command run in different folders.
            raise StrataError(Code.INVALID, f"hub.backups.folder must be absolute, not {self.folder}")


class Webhook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    """Where events are sent, as POST requests."""
    secret: Secret
    """Signs every delivery."""
    kinds: tuple[str, ...] = ()
    """Kinds of events, or globs of these as in `job.*`; empty: all."""
    allow: tuple[str, ...] = ()
    """Networks that are not public and may be sent to all the same, as in `10.1.0.0/16`; loopback also without TLS."""


class GangCoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator of gangs: `[hub.coordinator]`."""

    address: str
    """HOST:PORT, as the hosts reach it; of several, with commas between, one leads and the others stand by."""
    token_secret: Secret | None = None
    """The coordinator's own: the hub signs tokens with it for the workers of each attempt."""
    ca: Path | None = None
    """The authority of the coordinator's certificate, PEM."""
    token_s: Annotated[float, msgspec.Meta(ge=120)] = 900.0
    """How long a token is good. Hosts renew it with their leases; workers outlive an outage of the hub this long."""
    checkpoint_root: str = ""
    """A folder that all hosts share, or s3://BUCKET/PREFIX, for the checkpoints of gangs. Empty: each program's own."""

    def __post_init__(self) -> None:
        addresses = [each.strip() for each in self.address.split(",") if each.strip()]
        if not addresses:
            raise StrataError(Code.INVALID, "hub.coordinator.address is empty")
        away = [each for each in addresses if not is_loopback_address(each)]
        if away and (self.token_secret is None or self.ca is None):
            raise StrataError(
                Code.INVALID,
                f"workers would reach {away[0]} in the clear, or without tokens",
                hint="set hub.coordinator.token_secret and hub.coordinator.ca",
            )


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    listen: str = f"127.0.0.1:{PORT}"
    """HOST:PORT; port 0 takes a free one."""
    data: Path = Path("strata-hub")
    """The folder for what is not in the database: authority, operator token, logs, artifacts."""
    shared: Path | None = None
    """A folder that all hubs on one PostgreSQL database reach: for what is in `data` otherwise, but the socket."""
    database: str = ""
    """`sqlite:PATH` or `postgresql://…`; `hub.db` in the data folder unless set."""
    tls: HubTlsSettings = HubTlsSettings()
    operator_token: Secret | None = None
    """Unset: the one in `operator.token` of the data folder, which is made at the first start."""
    secrets_key: Path | None = None
    """The file of the key that encrypts secrets of jobs; several hubs on one database need the same. Unset:
    `secrets.key` in the data folder, which is made at the first start."""
    manifest: Path | None = None
    """The file that `strata reload` applies."""
    public_read: bool = False
    """Let anybody who can reach the hub read the lists of jobs and hosts."""
    require_sandbox: dict[str, SandboxLevel] = {}
    """How well a host must confine the jobs of each project, `*` for the others, at least, as in `{"*" = "namespaces",
    trusted = "none"}`."""
    stale_after_s: Positive = LEASE_S
    """A lease that was not renewed for so long may go to another host."""
    reserve_after_s: Annotated[float, msgspec.Meta(ge=0)] = RESERVE_AFTER_S
    """A job that has waited for so long gets a host reserved, which takes no other job until this one fits."""
    preempt: PreemptPolicy = "lower-priority"
    """The running jobs that stop with a checkpoint for one with a reservation: those of lower priority, or none."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    """How long requests may take to finish when the process is told to end."""
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """Connections at once: at most half without credentials or a host's certificate, and an eighth from one address."""
    header_s: Positive = 10.0
    """How long the TLS handshake may take, and the head of a request."""
    body_grace_s: Positive = 20.0
    """How far a body may be behind 4096 bytes per second, which is also its longest pause."""
    send_s: Positive = SEND_S
    """How long a client may take for each piece of a reply."""
    max_failures: Annotated[int, msgspec.Meta(ge=1)] = BURST
    """Requests with bad credentials from one address at once; then 10 a second, and more get 429. Each of several hubs
    counts for itself."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of reverse proxies, as in `10.1.0.0/16`: what they write into `X-Forwarded-For` is the
    address of a client, in events and where failed logins are counted."""
    keep_free_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30
    """Artifacts, logs and metrics leave so much of the disk alone."""
    retention: RetentionPolicy | None = None
    """What to keep of the artifacts, once an hour; unset: all are kept."""
    events_keep_days: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """Events that are older are removed, once an hour; unset: all are kept."""
    metrics_raw_days: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """Metrics of jobs that nothing was added to for so long keep the lowest and the highest value of each minute;
    unset: all are kept."""
    metrics_minute_days: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """Metrics that are older keep only those values of each hour."""
    bucket: BucketSettings | None = None
    coordinator: GangCoordinatorSettings | None = None
    """Unset: jobs with several workers are refused."""
    backups: BackupSettings | None = None
    """Unset: no backups are scheduled, and their age is not watched."""
    webhooks: tuple[Webhook, ...] = ()
    """Each sends events to a URL."""
    log_format: Literal["json", "console"] | None = None
    """Unset: console on a terminal, JSON elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""

    @property
    def files(self) -> Path:
        """The folder of authority, operator token, key of secrets, logs and artifacts."""
        return (self.shared or self.data).expanduser()

    @property
    def socket(self) -> Path:
        return self.data.expanduser().absolute() / SOCKET

    @property
    def scheduled_backups(self) -> BackupSettings | None:
        """INVALID on PostgreSQL."""
        if self.backups is not None and is_postgres(self.database):
            raise StrataError(
                Code.INVALID,
                "hub.backups is for SQLite: a backup of a hub on PostgreSQL does not have its database",
                hint="remove hub.backups, and let the tools of PostgreSQL make and watch its backups",
            )
        return self.backups

    def __post_init__(self) -> None:
        if (self.tls.certificate is None) != (self.tls.key is None):
            raise StrataError(Code.INVALID, "hub.tls.certificate and hub.tls.key go together")
        if self.shared is not None and not is_postgres(self.database):
            raise StrataError(
                Code.INVALID,
                "hub.shared is for several hubs, and a SQLite database serves one",
                hint="set hub.database to postgresql://…, or remove hub.shared",
            )
        try:
            self.proxies  # noqa: B018 (checked when the settings are read)
        except ValueError as error:
            raise StrataError(Code.INVALID, f"hub.trusted_proxies: {error}") from None

    @property
    def proxies(self) -> Networks:
        return tuple(map(ip_network, self.trusted_proxies))


def check_exposure(settings: HubSettings) -> None:
    """Refuse to be reached from other machines in the clear: tokens and jobs would be everybody's."""
    if is_loopback_address(settings.listen) or settings.tls.enabled:
        return
    raise StrataError(
        Code.INVALID,
        f"{settings.listen} can be reached from other machines, and everything would be sent in the clear",
        hint="add --tls (hub.tls.enabled), or listen on 127.0.0.1",
    )
