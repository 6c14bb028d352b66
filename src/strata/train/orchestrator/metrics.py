"""The orchestrator's Prometheus metrics (names, help texts, buckets), and the telemetry of status reports: how many
timelines (1,000) and traces (10,000) are kept.

Both live as long as the process. Nothing is decided by them, and nothing of them is journaled.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from prometheus_client import generate_latest

from strata.base.clock import Clock
from strata.http.metrics import MetricFactory, new_registry
from strata.train.core.commands import DispatchReply
from strata.train.core.facts import (
    DeviceTurnTaken,
    Dispatched,
    Fact,
    OperationAccepted,
    SampleReturned,
    SampleRouted,
    SnapshotAbandoned,
    SnapshotCommitted,
)
from strata.train.core.inputs import Decision, Dispatching
from strata.train.core.ops import ForwardBackward, InlinePayload, PassDone, Result, StepDone, decode_pass_metrics
from strata.train.core.publishing import ranks_reason
from strata.train.core.replay_differences import KINDS, ReplayDifferences, sum_differences
from strata.train.core.state import TrainState
from strata.train.orchestrator.rollout_recorder import RolloutRecorder
from strata.train.orchestrator.sampler_gap import GapMeasure
from strata.train.settings import METRICS_PREFIX as PREFIX
from strata.train.status.learning_curves import LearningCurves
from strata.train.status.reports import RECENT, RecoveryStatus, ServerStatus, SnapshotStatus, Timeline
from strata.train.status.rollouts import RolloutLimits
from strata.train.status.timeline import Rate, ThroughputHistory, Timelines

KEEP_TIMELINES: Final = 1_000
KEEP_TRACES: Final = 10_000


class OrchestratorMetrics:
    """Names are `strata_train_…`; those of counters end in `_total`."""

    def __init__(self) -> None:
        self._registry = registry = new_registry()
        make = MetricFactory(PREFIX, registry)
        counter, gauge, histogram, summary = make.counter, make.gauge, make.histogram, make.summary
        self.accepted = counter("operations_accepted_total", "Operations that were accepted", "kind")
        self.ended = counter("operations_ended_total", "Operations that ended, by outcome", "kind", "outcome")
        self.payload_bytes = counter("payload_bytes_total", "Bytes of the batches that were accepted")
        self.wait_s = histogram("wait_seconds", "From the acceptance of an operation until the ranks began it")
        self.phase_s = histogram("phase_seconds", "Time that an operation spent in a phase", "phase")
        self.dispatches = counter("dispatches_total", "Dispatches that were made")
        self.replays = counter("replays_total", "Dispatches replayed to ranks that had not applied them")
        self.compared = counter(
            "replay_compared_total",
            "Passes and steps of replays, by whether their first numbers were there",
            "compared",
        )
        for compared in ("yes", "no"):
            self.compared.labels(compared)
        self.difference = gauge(
            "replay_difference_max", "The largest absolute difference of a replay from the first run", "kind"
        )
        self.stopped = gauge("stopped_models", "Models that are stopped because their replay differed")
        self.efficiency = summary("packing_efficiency", "Of passes: tokens divided by the capacity of their rows")
        self.trained = counter("trained_tokens_total", "Tokens of forward and backward passes")
        self.sampled = counter("sampled_tokens_total", "Tokens that the ranks sampled")
        self.routed = counter("routed_samples_total", "Samples that were routed to an endpoint", "endpoint")
        self.returned = counter(
            "returned_samples_total", "Samples that an endpoint failed to draw, by who is next", "to"
        )
        self.unroutable = counter(
            "unroutable_samples_total", "Samples that the ranks began because no engine draws them, by reason", "reason"
        )
        self.prefilled = counter(
            "prompt_tokens_total", "Tokens of prompts, by whether the prefix cache had them", "cached"
        )
        self.slice_s = summary("slice_seconds", "Time that the ranks took for a sampling slice")
        self.journal_s = histogram("journal_seconds", "From a decision until it was durable")
        self.groups = counter("rank_groups_total", "Groups of ranks that were attached, one per start of the ranks")
        self.recovery_s = histogram(
            "recovery_seconds", "From the loss of a group of ranks until another had finished its replay"
        )
        self.snapshots = counter("snapshots_total", "Snapshots of the models, by outcome", "outcome")
        self.held_s = summary("snapshot_held_seconds", "Time that the ranks did nothing but copy, per snapshot")
        self.snapshot_bytes = gauge("snapshot_bytes", "Size of the newest snapshot; 0 before one was taken here")
        self.snapshot_at = gauge("snapshot_timestamp_seconds", "When the newest snapshot was complete; 0 before")
        self.queue = gauge("queue_length", "Operations that were accepted and not dispatched", "tenant")
        self.samples = gauge("samples", "Sample requests, by state", "state")
        self.ranks = gauge("ranks", "Attached ranks; 0 while they start")
        self.models = gauge("models", "Models that occupy a slot of the ranks")
        self.samplers = gauge("samplers", "Samplers that are open")
        self.gap_nats = summary(
            "sampler_gap_nats", "Per pass: mean distance of sampler and trainer, over tokens of the same weights"
        )
        self.gap_max_nats = gauge("sampler_gap_max_nats", "The largest such distance of a token in the last such pass")
        self.gap_tokens = counter(
            "sampler_gap_tokens_total", "Sampled tokens of passes, by whether compared", "compared"
        )
        for compared in ("same_weights", "stale", "unknown"):
            self.gap_tokens.labels(compared)
        self.gap_alarms = counter("sampler_gap_alarms_total", "Times that the gap of a model rose above the alarm")
        self.gap_high = gauge("sampler_gap_high_models", "Models whose gap was above the alarm in their last such pass")
        self.device_turns = counter(
            "device_turns_total", "Turns on devices that ranks and engines share, by who got them", "side"
        )
        self.engines = gauge("engine_ready", "Whether an engine that the server starts is ready", "engine")
        self.engine_starts = gauge("engine_starts", "Starts of an engine since the server started", "engine")

    def record_decision(self, decision: Decision, ended: list[Timeline]) -> None:
        for fact in decision.facts:
            self._record_fact(fact)
        if isinstance(decision.reply, Dispatching) and decision.reply.dispatch.rows:
            self.efficiency.observe(decision.reply.efficiency)
        for line in ended:
            self.ended.labels(line.kind, line.outcome).inc()
            if line.begun_at_s is not None:
                self.wait_s.observe(max(line.begun_at_s - line.accepted_at_s, 0.0))
            for phase, seconds in line.phases().items():
                self.phase_s.labels(phase).observe(seconds)

    def _record_fact(self, fact: Fact) -> None:
        match fact:
            case OperationAccepted(operation=operation):
                kind = str(operation.__struct_config__.tag)
                if isinstance(operation, ForwardBackward):
                    kind = "forward" if operation.forward_only else kind
                    payload = operation.payload
                    self.payload_bytes.inc(len(payload.data) if isinstance(payload, InlinePayload) else payload.size)
                self.accepted.labels(kind).inc()
            case Dispatched():
                self.dispatches.inc()
            case SampleRouted():
                self.routed.labels(fact.endpoint).inc()
            case SampleReturned():
                self.returned.labels("engine" if fact.again else "ranks").inc()
            case DeviceTurnTaken():
                self.device_turns.labels(fact.side).inc()
            case SnapshotCommitted():
                self.snapshots.labels("committed").inc()
                self.held_s.observe(fact.held_s)
                self.snapshot_bytes.set(fact.size)
                self.snapshot_at.set(fact.at_s)
            case SnapshotAbandoned():
                self.snapshots.labels("abandoned").inc()
            case _:
                pass

    def record_reply(self, reply: DispatchReply, kind: str) -> None:
        if reply.sampled is not None:
            self.slice_s.observe(reply.timing.total_s)
            self.sampled.inc(reply.sampled.sampled_tokens)
            self.prefilled.labels("no").inc(reply.sampled.prompt_tokens)
            self.prefilled.labels("yes").inc(reply.sampled.reused_tokens)
        elif kind == "forward_backward":
            self.trained.inc(reply.timing.tokens)

    def record_gap(self, measure: GapMeasure, *, alarm: bool) -> None:
        for reason, tokens in (
            ("same_weights", measure.tokens),
            ("stale", measure.stale),
            ("unknown", measure.unknown),
        ):
            self.gap_tokens.labels(reason).inc(tokens)
        if measure.tokens:
            self.gap_nats.observe(measure.mean)
            self.gap_max_nats.set(measure.max)
            self.gap_alarms.inc(alarm)

    def record_comparison(self, found: ReplayDifferences) -> None:
        self.compared.labels("yes").inc(found.compared)
        self.compared.labels("no").inc(found.not_compared)

    def render(self, status: ServerStatus) -> bytes:
        """The exposition text, with gauges set from the status of this moment."""
        self.queue.clear()
        for row in status.tenants:
            self.queue.labels(row.tenant.removeprefix("key:")).set(row.waiting)
        self.samples.labels("waiting").set(status.samples_waiting)
        self.samples.labels("running").set(status.samples_running)
        self.ranks.set(status.ranks.size)
        self.models.set(status.models)
        self.stopped.set(status.stopped_models)
        self.samplers.set(status.samplers)
        for engine in status.engines:
            self.engines.labels(engine.name).set(engine.state == "ready")
            self.engine_starts.labels(engine.name).set(engine.starts)
        return generate_latest(self._registry)


class ServerTelemetry:
    """What a leading orchestrator records while it works: timelines, rates, recoveries and the Prometheus series."""

    def __init__(
        self,
        clock: Clock,
        keep: int = KEEP_TIMELINES,
        gap_alarm_nats: float = 0.0,
        rollouts: RolloutLimits = RolloutLimits(),  # noqa: B008 (frozen)
    ) -> None:
        self._clock = clock
        self.leading_since_s = clock.wall_s()
        self.timelines = Timelines(keep)
        self.metrics = OrchestratorMetrics()
        self.curves = LearningCurves()
        self.unroutable: Counter[str] = Counter()
        """Samples that the ranks began because no engine draws them, by reason."""
        self.rollouts = RolloutRecorder(clock, gap_alarm_nats, rollouts, self._record_gap)
        self.trained, self.sampled = Rate(), Rate()
        self.throughput = ThroughputHistory()
        self._traces: dict[str, str] = {}
        """The trace of the request that submitted each operation that has not ended."""
        self._snapshot: SnapshotCommitted | None = None
        self._sent_at_s: dict[int, float] = {}
        """When each dispatch in flight was sent."""
        self._replied_at_s = 0.0
        self._group = ""
        self.attached_at_s: float | None = None
        self._lost_at_s: float | None = None
        self._loss = ""
        self._restored: int | None = None
        self._replayed = 0
        self._comparison = ReplayDifferences()
        """The largest differences of the last replay."""
        self.largest: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        """The largest differences since this process started."""
        self.recoveries = 0
        self.recovery_s: float | None = None
        self.recovered: deque[RecoveryStatus] = deque(maxlen=RECENT)
        """Newest first."""

    def record_decision(self, decision: Decision, state: TrainState) -> None:
        ended = self.timelines.record_decision(decision, state, self._clock.wall_s())
        self.metrics.record_decision(decision, ended)
        for fact in decision.facts:
            if isinstance(fact, SnapshotCommitted):
                self._snapshot = fact
            elif isinstance(fact, Dispatched) and fact.slice is not None and state.rules.route:
                self._record_unroutable(state, fact.future_ids)
        if self._traces:
            for future_id in decision.ended:
                self._traces.pop(future_id, None)

    def _record_unroutable(self, state: TrainState, future_ids: Sequence[str]) -> None:
        for future_id in future_ids:
            sample = state.sampling.get(future_id)
            reason = None if sample is None else ranks_reason(state, future_id, sample)
            if reason is not None:
                self.unroutable[reason] += 1
                self.metrics.unroutable.labels(reason).inc()

    def record_traced(self, future_id: str, traceparent: str) -> None:
        """An operation was submitted by a request that is traced; empty: it is not."""
        if traceparent and len(self._traces) < KEEP_TRACES:
            self._traces[future_id] = traceparent

    def traces_of(self, future_ids: Sequence[str]) -> list[str]:
        """The traces of those operations that have one."""
        if not self._traces:
            return []
        return [self._traces[future_id] for future_id in future_ids if future_id in self._traces]

    def record_durable(self, decided_at_s: float) -> None:
        """`decided_at_s` is of the monotonic clock."""
        self.metrics.journal_s.observe(self._clock.monotonic_s() - decided_at_s)

    def record_sent(self, state: TrainState, number: int, future_ids: Sequence[str]) -> None:
        now_s = self._clock.wall_s()
        self._sent_at_s[number] = now_s
        self.timelines.record_sent(state, number, future_ids, now_s)

    def record_restored(self, number: int) -> None:
        """The attached group has restored the snapshot after this dispatch."""
        self._restored = number

    def record_replay(self) -> None:
        """One dispatch was replayed."""
        self._replayed += 1
        self.metrics.replays.inc()

    def record_comparison(self, models: Mapping[str, ReplayDifferences]) -> None:
        """A replay was compared with the first run; nothing to compare is a comparison too."""
        self._comparison = total = sum_differences(models.values())
        self.metrics.record_comparison(total)
        for kind in KINDS:
            self.largest[kind] = max(self.largest[kind], getattr(total, kind))
            self.metrics.difference.labels(kind).set(self.largest[kind])

    def record_reply(self, reply: DispatchReply) -> None:
        now_s = self._clock.wall_s()
        self._sent_at_s.pop(reply.number, None)
        self._replied_at_s = now_s
        ended = None if reply.sampled is None else [sample.request_id for sample in reply.sampled.ended]
        if ended is None:
            for future_id, result in zip(self.timelines.in_flight(reply.number), reply.results, strict=False):
                self._record_result(future_id, result, now_s)
        timelines = self.timelines.record_reply(reply.number, reply.timing, now_s, ended)
        kind = timelines[0].kind if timelines else ""
        self.metrics.record_reply(reply, kind)
        if reply.sampled is not None:
            self.sampled.note(reply.sampled.sampled_tokens, now_s)
            self.throughput.note(now_s, sampled=reply.sampled.sampled_tokens)
        elif kind == "forward_backward":
            self.trained.note(reply.timing.tokens, now_s)
            self.throughput.note(now_s, trained=reply.timing.tokens)

    def _record_result(self, future_id: str, result: Result, now_s: float) -> None:
        line = self.timelines.get(future_id)
        model_id, _, seq = future_id.rpartition(":")
        if isinstance(result, PassDone) and line is not None and line.kind == "forward_backward":
            # In a reply the payload is still inline; afterwards it may be a file.
            payload = result.payload.data if isinstance(result.payload, InlinePayload) else b""
            # A curve may have a gap, and no session may end for it.
            with contextlib.suppress(msgspec.MsgspecError):
                self.curves.add_pass(model_id, decode_pass_metrics(payload).metrics)
        elif isinstance(result, StepDone):
            self.curves.add_step(model_id, int(seq), now_s, result.metrics)

    def _record_gap(self, operation: ForwardBackward, measure: GapMeasure) -> None:
        gaps, alarm = self.rollouts.gaps, False
        if measure.tokens:
            self.curves.add_late(operation.model_id, operation.seq_id, measure.metrics())
            alarm = gaps.record(operation.model_id, operation.seq_id, measure, self._clock.wall_s())
        self.metrics.record_gap(measure, alarm=alarm)

    def record_attached(self, group: str) -> None:
        self.metrics.groups.inc(group != self._group)
        self._group, self.attached_at_s = group, self._clock.wall_s()

    def record_lost(self, reason: str) -> None:
        """If groups are lost in a row, the recovery began with the first."""
        self.attached_at_s = None
        self._sent_at_s.clear()
        self._restored, self._replayed = None, 0
        if self._lost_at_s is None:
            self._lost_at_s, self._loss = self._clock.monotonic_s(), reason

    def record_replayed(self) -> None:
        """The attached group has finished its replay."""
        if self._lost_at_s is not None:
            self.recovery_s, self._lost_at_s = self._clock.monotonic_s() - self._lost_at_s, None
            self.recoveries += 1
            self.metrics.recovery_s.observe(self.recovery_s)
            self.recovered.appendleft(
                RecoveryStatus(
                    lost_at_s=self._clock.wall_s() - self.recovery_s,
                    seconds=self.recovery_s,
                    reason=self._loss,
                    restored=self._restored,
                    replayed=self._replayed,
                    differences=self._comparison,
                )
            )

    def begun_at_s(self, number: int) -> float | None:
        """Returns when the ranks can have begun this dispatch: it was sent, and the one before had its reply."""
        sent_at_s = self._sent_at_s.get(number)
        return None if sent_at_s is None else max(sent_at_s, self._replied_at_s)

    def newest_snapshot(self, state: TrainState) -> SnapshotStatus | None:
        if not state.snapshots:
            return None
        number, behind, committed = state.snapshots[-1].number, state.snapshot_backlog.dispatches, self._snapshot
        if committed is None or committed.number != number:
            return SnapshotStatus(number=number, behind=behind)
        return SnapshotStatus(
            number=number, behind=behind, at_s=committed.at_s, size=committed.size, held_s=committed.held_s
        )
