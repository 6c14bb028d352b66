"""The orchestrator's numbers for Prometheus. They live as long as the process: counters begin anew with it."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram, Summary, generate_latest

from strata.train.core.commands import Reply
from strata.train.core.facts import Accepted, Dispatched, Fact, SnapshotAbandoned, SnapshotCommitted
from strata.train.core.inputs import Dispatching, Outcome
from strata.train.core.ops import ForwardBackward, Inline
from strata.train.core.status import Status, Timeline
from strata.train.metrics import PREFIX, new_registry

_TIMES_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """Names are `strata_train_…`; those of counters end in `_total`."""

    def __init__(self) -> None:
        self._registry = registry = new_registry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}", text, labels, registry=registry, buckets=_TIMES_S)

        def summary(name: str, text: str) -> Summary:
            return Summary(f"{PREFIX}{name}", text, registry=registry)

        self.accepted = counter("operations_accepted_total", "Operations that were accepted", "kind")
        self.ended = counter("operations_ended_total", "Operations that ended, and how", "kind", "outcome")
        self.payload_bytes = counter("payload_bytes_total", "Bytes of the batches that were accepted")
        self.wait_s = histogram("wait_seconds", "From the acceptance of an operation until the ranks began it")
        self.phase_s = histogram("phase_seconds", "What an operation spent in a phase", "phase")
        self.dispatches = counter("dispatches_total", "Dispatches that were made")
        self.replays = counter("replays_total", "Dispatches told again to ranks that had not done them")
        self.efficiency = summary("packing_efficiency", "Of passes: tokens, divided by the room of their rows")
        self.trained = counter("trained_tokens_total", "Tokens that the ranks went over forward and backward")
        self.sampled = counter("sampled_tokens_total", "Tokens that the ranks sampled")
        self.quantum_s = summary("quantum_seconds", "What the ranks took for a quantum of sampling")
        self.journal_s = histogram("journal_seconds", "From a decision until it was durable")
        self.groups = counter("rank_groups_total", "Groups of ranks that were spoken to, one per start of the ranks")
        self.recovery_s = histogram("recovery_seconds", "From the loss of ranks until others had caught up")
        self.snapshots = counter("snapshots_total", "Snapshots of the models, and what came of them", "outcome")
        self.held_s = summary("snapshot_held_seconds", "What the ranks did nothing else for, per snapshot")
        self.snapshot_bytes = gauge("snapshot_bytes", "Size of the newest snapshot; 0 before one was taken here")
        self.snapshot_at = gauge("snapshot_timestamp_seconds", "When the newest snapshot was complete; 0 before")
        self.queue = gauge("queue_length", "Operations that were accepted and not dispatched", "tenant")
        self.samples = gauge("samples", "Requests for samples that are here", "state")
        self.ranks = gauge("ranks", "Ranks that are spoken to; 0 while they start")
        self.models = gauge("models", "Models that have a place at the ranks")
        self.samplers = gauge("samplers", "Samplers that are open")

    def decided(self, outcome: Outcome, ended: list[Timeline]) -> None:
        for fact in outcome.facts:
            self._fact(fact)
        if isinstance(outcome.reply, Dispatching) and outcome.reply.dispatch.rows:
            self.efficiency.observe(outcome.reply.efficiency)
        for line in ended:
            self.ended.labels(line.kind, line.outcome).inc()
            if line.begun_at_s is not None:
                self.wait_s.observe(max(line.begun_at_s - line.accepted_at_s, 0.0))
            for phase, seconds in line.phases().items():
                self.phase_s.labels(phase).observe(seconds)

    def _fact(self, fact: Fact) -> None:
        match fact:
            case Accepted(operation=operation):
                kind = str(operation.__struct_config__.tag)
                if isinstance(operation, ForwardBackward):
                    kind = "forward" if operation.forward_only else kind
                    payload = operation.payload
                    self.payload_bytes.inc(len(payload.data) if isinstance(payload, Inline) else payload.size)
                self.accepted.labels(kind).inc()
            case Dispatched():
                self.dispatches.inc()
            case SnapshotCommitted():
                self.snapshots.labels("committed").inc()
                self.held_s.observe(fact.held_s)
                self.snapshot_bytes.set(fact.size)
                self.snapshot_at.set(fact.at_s)
            case SnapshotAbandoned():
                self.snapshots.labels("abandoned").inc()
            case _:
                pass

    def answered(self, reply: Reply, kind: str) -> None:
        if reply.sampled is not None:
            self.quantum_s.observe(reply.timing.total_s)
            self.sampled.inc(reply.sampled.sampled_tokens)
        elif kind == "forward_backward":
            self.trained.inc(reply.timing.tokens)

    def text(self, status: Status) -> bytes:
        """With what is true at this moment."""
        self.queue.clear()
        for row in status.tenants:
            self.queue.labels(row.tenant.removeprefix("key:")).set(row.waiting)
        self.samples.labels("waiting").set(status.samples_waiting)
        self.samples.labels("running").set(status.samples_running)
        self.ranks.set(status.ranks.size)
        self.models.set(status.models)
        self.samplers.set(status.samplers)
        return generate_latest(self._registry)
