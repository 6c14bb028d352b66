"""Messages between agent and hub: claims (at most 256), leases, heartbeats (at most 1,024 leases) and verdicts,
publication, completion, failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.fleet.artifacts.manifest import ArtifactId, Word
from strata.fleet.core.amounts import UNKNOWN, Taken
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import JobId, JobSpec, TrainerSpec
from strata.fleet.core.samples import HostSample
from strata.fleet.wire.base import ClaimId, Epoch, ErrorText, HubReply, Message, Prefix, WaitS

MAX_CLAIM: Final = 256
MAX_LEASES: Final = 1024
TLS: Final = "tls://"
"""Begins the address of a server on another machine, which the relay of its agent forwards to."""
PartName = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
BaseModel = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class ClaimRequest(Message, frozen=True, kw_only=True):
    claim_id: ClaimId
    """An id of the sender's choice. Sent again after a lost reply, it gets the same leases and no others."""
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CLAIM)] = 1
    wait_s: WaitS = 0.0


class GangLease(HubReply, frozen=True, kw_only=True):
    """What a member of a gang needs of the coordinator."""

    coordinator: str
    """Its address; of several, with commas between, one leads."""
    job: str
    """What the coordinator calls this run of the gang."""
    ca_pem: str = ""
    """The authority of its certificate; empty for one on this machine."""
    token: str = ""
    """The token of the workers of this member, until `token_s` have passed; empty where none is needed."""
    token_s: float = 0.0
    checkpoint_root: str = ""
    """Where the gang keeps its checkpoints; empty: where the program says."""


class LeaseGiven(HubReply, frozen=True, kw_only=True):
    job_id: JobId
    epoch: Epoch
    """Goes with everything the host says about this attempt."""
    expires_in_s: float
    spec: JobSpec
    trainer: TrainerSpec | None = None
    """The one with the digest that the job carries. None where it is not known: fail the attempt as `setup_error`."""
    checkpoint: Annotated[str, msgspec.Meta(pattern=r"\A(artifact1_[0-9a-f]{64})?\Z")] = ""
    """The artifact to resume from, if there is one."""
    trainer_digest: str = ""
    secrets: dict[str, str] = {}
    """The values of the secrets that the trainer names and the hub has for this job."""
    taken: Taken = UNKNOWN
    """What the attempt has of the host: the cards it may use, and how much of the rest."""
    front_key: str = ""
    """The secret with which the hub forwards the requests of its callers to a server."""
    served_epoch: int = 0
    """The last attempt of a server that has served. State that does not have its work is behind what clients saw."""
    gang: GangLease | None = None
    """Set for a member of a gang."""

    @property
    def resumed(self) -> str:
        """The checkpoint that the job itself reads. That of a server is the state in its data folder."""
        return "" if self.spec.kind == "server" else self.checkpoint


class ClaimReply(HubReply, frozen=True, kw_only=True):
    leases: tuple[LeaseGiven, ...]


class LeaseHeld(Message, frozen=True, kw_only=True, omit_defaults=True):
    job_id: JobId
    epoch: Epoch
    running: bool = False
    """The child runs, not only prepares."""
    renew_token: bool = False
    """The workers of this member of a gang need another token soon. Hubs that know no gangs never see it."""


class PublishRequest(Message, frozen=True, kw_only=True):
    """Where the server of an attempt serves."""

    epoch: Epoch
    address: Annotated[
        str, msgspec.Meta(max_length=1024, pattern=r"\A(unix:/[!-~]+|tls://[0-9A-Za-z.:\[\]-]+:[0-9]{1,5})\Z")
    ]
    """A Unix socket on the hub's machine, or host and port of the relay of an agent on another one."""
    models: Annotated[tuple[BaseModel, ...], msgspec.Meta(max_length=16)]
    """The names of its base model."""


class PartsRequest(Message, frozen=True, kw_only=True):
    """Names the parts of a committed checkpoint that a member of a gang needs, of all members."""

    epoch: Epoch
    parts: Annotated[Mapping[PartName, Prefix], msgspec.Meta(min_length=1, max_length=100_000)]
    """Paths of files in the checkpoint, and their digests (`sha256:…`); one that is empty, or of another kind, is that
    of no file."""


class PartsReply(HubReply, frozen=True, kw_only=True):
    artifacts: tuple[ArtifactId, ...]
    """They have all of these parts together; none if a part is missing."""


class HeartbeatsRequest(Message, frozen=True, kw_only=True):
    leases: Annotated[tuple[LeaseHeld, ...], msgspec.Meta(max_length=MAX_LEASES)] = ()
    sample: HostSample | None = None
    """What the host does; in every second heartbeat or so."""
    incarnation: Word = ""
    """The incarnation of the agent: it names its machine and process, and no other agent has the same."""


class HeartbeatRequest(Message, frozen=True, kw_only=True):
    epoch: Epoch
    running: bool = False


class LeaseVerdict(HubReply, frozen=True, kw_only=True):
    job_id: str
    epoch: int
    verdict: Literal["continue", "stop"]
    reason: str = ""
    """Why to stop, in words."""
    cause: Literal["", "stale", "ended", "unknown"] = ""
    """`stale`: another attempt has begun. `ended`: the job is terminal, cancelled perhaps. `unknown`: no such job."""
    expires_in_s: float = 0.0
    yield_as: Literal["", "cancelled", "preempted"] = ""
    """Asks, with `continue`, to end the attempt for `reason` all the same, save its state, and report it with this
    cause. The lease is held until then, so that no other host starts the job from older state."""
    token: str = ""
    """A token for the workers of a member of a gang, in the place of the one they have."""


class ExecPending(HubReply, frozen=True, kw_only=True):
    """A command that a person wants to run in an attempt of this host."""

    id: str
    job_id: JobId
    epoch: Epoch


class HeartbeatsReply(HubReply, frozen=True, kw_only=True):
    verdicts: tuple[LeaseVerdict, ...]
    execs: tuple[ExecPending, ...] = ()
    """Those that have not ended, also when this host runs them already."""


class CompleteRequest(Message, frozen=True, kw_only=True):
    epoch: Epoch
    artifact: Annotated[str, msgspec.Meta(pattern=r"\A((artifact1_)?[0-9a-f]{64})?\Z")] = ""
    """An artifact, or the SHA-256 under which it was uploaded as a blob; it has to be there."""
    metrics: Annotated[dict[Word, float], msgspec.Meta(max_length=1000)] = {}
    facts: dict[Word, Any] = {}


class FailRequest(Message, frozen=True, kw_only=True):
    epoch: Epoch
    cause: Cause
    error: ErrorText = ""
    facts: dict[Word, Any] = {}
