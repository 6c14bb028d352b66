"""The queries of clients as types: futures, samples, models, sessions, checkpoints, status, curves, rollouts, usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strata.train.core.client_commands import FutureRequest, Request, SavedCheckpointRequest, SessionRequest
from strata.train.status.rollouts import RolloutFilter


class SamplerRequest(Request, frozen=True):
    sampler_id: str

    @property
    def subject(self) -> str | None:
        return self.sampler_id


class SessionHeartbeat(SessionRequest, frozen=True, tag="beat_session"):
    """The client is alive. Every request that names a session says so; this one says nothing else."""


class ModelRequest(Request, frozen=True):
    model_id: str

    @property
    def subject(self) -> str | None:
        return self.model_id


class WatchFuture(FutureRequest, frozen=True, tag="watch_future"):
    """The result when it is there, or the queue position when `wait_s` are over."""

    wait_s: float


class WatchTokens(FutureRequest, frozen=True, tag="watch_tokens"):
    """Asks as `WatchFuture` does, or before that for the tokens of a streamed sample beyond those that the client
    has."""

    counts: Sequence[int]
    """How many tokens the client has of each sample of the request."""
    wait_s: float


class WatchSamples(SamplerRequest, frozen=True, tag="watch_samples"):
    """The samples of this sampler that ended after the cursor, as soon as there is one, or after `wait_s`."""

    copy: int
    """The id of the client: each numbers its requests in a block of its own."""
    cursor: int
    """The cursor of the last response; 0 is the beginning."""
    wait_s: float
    linger: bool = True
    """Wait even if nothing is open that could end."""


class DescribeModel(ModelRequest, frozen=True, tag="describe_model"):
    pass


class DescribeCustomLoss(Request, frozen=True, tag="describe_custom_loss"):
    loss_id: str

    @property
    def subject(self) -> str | None:
        return self.loss_id


class DescribeSampler(SamplerRequest, frozen=True, tag="describe_sampler"):
    pass


class JoinSampler(SamplerRequest, frozen=True, tag="join_sampler"):
    """Issue an id to another client of this sampler."""


class ListModels(Request, frozen=True, tag="list_models"):
    """Lists models of this tenant."""


class ListSessions(Request, frozen=True, tag="list_sessions"):
    """Lists sessions of this tenant, all or the one that is named."""

    session_id: str | None = None

    @property
    def subject(self) -> str | None:
        return self.session_id


class ListCheckpoints(Request, frozen=True, tag="list_checkpoints"):
    """Lists checkpoints of one model, or of all models of this tenant."""

    model_id: str | None = None

    @property
    def subject(self) -> str | None:
        return self.model_id


class DescribeCheckpoint(SavedCheckpointRequest, frozen=True, tag="describe_checkpoint"):
    """Describes a checkpoint of this tenant, or a public one."""


class ListResults(ModelRequest, frozen=True, tag="list_results"):
    """Lists results of the passes and steps of one model that ended and whose results are kept, in their order."""

    after: int
    """The sequence number of the last one that is known."""
    limit: int


class DescribeServer(Request, frozen=True, tag="describe_server"):
    pass


class CheckHealth(Request, frozen=True, tag="check_health"):
    """Checks the way through the orchestrator to every rank and back."""


class ListEndpoints(Request, frozen=True, tag="list_endpoints"):
    """Every endpoint is asked which versions it has."""


class DescribeStatus(Request, frozen=True, tag="describe_status"):
    everything: bool
    """All tenants by name."""


class DescribeTimeline(FutureRequest, frozen=True, tag="describe_timeline"):
    pass


class ListTimelines(Request, frozen=True, tag="list_timelines"):
    """Lists timelines of all tenants; or of one session of this tenant."""

    session_id: str = ""
    """Empty: of all tenants."""


class ReadMetrics(Request, frozen=True, tag="read_metrics"):
    everything: bool


class DescribeActivity(Request, frozen=True, tag="describe_activity"):
    everything: bool
    operations: int


class ReportMetrics(ModelRequest, frozen=True, tag="report_metrics"):
    """What the client of a model measured, for the curves of the next step. In memory only, and so no command."""

    seq_id: int
    """They belong to the first optimizer step from this number on."""
    values: Mapping[str, float]


class ReadThroughput(Request, frozen=True, tag="read_throughput"):
    """Reads the throughput of the last hour."""


class ReadUsage(Request, frozen=True, tag="read_usage"):
    """Reads the usage of this tenant, in the hours that begin in this window."""

    from_s: float
    until_s: float


class ReadCurves(Request, frozen=True, tag="read_curves"):
    """The metrics of a model over its steps."""

    model_id: str
    everything: bool
    """Also of another tenant."""
    points: int
    names: Sequence[str] = ()
    """Names of the metrics; empty for all."""


class ListRollouts(Request, frozen=True, tag="list_rollouts"):
    """The kept rollouts of the caller that match a filter."""

    chosen: RolloutFilter
    limit: int


class ReadRollout(Request, frozen=True, tag="read_rollout"):
    """A kept rollout of the caller, and its neighbours among those that match a filter."""

    rollout_id: str
    chosen: RolloutFilter


Query = (
    SessionHeartbeat
    | WatchFuture
    | WatchTokens
    | WatchSamples
    | DescribeModel
    | DescribeCustomLoss
    | DescribeSampler
    | JoinSampler
    | ListModels
    | ListSessions
    | ListCheckpoints
    | DescribeCheckpoint
    | ListResults
    | DescribeServer
    | CheckHealth
    | ListEndpoints
    | DescribeStatus
    | DescribeTimeline
    | ListTimelines
    | ReadMetrics
    | DescribeActivity
    | ReportMetrics
    | ReadThroughput
    | ReadUsage
    | ReadCurves
    | ListRollouts
    | ReadRollout
)
