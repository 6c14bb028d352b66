"""The coordinator's metrics for Prometheus. Names are `strata_coordinator_…`; none has a label with names of jobs.

Counters restart with the process, and only the leader counts. Nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import Counter, generate_latest

from strata.coord.core.facts import (
    BarrierDecided,
    BarrierVerdict,
    CheckpointCommitted,
    Fact,
    GangStatus,
    GenerationFormed,
    Recovered,
    ShardAcked,
    ShardReturned,
    ShardsGranted,
    StragglerFinding,
    WorkerJoined,
    WorkerJudged,
    WorkerLost,
)
from strata.coord.core.state import CoordState
from strata.http.metrics import MetricFactory, process_registry

PREFIX: Final = "strata_coordinator_"
RecordRpc = Callable[[str, float], None]
"""Called with the status of a reply, and the seconds it took."""


class CoordinatorMetrics:
    def __init__(self) -> None:
        self._registry = registry = process_registry(PREFIX)
        make = MetricFactory(PREFIX, registry)
        counter, gauge, histogram = make.counter, make.gauge, make.histogram
        self._rpcs = counter("rpcs_total", "Calls that were let in, by the status of their reply", "rpc", "status")
        self._rpc_s = histogram("rpc_seconds", "Time until the reply, with what the call waits; without streams", "rpc")
        self.heartbeats = counter("heartbeats_total", "Heartbeats of workers, each of a batch counted")
        self.journal_s = histogram("journal_seconds", "From a decision until its facts were durable")
        self._barriers = counter("barriers_total", "Barriers that ended, by verdict", "verdict")
        self._lost = counter("worker_losses_total", "Workers that are no members any more, by reason", "reason")
        joined = counter("worker_joins_total", "Workers that joined")
        generations = counter("generations_total", "Generations that formed")
        checkpoints = counter("checkpoints_total", "Checkpoints that all ranks had reported")
        recoveries = counter("recoveries_total", "Times that a job went back to a checkpoint or to its beginning")
        self._granted = counter("shards_granted_total", "Shards that were leased to workers")
        acked = counter("shards_acked_total", "Shards that workers acknowledged")
        returned = counter("shards_returned_total", "Shards that were returned unread or put aside")
        self._judged = counter("straggler_findings_total", "Workers that were judged anew, by finding", "finding")
        self._leader = gauge("leader", "1 while this process leads, else 0")
        self._epoch = gauge("leader_epoch", "The epoch that this process leads under; 0 if it does not lead")
        self._jobs = gauge("jobs", "Jobs, by status", "status")
        self._workers = gauge("workers", "Members of all jobs")
        self._open_barriers = gauge("barriers_open", "Barriers at which workers wait")
        self._by_fact: dict[type[Fact], Counter] = {
            WorkerJoined: joined,
            GenerationFormed: generations,
            CheckpointCommitted: checkpoints,
            Recovered: recoveries,
            ShardAcked: acked,
            ShardReturned: returned,
        }
        """Facts that are counted one by one."""
        self._verdicts = {each: self._barriers.labels(each.name.lower()) for each in BarrierVerdict}
        self._findings = {each: self._judged.labels(each.value) for each in StragglerFinding}
        self._reasons = {each: self._lost.labels(each) for each in ("left", "replaced", "evicted")}

    def rpc(self, name: str, *, stream: bool) -> RecordRpc:
        """What records the calls of this name."""
        statuses: dict[str, Counter] = {}
        seconds = self._rpc_s.labels(name)

        def record(status: str, took_s: float) -> None:
            counted = statuses.get(status)
            if counted is None:
                counted = statuses[status] = self._rpcs.labels(name, status)
            counted.inc()
            if not stream:
                seconds.observe(took_s)

        return record

    def record_fact(self, fact: Fact) -> None:
        """A fact is committed."""
        counted = self._by_fact.get(type(fact))
        if counted is not None:
            counted.inc()
            return
        match fact:
            case ShardsGranted():
                self._granted.inc(len(fact.grants))
            case BarrierDecided():
                self._verdicts[fact.verdict].inc()
            case WorkerLost():
                self._reasons[_reason(fact.cause)].inc()
            case WorkerJudged():
                self._findings[fact.finding].inc()
            case _:
                pass

    def render(self, state: CoordState | None) -> bytes:
        """The exposition text, with gauges from the state of this moment; None if this process does not lead."""
        jobs = [] if state is None else list(state.jobs.values())
        self._leader.set(state is not None)
        self._epoch.set(0 if state is None else state.leader_epoch)
        for status in GangStatus:
            self._jobs.labels(status.value).set(sum(job.status is status for job in jobs))
        self._workers.set(sum(len(job.members) for job in jobs))
        self._open_barriers.set(0 if state is None else sum(len(soft.barriers) for soft in state.soft.values()))
        return generate_latest(self._registry)


def _reason(cause: str) -> str:
    if cause.startswith("left"):
        return "left"
    return cause if cause == "replaced" else "evicted"
