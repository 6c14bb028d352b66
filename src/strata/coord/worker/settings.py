"""Settings of a worker, section `worker` (STRATA_WORKER_ADDRESS, STRATA_WORKER_JOB, STRATA_WORKER_ID …) with defaults:
address, rank, `wait_for`, checkpoint root, patience of 300 s.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.settings import Secret

SECTION: Final = "worker"

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files. `certificate` and `key` are for a coordinator that asks its clients for one."""

    ca: Path
    """The authority of the coordinator's certificate."""
    certificate: Path | None = None
    """The certificate of this client."""
    key: Path | None = None
    """The private key of `certificate`."""
    server_name: str | None = None
    """The name in the coordinator's certificate, if it is not that of the address."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    address: str = "127.0.0.1:7070"
    """HOST:PORT of the coordinator; of several, with commas between, one leads and the others stand by."""
    job: str = ""
    """Empty: what the token says, else `default`."""
    id: str = ""
    """A name that survives a restart. Empty: what the token says; without a token, host and process."""
    token: Secret | None = None
    """The token of the job."""
    tls: Tls | None = None
    ip: str = ""
    """Where other workers reach this one."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """The port at which other workers reach this one."""
    gpus: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of GPUs of this worker."""
    weight: PositiveSeconds | None = None
    """Share of the data relative to the others. Unset: the number of GPUs, at least 1."""
    elastic: bool = False
    """Members may come and go: go on in the new generation. Else every change is raised, for all to go back."""
    wait_for: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Join when the generation has so many members, this one counted; with `rank`, exactly so many."""
    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The rank that a launcher gave this worker: it joins when its rank in the generation is the same."""
    torchrun: bool = False
    """Started by torchrun with the backend `strata`, which sets this: `rank` is RANK, `wait_for` is WORLD_SIZE."""
    relay: Path | None = None
    """The Unix socket of the host's relay, which sends the heartbeats of its workers together; `strata gang run` sets
    this. A worker that does not reach it sends its heartbeats itself."""
    drained: Path | None = None
    """A folder where a worker that is drained puts a file with its process id as its name; `strata gang run` sets this,
    and starts one worker fewer from then on."""
    rejoin: bool = False
    """Once evicted, join again as a new incarnation instead of raising."""
    checkpoint_root: str = ""
    """A folder or s3://BUCKET/PREFIX: old parts of checkpoints below it are deleted. Empty: none are."""
    fetched_checkpoints: Path | None = None
    """Where the agent of a fleet puts parts that other hosts wrote; it sets this, and `checkpoint_root` to a folder of
    this host from which it uploads committed checkpoints."""
    patience_s: PositiveSeconds = 300.0
    """How long the coordinator may be unreachable, and how long to wait for the other members at the start."""

    def __post_init__(self) -> None:
        if not self.addresses:
            raise StrataError(Code.INVALID, "the address of the coordinator is empty")
        if self.rank is not None and self.rank >= self.wait_for:
            raise StrataError(Code.INVALID, f"there is no rank {self.rank} of {self.wait_for}", hint="set wait_for")
        if self.fetched_checkpoints is not None and not Path(self.checkpoint_root).is_absolute():
            raise StrataError(Code.INVALID, "fetched_checkpoints needs a folder of this host as checkpoint_root")
        clear = [each for each in self.addresses if not _stays_here(each)]
        if self.token is not None and self.tls is None and clear:
            raise StrataError(
                Code.INVALID,
                f"the token would be sent to {clear[0]} in the clear",
                hint="set worker.tls.ca",
            )

    def expects(self, rank: int, world_size: int) -> bool:
        """Says whether this is the rank that a launcher gave this worker, if one did."""
        return self.rank is None or (rank, world_size) == (self.rank, self.wait_for)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(each.strip() for each in self.address.split(",") if each.strip())

    @property
    def worker_id(self) -> str:
        if self.id or self.token is not None:
            return self.id
        return f"{socket.gethostname()}-{os.getpid()}"


def _stays_here(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return address.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")
