"""`RolloutRecorder`: compares what samplers drew with what passes computed, in a thread with a queue of 256, and keeps
the rollouts that clients chose.

It works beside the requests of clients, in a thread: no result waits for it. If it falls behind, it skips.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import StrataError
from strata.train.core import model_options, ops
from strata.train.core.inputs import CompleteDispatch, CompleteRouted, CompleteSlice, Input
from strata.train.core.sampling import SampleOperation, decode_result
from strata.train.core.state import SamplerState, TrainState
from strata.train.orchestrator.sampler_gap import (
    DrawnTokens,
    GapMeasure,
    GapMonitor,
    SampleIndex,
    TrainedSequence,
    WeightsVersion,
    is_comparable,
    read_sequence,
)
from strata.train.payload import Payloads
from strata.train.status.rollouts import (
    KeptRollout,
    RolloutLimits,
    RolloutStore,
    RolloutSummary,
    SampleSource,
    spread,
    wants_rollouts,
)

MAX_QUEUED: Final = 256
SAMPLED_LOSSES: Final = frozenset(
    {
        model_options.LossName.IMPORTANCE_SAMPLING,
        model_options.LossName.PPO,
        model_options.LossName.CISPO,
        model_options.LossName.DRO,
        model_options.LossName.GSPO,
    }
)
"""Losses that learn from samples."""
OnMeasured = Callable[[ops.ForwardBackward, GapMeasure], None]
"""Called with a pass and its gap."""
_log = log.get(__name__)


@dataclass(frozen=True)
class DrawnSamples:
    operation: SampleOperation
    version: WeightsVersion
    payload: ops.Payload


@dataclass(frozen=True)
class ComputedPass:
    operation: ops.ForwardBackward
    payload: ops.Payload
    """The payload of the result."""
    changed: int
    """The last operation of the model before this one that changed its weights."""
    tenant: str
    keep: bool


@dataclass(frozen=True)
class UnloadedModel:
    """Says that no alarm about the model remains after its last pass was measured."""

    model_id: str


QueueEntry = DrawnSamples | ComputedPass | UnloadedModel


class RolloutRecorder:
    def __init__(self, clock: Clock, alarm_nats: float, limits: RolloutLimits, on_measured: OnMeasured) -> None:
        self._clock = clock
        self.gaps = GapMonitor(alarm_nats)
        self.kept = RolloutStore(limits)
        self.skipped = 0
        """Samples and passes that were not recorded, because too much waited or a file was gone."""
        self._on_measured = on_measured
        self._index = SampleIndex()
        self._queue: asyncio.Queue[QueueEntry] = asyncio.Queue(MAX_QUEUED)
        self._changed: dict[str, int] | None = None
        self._made: dict[str, WeightsVersion] = {}
        """Samplers that were made in memory since this orchestrator leads."""

    def observe(self, request: Input, state: TrainState) -> None:
        """Observes this input before it is applied: afterwards the state has the results alone."""
        if self._changed is None:
            # What ran before this process may have changed the weights.
            self._changed = {model.model_id: model.done for model in state.models.values()}
        for future_id, result in _results_of(request, state):
            future = state.futures.get(future_id)
            if future is not None and future.operation is not None:
                self._observe_result(future.operation, result, state, self._changed)

    def _observe_result(
        self, operation: ops.Operation, result: ops.Result, state: TrainState, changed: dict[str, int]
    ) -> None:
        match operation, result:
            case ((ops.OptimStep() | ops.LoadWeights()), _):
                # Also one that failed: it may have changed some of them.
                changed[operation.model_id] = max(operation.seq_id, changed.get(operation.model_id, 0))
            case ops.UnloadModel(), _:
                changed.pop(operation.model_id, None)
                self._enqueue(UnloadedModel(operation.model_id))
            case ops.SaveSampler(), ops.SamplerOpened():
                self._made = {name: version for name, version in self._made.items() if name in state.samplers}
                self._made[operation.sampler_id] = WeightsVersion(operation.model_id, operation.seq_id)
            case SampleOperation(), ops.SampleDone():
                version = self._version_of(state.samplers.get(operation.sampler_id), state)
                if version is not None and is_comparable(operation):
                    self._enqueue(DrawnSamples(operation, version, result.payload))
            case ops.ForwardBackward(), ops.PassDone():
                if operation.loss in SAMPLED_LOSSES and not operation.forward_only:
                    self._enqueue(self._computed(operation, result, state, changed))
            case _:
                pass

    def _computed(
        self, operation: ops.ForwardBackward, result: ops.PassDone, state: TrainState, changed: dict[str, int]
    ) -> ComputedPass:
        model = state.models[operation.model_id]
        keep = self.kept.enabled and wants_rollouts(model.create.user_metadata)
        return ComputedPass(operation, result.payload, changed.get(model.model_id, 0), model.tenant, keep)

    def _version_of(self, sampler: SamplerState | None, state: TrainState) -> WeightsVersion | None:
        """None for the base, for weights that were imported, and where it is not known any more. The samples of an
        in-flight sampler say it themselves."""
        if sampler is not None and sampler.inflight:
            return WeightsVersion(sampler.inflight, 0)
        if sampler is None or sampler.model_path is None:
            return None if sampler is None else self._made.get(sampler.sampler_id)
        run_id, _, rest = sampler.model_path.removeprefix("tinker://").partition("/")
        kind, _, name = rest.partition("/")
        checkpoint = state.checkpoints.get((run_id, kind, name))
        if checkpoint is None or not checkpoint.number or checkpoint.path != sampler.folder:
            return None
        return WeightsVersion(checkpoint.operation.model_id, checkpoint.operation.seq_id)

    def _enqueue(self, entry: QueueEntry) -> None:
        try:
            self._queue.put_nowait(entry)
        except asyncio.QueueFull:
            self.skipped += 1
            if isinstance(entry, UnloadedModel):
                self.gaps.end_alarm(entry.model_id)

    async def run(self, payloads: Payloads) -> None:
        """Record and compare until cancelled."""
        while True:
            entry = await self._queue.get()
            try:
                await self._process(entry, payloads)
            except (StrataError, msgspec.MsgspecError, ValueError, MemoryError) as error:
                # Its files may be removed already. No request may fail for a measurement.
                self.skipped += 1
                _log.info("rollout_not_recorded", reason=repr(error))
            finally:
                self._queue.task_done()

    async def expire(self) -> None:
        self.kept.expire(self._clock.wall_s())

    async def settled(self) -> None:
        """Return when all that was observed is recorded and compared."""
        await self._queue.join()

    async def _process(self, entry: QueueEntry, payloads: Payloads) -> None:
        match entry:
            case UnloadedModel():
                self.gaps.end_alarm(entry.model_id)
            case DrawnSamples():
                await asyncio.to_thread(self._record_samples, entry, payloads)
            case ComputedPass():
                measure, rollouts = await asyncio.to_thread(self._compare, entry, payloads)
                self._on_measured(entry.operation, measure)
                for rollout in rollouts:
                    self.kept.add(entry.tenant, rollout)

    def _record_samples(self, entry: DrawnSamples, payloads: Payloads) -> None:
        for sequence in decode_result(payloads.read(entry.payload)).sequences:
            self._index.add(entry.operation.prompt, sequence, entry.version)

    def _compare(self, entry: ComputedPass, payloads: Payloads) -> tuple[GapMeasure, list[KeptRollout]]:
        data = ops.decode_pass_data(payloads.read(entry.operation.payload))
        result = ops.decode_pass_result(payloads.read(entry.payload))
        measure, rollouts = GapMeasure(), list[KeptRollout]()
        chosen = spread(len(data.datums)) if entry.keep else range(0)
        for number, (datum, output) in enumerate(zip(data.datums, result.outputs, strict=True)):
            sequence = read_sequence(datum, output)
            if sequence is None:
                measure.unknown += datum.length
                continue
            own = GapMeasure()
            drawn = own.add(sequence, self._index, entry.operation.model_id, entry.changed)
            measure.merge(own)
            if number in chosen:
                rollouts.append(self._rollout(entry.operation, number, sequence, drawn, own))
        return measure, rollouts

    def _rollout(
        self,
        operation: ops.ForwardBackward,
        number: int,
        sequence: TrainedSequence,
        drawn: DrawnTokens,
        measure: GapMeasure,
    ) -> KeptRollout:
        source: SampleSource = "unknown" if measure.unknown else "stale" if measure.stale else "same_weights"
        answer = slice(sequence.prompt - 1, None)
        distance = np.abs(sequence.trained[answer].astype(np.float64) - drawn.logprobs[answer])
        versions = drawn.versions[answer][drawn.versions[answer] >= 0]
        answered = len(distance) > 0
        summary = RolloutSummary(
            rollout_id=f"{operation.model_id}:{operation.seq_id}:{number}",
            model_id=operation.model_id,
            seq_id=operation.seq_id,
            at_s=self._clock.wall_s(),
            loss=operation.loss.value,
            source=source if measure.seen else "unknown",
            prompt_tokens=sequence.prompt,
            answer_tokens=len(distance),
            advantage=float(sequence.advantages[answer].mean()) if answered else 0.0,
            gap_mean=float(distance.mean()) if answered else 0.0,
            gap_max=float(distance.max()) if answered else 0.0,
            reward=sequence.reward,
            oldest_version=int(versions.min()) if len(versions) else None,
            newest_version=int(versions.max()) if len(versions) else None,
        )
        return KeptRollout(
            summary=summary,
            tokens=sequence.tokens.tobytes(),
            sampler=drawn.logprobs.tobytes(),
            trainer=sequence.trained.tobytes(),
            advantages=sequence.advantages.tobytes(),
            weights=sequence.weights.tobytes(),
            versions=drawn.versions.astype("<i4").tobytes(),
        )


def _results_of(request: Input, state: TrainState) -> Iterator[tuple[str, ops.Result]]:
    match request:
        case CompleteDispatch():
            dispatch = state.dispatches.get(request.number)
            ended: Iterable[str] = () if dispatch is None else dispatch.future_ids
            yield from zip(ended, request.results, strict=False)
        case CompleteSlice():
            if request.number in state.dispatches:
                yield from request.ended
        case CompleteRouted():
            yield request.future_id, request.result
        case _:
            return
