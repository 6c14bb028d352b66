"""Measures the log-probability gap between sampler and trainer: which tokens are comparable, how many are recorded (4
Mi), and when the alarm (`alarm_nats`) is raised.

A difference is legitimate after an optimizer step, at another temperature, and where the tokens came from elsewhere. So
a token is compared only if all of these hold:

- this server drew it, from a sampler of the same model, at temperature 1 without top-k and top-p, or at temperature 0;
- no optimizer step and no load changed the weights of the model between the sampler, or the oldest version of an
  in-flight one that drew a token of the sample, and the pass;
- all tokens before it are the same, and the pass trains on the whole sample.

What was drawn is recorded here, so the log probabilities that a client sends along are not relied on. The record is in
memory: after a restart of the orchestrator only new samples are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from strata.base import log
from strata.train.core.ops import Datum, DatumOutput, Dense, DType
from strata.train.core.sampling import SampledSequence, SampleOperation, VersionSpans
from strata.train.status.reports import GapStatus

MAX_RECORDED_TOKENS: Final = 4 << 20
"""Sampled tokens whose log probabilities are held, 4 bytes each; the oldest samples go first."""
_RECORD_TOKENS: Final = 128
"""What a record takes beside its numbers, as that of so many tokens."""
MAX_MODELS: Final = 64
_NUMPY: Final = {DType.F32: "<f4", DType.I64: "<i8", DType.I32: "<i4"}
_log = log.get(__name__)

Floats = npt.NDArray[np.float32]
Versions = npt.NDArray[np.int32]


class WeightsVersion(NamedTuple):
    """The weights of a model as they were when this operation of it ran."""

    model_id: str
    seq_id: int


class RecordedSample(NamedTuple):
    version: WeightsVersion
    logprobs: Floats
    spans: VersionSpans = ()
    """Those of an in-flight sampler."""

    @property
    def versions(self) -> Versions:
        """The version that drew each token."""
        if not self.spans:
            return np.full(len(self.logprobs), self.version.seq_id, np.int32)
        return np.repeat([each.version for each in self.spans], [each.tokens for each in self.spans]).astype(np.int32)


class DrawnTokens(NamedTuple):
    """What is known of how a sequence was drawn. Position i is about token i + 1."""

    logprobs: Floats
    versions: Versions
    """-1 where it is not known."""


def is_comparable(sample: SampleOperation) -> bool:
    """Says whether the sampler's log probabilities are those of the model itself."""
    return sample.params.is_plain


class SampleIndex:
    """Samples by what they consist of: all tokens of prompt and answer, and how many of them are the answer."""

    def __init__(self, max_tokens: int = MAX_RECORDED_TOKENS) -> None:
        self._samples: dict[tuple[bytes, int], RecordedSample] = {}
        self._max_tokens = max_tokens
        self._tokens = 0

    def add(self, prompt: bytes, sequence: SampledSequence, version: WeightsVersion) -> None:
        logprobs = np.frombuffer(sequence.logprobs, "<f4")
        if not len(logprobs):
            return
        if sequence.versions:
            # As old as its oldest token: no step after that, and all its weights are the same.
            version = WeightsVersion(version.model_id, min(each.version for each in sequence.versions))
        key = digest_tokens(prompt, sequence.tokens), len(logprobs)
        # A later version may have drawn the same tokens: its log probabilities are the ones to compare with.
        before = self._samples.pop(key, None)
        self._tokens += _weight(logprobs) - (0 if before is None else _weight(before.logprobs))
        self._samples[key] = RecordedSample(version, logprobs, sequence.versions)
        while self._tokens > self._max_tokens:
            oldest = self._samples.pop(next(iter(self._samples)))
            self._tokens -= _weight(oldest.logprobs)

    def find(self, tokens: bytes, drawn: int) -> RecordedSample | None:
        """The sample that these tokens are, the last `drawn` of which are the answer."""
        return self._samples.get((digest_tokens(tokens), drawn))


def _weight(logprobs: Floats) -> int:
    """Weighs log probabilities in tokens of 4 bytes: a record takes memory beside its numbers too."""
    return len(logprobs) + _RECORD_TOKENS


