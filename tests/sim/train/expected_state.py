"""What clients were told, and whether one after the other could have been done to each model to tell them that."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec

from strata.train.core import ops
from strata.train.core.sampling import DrawnSequence, SampleOperation, decode_result, encode_result
from strata.train.core.state import INITIAL
from strata.train.settings import ServerSettings
from tests.sim.train import chain
from tests.sim.train.audit import Audit
from tests.sim.train.ranks import SimRanks
from tests.sim.train.wires import TrainWorld


@dataclass
class ExpectedResult:
    tenant: str
    operation: ops.Operation
    accepted_s: float
    may_cancel: bool = False
    may_fail: bool = False
    """The client knew that it cannot work."""
    result: ops.Result | None = None
    told_s: float = 0.0


@dataclass
class ExpectedState:
    world: TrainWorld
    audit: Audit
    settings: ServerSettings
    clock_error_s: float
    entries: dict[str, ExpectedResult] = field(default_factory=dict)

    def accepted(self, future_id: str, tenant: str, operation: ops.Operation) -> ExpectedResult:
        self.audit.heard(future_id)
        entry = self.entries.get(future_id)
        if entry is None:
            entry = self.entries[future_id] = ExpectedResult(tenant, operation, self.world.loop.time())
        elif entry.operation != operation:
            self.world.violated(f"{future_id} was given out for two operations")
        return entry

    def told(self, future_id: str, result: ops.Result) -> None:
        entry = self.entries[future_id]
        if entry.result is None:
            entry.result, entry.told_s = result, self.world.loop.time()
            self.world.trace.note(f"told {future_id}")
        elif entry.result != result:
            self.world.violated(f"{future_id} was {entry.result}, and is {result} now")
        durable = self.audit.results.get(future_id)
        if isinstance(result, ops.Failed) and durable is None:
            self.world.violated(f"{future_id} was told to have failed ({result.message}), which is in no journal")

    def may_be_gone(self, future_id: str) -> bool:
        age_s = self.world.loop.time() - self.entries[future_id].accepted_s
        return age_s + self.clock_error_s >= self.settings.limits.result_ttl_s

    # The sequential model

    def judge(self) -> str | None:
        models: dict[str, dict[int, str]] = {}
        for future_id, entry in self.entries.items():
            if entry.result is None:
                return f"{future_id} never had a result"
            if isinstance(entry.operation, ops.Sequenced):
                models.setdefault(entry.operation.model_id, {})[entry.operation.seq_id] = future_id
        for future_id, result in self.audit.results.items():
            told = self.entries[future_id].result if future_id in self.entries else None
            if told is not None and told != result:
                return f"{future_id} was told to be {told}, and the journal has {result}"
        self._samplers: dict[str, bytes] = {}
        self._versions: dict[tuple[str, int], bytes] = {}
        self._oldest: dict[str, int] = {}
        self._now = {model_id: chain.begun(model_id) for model_id in models if self._made(f"{model_id}:create")}
        self._saved = {
            (model_id, "weights", INITIAL): begun
            for model_id, begun in self._now.items()
            if self._made(f"{model_id}:{INITIAL}")
        }
        for future_id in sorted(self.entries, key=lambda each: self.audit.number_of.get(each, 0)):
            problem = self._check(future_id, self.entries[future_id])
            if problem is not None:
                return problem
        # Saves that came while they ran are done now.
        problems = (self._check_inflight(future_id, entry) for future_id, entry in self.entries.items())
        return next(filter(None, problems), None)

    def _made(self, future_id: str) -> bool:
        return not isinstance(self.audit.results.get(future_id), ops.Failed)

    def _check(self, future_id: str, entry: ExpectedResult) -> str | None:
        result, operation = entry.result, entry.operation
        if isinstance(result, ops.Failed):
            return self._check_failure(future_id, entry, result)
        if isinstance(operation, SampleOperation) and self.audit.model_of(operation):
            return None
        if isinstance(operation, SampleOperation):
            expected: object = self._sampled(operation)
        elif isinstance(operation, ops.Sequenced):
            expected = self._replayed(future_id, operation)
        else:
            return None
        return (
            None if result == expected else f"{future_id} was told {result}, and one after the other gives {expected}"
        )

    def _check_failure(self, future_id: str, entry: ExpectedResult, failure: ops.Failed) -> str | None:
        number = self.audit.number_of.get(future_id, 0)
        match failure.category:
            case "cancelled" if entry.may_cancel or self._too_stale(future_id, entry.operation):
                return None
            case "user" if entry.may_fail or self._doomed(entry.operation):
                return None
            case "server" if number in self.audit.given_up:
                return None
            case "server" if isinstance(entry.operation, SampleOperation) and (
                self._slice_given_up() or self._doomed(entry.operation)
            ):
                return None
            case _:
                return f"{future_id} failed ({failure.category}: {failure.message}) for no reason"

    def _doomed(self, operation: ops.Operation) -> bool:
        """It needs something that was never made."""
        if isinstance(operation, ops.Sequenced) and operation.model_id not in self._now:
            return True
        match operation:
            case ops.LoadWeights():
                return (operation.run_id, operation.kind, operation.name) not in self._saved
            case SampleOperation():
                return operation.sampler_id not in self._samplers
            case _:
                return False

    def _slice_given_up(self) -> bool:
        return any(self.audit.dispatched[number].slice is not None for number in self.audit.given_up)

    def _replayed(self, future_id: str, operation: ops.Sequenced) -> ops.Result:  # noqa: PLR0911 - one arm per kind
        model_id = operation.model_id
        if model_id not in self._now:
            return ops.Failed("user", "there is no such model")
        now = self._now[model_id]
        match operation:
            case ops.ForwardBackward():
                return self._passed(future_id, operation, now)
            case ops.OptimStep():
                self._now[model_id] = chain.stepped(now, operation.params)
                return ops.StepDone(chain.shown(self._now[model_id]))
            case ops.AbortGradients():
                self._now[model_id] = chain.aborted(now)
                return ops.GradientsAborted()
            case ops.SaveWeights():
                self._saved[model_id, operation.kind, operation.name] = now
                return ops.WeightsSaved(f"tinker://{model_id}/{operation.kind}/{operation.name}")
            case ops.LoadWeights():
                saved = self._saved.get((operation.run_id, operation.kind, operation.name))
                if saved is None:
                    return ops.Failed("user", "there is no such checkpoint")
                self._now[model_id] = chain.loaded(saved, optimizer=operation.optimizer)
                return ops.WeightsLoaded(f"tinker://{operation.run_id}/{operation.kind}/{operation.name}")
            case ops.SaveSampler():
                self._samplers[operation.sampler_id] = self._versions[model_id, operation.seq_id] = now
                self._oldest[operation.sampler_id] = operation.seq_id
                return ops.SamplerOpened(operation.sampler_id)
            case ops.MalformedOperation():
                return ops.Failed("user", operation.message)
            case _:
                raise AssertionError(f"no client asks for {operation}")

    def _passed(self, future_id: str, operation: ops.ForwardBackward, now: bytes) -> ops.Result:
        dispatch = self.audit.dispatched[self.audit.number_of[future_id]]
        composition = chain.composed(dispatch.future_ids, dispatch.rows)
        assert isinstance(operation.payload, ops.InlinePayload)
        data = operation.payload.data
        after = chain.passed(now, data, forward_only=operation.forward_only, composition=composition)
        if not operation.forward_only:
            self._now[operation.model_id] = after
        return ops.PassDone(ops.InlinePayload(after))

    def _too_stale(self, future_id: str, operation: ops.Operation) -> bool:
        limit = operation.max_staleness if isinstance(operation, SampleOperation) else msgspec.UNSET
        return limit is not msgspec.UNSET and self.audit.saves.get(future_id, 0) > limit

    def _check_inflight(self, future_id: str, entry: ExpectedResult) -> str | None:
        """Every token once, each by the version that its span names; what was durable is in it as it was."""
        sample, result = entry.operation, entry.result
        model_id = self.audit.model_of(sample)
        if not model_id or not isinstance(sample, SampleOperation) or not isinstance(result, ops.SampleDone):
            return None
        assert isinstance(result.payload, ops.InlinePayload)
        (got,) = decode_result(result.payload.data).sequences
        versions = [span.version for span in got.versions for _ in range(span.tokens)]
        if versions != sorted(versions) or (versions and versions[0] < self._oldest[sample.sampler_id]):
            return f"{future_id} was drawn by versions {versions}"
        ranks = SimRanks(self.settings, "judge", {}, self.world)
        logprobs = b""
        for place, version in enumerate(versions):
            ranks.samplers["w"] = chain.weight(self._versions[model_id, version])
            logprobs += ranks._sample_result(sample, "w").sequences[0].logprobs[4 * place : 4 * place + 4]
        expected = ranks._sample_result(sample, "w").sequences[0] if versions else None
        if expected is None or got.tokens != expected.tokens or got.logprobs != logprobs:
            return f"{future_id} has other tokens or log probabilities than its versions give"
        durable = self.audit.drawn.get(future_id, DrawnSequence())
        size = len(durable.tokens)
        known = [span.version for span in durable.versions for _ in range(span.tokens)]
        begins = [0, *itertools.accumulate(span.tokens for span in got.versions)]
        resumed = {place for place, span in zip(begins, got.versions, strict=False) if span.recomputed}
        as_durable = got.tokens[:size] == durable.tokens and versions[: len(known)] == known
        if not as_durable or resumed != self.audit.resumed.get(future_id, set()):
            return f"{future_id} was drawn again, although {durable.length} tokens of it were durable"
        if self._too_stale(future_id, sample):
            return f"{future_id} ended after {self.audit.saves[future_id]} saves"
        return None

    def _sampled(self, sample: SampleOperation) -> ops.Result:
        if sample.sampler_id not in self._samplers:
            return ops.Failed("user", "there is no such sampler")
        ranks = SimRanks(self.settings, "judge", {}, self.world)
        ranks.samplers[sample.sampler_id] = chain.weight(self._samplers[sample.sampler_id])
        result = ranks._sample_result(sample, sample.sampler_id)
        tokens = sum(len(each.tokens) // 4 for each in result.sequences)
        return ops.SampleDone(ops.InlinePayload(encode_result(result)), tokens)
