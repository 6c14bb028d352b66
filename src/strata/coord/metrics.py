"""The Prometheus metrics of the coordinator, `strata_coordinator_…`: names, help texts, labels and buckets.

Counters restart with the process, and only the leader counts. Nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from strata.http.metrics import MetricFactory, RecordCall, process_registry

PREFIX: Final = "strata_coordinator_"


class CoordinatorMetrics:
    def __init__(self) -> None:
        self._registry = registry = process_registry(PREFIX)
        make = MetricFactory(PREFIX, registry)
        counter, gauge = make.counter, make.gauge
        self._rpcs = make.calls(
            ("rpcs_total", "Calls that were let in, by the status of their reply"),
            ("rpc_seconds", "Time until the reply, with what the call waits; without streams"),
            "rpc",
        )
        self._heartbeats = counter("heartbeats_total", "Heartbeats of workers, each of a batch counted")
        self.heartbeats = 0
        """Those since the last scrape: a plain number, since a counter would be a good part of a heartbeat's cost."""
        self.journal_s = make.plain_histogram("journal_seconds", "From a decision until its facts were durable")
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
        self._forwards = counter("forwards_total", "Calls that were forwarded to the leader of their job", "status")
        self._forwards.labels("OK")
        self._leader = gauge("leader", "1 while this process leads, else 0")
        self._epoch = gauge("leader_epoch", "The epoch that this process leads under; 0 if it does not lead")
        self._partition_epoch = gauge(
            "partition_epoch", "The epoch that this process leads a partition under; absent: it does not", "partition"
        )
        self._partition_workers = gauge("partition_workers", "Members of all jobs of a led partition", "partition")
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
        self._facts: dict[type[Fact], int] = dict.fromkeys(self._by_fact, 0)
        self._grants = 0
        """The number of grants, and of shards in them, since the last scrape."""
        self._verdicts = {each: self._barriers.labels(each.name.lower()) for each in BarrierVerdict}
        self._findings = {each: self._judged.labels(each.value) for each in StragglerFinding}
        self._reasons = {each: self._lost.labels(each) for each in ("left", "replaced", "evicted")}

    def rpc(self, name: str, *, stream: bool) -> RecordCall:
        """Returns what records the calls of this name."""
        return self._rpcs.recorder(name, timed=not stream)

    def record_fact(self, fact: Fact) -> None:
        """A fact is committed."""
        kind = type(fact)
        if kind in self._facts:
            self._facts[kind] += 1
            return
        match fact:
            case ShardsGranted():
                self._grants += len(fact.grants)
            case BarrierDecided():
                self._verdicts[fact.verdict].inc()
            case WorkerLost():
                self._reasons[_reason(fact.cause)].inc()
            case WorkerJudged():
                self._findings[fact.finding].inc()
            case _:
                pass

    def record_forward(self, status: str) -> None:
        self._forwards.labels(status).inc()

    def render(self, states: Mapping[int, CoordState]) -> bytes:
        """The exposition text, with gauges from the state of this moment of each partition that this process leads."""
        jobs = [job for state in states.values() for job in state.jobs.values()]
        self._heartbeats.inc(self.heartbeats)
        self._granted.inc(self._grants)
        self.heartbeats = self._grants = 0
        for kind, counted in self._by_fact.items():
            counted.inc(self._facts[kind])
            self._facts[kind] = 0
        self._leader.set(bool(states))
        self._epoch.set(max((state.leader_epoch for state in states.values()), default=0))
        self._partition_epoch.clear()
        self._partition_workers.clear()
        for number, state in states.items():
            self._partition_epoch.labels(str(number)).set(state.leader_epoch)
            self._partition_workers.labels(str(number)).set(sum(len(job.members) for job in state.jobs.values()))
        for status in GangStatus:
            self._jobs.labels(status.value).set(sum(job.status is status for job in jobs))
        self._workers.set(sum(len(job.members) for job in jobs))
        barriers = sum(len(soft.barriers) for state in states.values() for soft in state.soft.values())
        self._open_barriers.set(barriers)
        return generate_latest(self._registry)


def _reason(cause: str) -> str:
    if cause.startswith("left"):
        return "left"
    return cause if cause == "replaced" else "evicted"