def digest_tokens(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def digest_beginnings(tokens: bytes, ends: Iterable[int]) -> list[bytes]:
    """Returns `digest_tokens` of the first tokens up to each of these ends, which ascend: one pass over them."""
    digest, start, found = blake2b(digest_size=16), 0, []
    for end in ends:
        digest.update(tokens[4 * start : 4 * end])
        start = end
        found.append(digest.copy().digest())
    return found


@dataclass(frozen=True)
class TrainedSequence:
    """A datum of a loss that learns from samples, and the trainer's log probabilities of its targets."""

    tokens: npt.NDArray[np.int32]
    """All of them: position i of the arrays below is about token i + 1."""
    weights: Floats
    advantages: Floats
    given: Floats
    """The sampler's log probabilities as the client sent them."""
    trained: Floats
    reward: float | None = None

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Says of each target whether a client weighs it, or gives it an advantage or a log probability."""
        learned: npt.NDArray[np.bool_] = self.weights != 0
        return (self.advantages != 0) | (self.given != 0) if learned.all() else learned

    @property
    def prompt(self) -> int:
        """Tokens before the first that was sampled."""
        places = np.flatnonzero(self.sampled)
        return int(places[0]) + 1 if len(places) else len(self.tokens)

    @property
    def prompt_id(self) -> str:
        return digest_tokens(self.tokens[: self.prompt].tobytes()).hex()

    def learned_runs(self) -> Iterator[tuple[int, int]]:
        """Yields where tokens with an advantage begin and end: an answer, or one of several."""
        learned = np.concatenate(([False], (self.advantages != 0) & (self.weights != 0), [False]))
        edges = np.flatnonzero(learned[1:] != learned[:-1]).tolist()
        yield from ((first, last) for first, last in pairwise(edges) if learned[first + 1])

    def find_sample(self, index: SampleIndex, first: int, last: int) -> RecordedSample | None:
        return index.find(self.tokens[: last + 1].tobytes(), last - first)


def read_sequence(datum: Datum, output: DatumOutput) -> TrainedSequence | None:
    """None for a datum that is not of samples, or whose inputs are sparse or of reduced precision."""
    targets, given = read_array(datum, "target_tokens"), read_array(datum, "logprobs")
    advantages, trained = read_array(datum, "advantages"), output.fields.get("logprobs")
    if targets is None or given is None or advantages is None or trained is None:
        return None
    weights = read_array(datum, "weights") if "weights" in datum.inputs else np.ones(targets.shape, np.float32)
    tokens = np.frombuffer(datum.tokens, "<i4")
    computed = np.frombuffer(trained.data, "<f4")
    columns = (targets, given, advantages, weights, computed)
    if not len(tokens) or any(each is None or each.shape != tokens.shape for each in columns):
        return None
    assert weights is not None
    return TrainedSequence(
        tokens=np.concatenate((tokens, targets[-1:])).astype("<i4"),
        weights=weights.astype(np.float32),
        advantages=advantages.astype(np.float32),
        given=given.astype(np.float32),
        trained=computed,
        reward=_reward(datum),
    )


def _reward(datum: Datum) -> float | None:
    """The input `reward`, which no loss reads: one number, or one for each token, whose sum it is then."""
    values = read_array(datum, "reward")
    if values is None or not len(values):
        return None
    # As the client wrote it: the nearest double of a 32-bit 0.1 is above 0.1.
    total = float(str(values.sum()))
    return total if math.isfinite(total) else None


def read_array(datum: Datum, name: str) -> npt.NDArray[np.float32 | np.int64 | np.int32] | None:
    tensor = datum.inputs.get(name)
    if not isinstance(tensor, Dense) or tensor.dtype not in _NUMPY:
        return None
    return np.frombuffer(tensor.data, _NUMPY[tensor.dtype])


@dataclass
class GapMeasure:
    """Measures one pass. Tokens that are not compared are counted by the reason."""

    tokens: int = 0
    total: float = 0.0
    max: float = 0.0
    stale: int = 0
    """Drawn from earlier weights of the model."""
    unknown: int = 0
    """Not drawn here, or at another temperature, or not trained on as a whole."""

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def seen(self) -> int:
        return self.tokens + self.stale + self.unknown

    def merge(self, other: GapMeasure) -> None:
        self.tokens += other.tokens
        self.total += other.total
        self.max = max(self.max, other.max)
        self.stale += other.stale
        self.unknown += other.unknown

    def metrics(self) -> dict[str, float]:
        """Returns the measures as a pass names its metrics."""
        return {
            "same_weights_gap:sum": self.total,
            "same_weights_gap:max": self.max,
            "same_weights_tokens:sum": float(self.tokens),
        }

    def add(self, sequence: TrainedSequence, index: SampleIndex, model_id: str, changed: int) -> DrawnTokens:
        """Compare a sequence. Returns the sampler's log probabilities: as recorded here, else as the client sent them.

        `changed` is the last operation of the model before this pass that changed its weights.
        """
        drawn = DrawnTokens(sequence.given.copy(), np.full(len(sequence.given), -1, np.int32))
        for first, last in sequence.learned_runs():
            sample = sequence.find_sample(index, first, last)
            if sample is None or sample.version.model_id != model_id:
                self.unknown += last - first
                continue
            drawn.logprobs[first:last], drawn.versions[first:last] = sample.logprobs, sample.versions
            if sample.version.seq_id < changed:
                self.stale += last - first
                continue
            distance = np.abs(sequence.trained[first:last].astype(np.float64) - sample.logprobs)
            self.tokens += last - first
            self.total += float(distance.sum())
            self.max = max(self.max, float(distance.max()))
        return drawn


@dataclass
class GapMonitor:
    """The last gap of each model, and which of them are above the alarm; 0 is no alarm."""

    alarm_nats: float = 0.0
    by_model: dict[str, GapStatus] = field(default_factory=dict)

    def record(self, model_id: str, seq_id: int, measure: GapMeasure, at_s: float) -> bool:
        """Record a pass of which tokens were compared. Returns whether the alarm is new."""
        high = bool(self.alarm_nats) and not measure.mean <= self.alarm_nats
        before = self.by_model.pop(model_id, None)
        self.by_model[model_id] = GapStatus(
            mean=measure.mean, max=measure.max, tokens=measure.tokens, seq_id=seq_id, at_s=at_s, high=high
        )
        if len(self.by_model) > MAX_MODELS:
            del self.by_model[next(iter(self.by_model))]
        was_high = before is not None and before.high
        if high and not was_high:
            _log.warning(
                "sampler_gap_high",
                model_id=model_id,
                seq_id=seq_id,
                mean=measure.mean,
                max=measure.max,
                tokens=measure.tokens,
                alarm_nats=self.alarm_nats,
            )
        elif was_high and not high:
            _log.info("sampler_gap_normal", model_id=model_id, seq_id=seq_id, mean=measure.mean)
        return high and not was_high

    def end_alarm(self, model_id: str) -> None:
        """The model was unloaded: nothing learns from its samples any more."""
        gap = self.by_model.get(model_id)
        if gap is not None:
            self.by_model[model_id] = msgspec.structs.replace(gap, high=False)
