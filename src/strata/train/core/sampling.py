"""Samples as types: sampling parameters and their defaults (temperature, top-k, top-p, stops), results with log
probabilities, slices; and the largest result (64 MiB).

The ranks keep running sequences and their KV cache between two slices. A `SamplingSlice` adds new requests, removes
cancelled ones, and lets the ranks decode so many tokens; its reply has the samples that ended, and what it added to
those of in-flight samplers. So training runs between two slices, and nothing has to be polled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from strata.base.errors import Code, StrataError

MISSING_LOGPROB: Final = -99999.0
"""Stands at a position of `TopLogprobs` that holds no token; the token there is 0."""
MAX_RESULT_BYTES: Final = 64 << 20
"""The largest result of one request. Rank 0 holds it in memory until the last of its samples has ended, and it goes to
the client in one piece. 64 samples of 4096 tokens, each with the top 20, are two thirds of it."""

MAX_TOP_K: Final = 1024
"""The most likeliest tokens, and draws, that a request may ask for at each position."""
GREEDY_BELOW: Final = 1e-6
"""A temperature below this is 0: greedy decoding."""
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no text yet."""
CONTEXT: Final = 4
"""Tokens that are decoded before those in question: some tokenizers write the first token of a text differently."""


class SampleParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a factory makes is encoded also where it is the default: 0.2.0 encoded these fields, and the digest that a
    repeated request is compared by is that of the encoding."""

    max_tokens: int | None = msgspec.field(default_factory=lambda: None)
    """None is as many as the model's context leaves room for."""
    seed: int | None = msgspec.field(default_factory=lambda: None)
    """The same seed and prompt give the same tokens. Without one, the seed derives from the id of the request: a retry
    gives the same tokens, and another request gives others."""
    stop_tokens: Sequence[int] = msgspec.field(default_factory=lambda: ())
    stop_strings: Sequence[str] = msgspec.field(default_factory=lambda: ())
    end_tokens: bool = msgspec.field(default_factory=lambda: True)
    """Whether the end-of-text tokens of the model stop a sequence too."""
    temperature: float = msgspec.field(default_factory=lambda: 1.0)
    """0 is greedy decoding."""
    top_k: int = msgspec.field(default_factory=lambda: -1)
    """-1 and 0 are no limit."""
    top_p: float = msgspec.field(default_factory=lambda: 1.0)
    min_p: float = 0.0
    """Tokens that are less likely than this share of the likeliest one are cut off; before top-k and top-p."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the sequence has sampled."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the token was sampled."""
    repetition_penalty: float = 1.0
    """Divides the logit of a token of prompt and sequence, or multiplies it if it is negative."""
    logit_bias: Sequence[tuple[int, float]] = ()
    """Tokens, and what is added to the logit of each."""
    grammar: str = ""
    """What may be sampled, in llguidance's form of Lark; empty: anything."""

    @property
    def shapes_logits(self) -> bool:
        """Says whether a token's logit depends on more than the model and the temperature."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.grammar
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def modifies_distribution(self) -> bool:
        """Says whether tokens are drawn from another distribution than that of their logits."""
        is_cut = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0
        return not self.is_greedy and (self.temperature != 1.0 or is_cut)

    @property
    def is_plain(self) -> bool:
        """Says whether tokens are drawn from the model's own distribution, or the likeliest one is taken."""
        return not self.modifies_distribution and not self.shapes_logits


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout of a matrix: dense, or compressed sparse rows. Both index arrays are int64."""

    shape: tuple[int, int]
    crow: bytes | None = None
    col: bytes | None = None


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens whose log-probabilities a client requests, a row for each token of the prompt but the first."""

    tokens: bytes
    """int32, little-endian; -1 requests nothing."""
    layout: Layout


class SampleOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sample"):
    """Continue a prompt, `num_samples` times. The requests of a sampler have no order."""

    sampler_id: str
    seq_id: int
    prompt: bytes
    """Tokens as int32, little-endian."""
    params: SampleParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    """Only of the last so many tokens of the prompt."""
    targets: Targets | None = None
    prompt_draws: int = 0
    """So many tokens are drawn at each position of the prompt but the first."""
    stream: bool = False
    """A client reads the tokens while they are sampled: each is reported as a `SampledPart`."""
    max_staleness: int | msgspec.UnsetType = msgspec.UNSET
    """So many in-flight saves may end after its first durable token while it runs; the next one cancels it. Unset, it
    is not stored, and the digest of the request is what earlier versions computed."""

    @property
    def wants_prompt(self) -> bool:
        numbers = self.prompt_logprobs or self.topk_prompt_logprobs or self.prompt_draws
        return bool(numbers) or self.targets is not None

    @property
    def length(self) -> int:
        return len(self.prompt) // 4


class TopLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The top `k` tokens of each of `length` positions, likeliest first; `MISSING_LOGPROB` where there are fewer."""

    tokens: bytes
    """int32, little-endian, position by position."""
    logprobs: bytes
    """float32."""
    k: int
    length: int

    def first(self, count: int) -> TopLogprobs:
        """Returns those of the first so many positions."""
        end = 4 * self.k * count
        return TopLogprobs(self.tokens[:end], self.logprobs[:end], self.k, count)


class TargetLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    logprobs: bytes
    """float32, 0 where nothing was requested."""
    layout: Layout


class Draws(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds at each of `length` positions `k` tokens, drawn independently at the request's temperature from all
    tokens."""

    tokens: bytes
    """int32, little-endian, position by position."""
    logprobs: bytes
    """float32, the model's own."""
    k: int
    length: int


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a sample that one version of in-flight weights drew, one after the other."""

    version: int
    """The sequence number of the save that published the weights."""
    tokens: int
    recomputed: bool = False
    """This version computed the keys and values of all tokens before the first of them again."""


VersionSpans = tuple[VersionSpan, ...]


def add_span(spans: VersionSpans, span: VersionSpan) -> VersionSpans:
    last = spans[-1] if spans else None
    if last is None or span.recomputed or last.version != span.version:
        return (*spans, span)
    return (*spans[:-1], VersionSpan(last.version, last.tokens + span.tokens, last.recomputed))


class SampledRouting(msgspec.Struct, frozen=True, array_like=True):
    """The experts that a mixture computed tokens with: of each token, of each of its layers with experts."""

    layers: int
    per_token: int
    """Experts of a token in a layer."""
    experts: bytes
    """Their numbers, (tokens, layers, experts of a token), as uint8; as uint16 if a layer has more than 256 experts."""
    wide: bool = False
    """Whether they are uint16."""

    @property
    def token_bytes(self) -> int:
        return self.layers * self.per_token * (2 if self.wide else 1)


class SampledSequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The tokens that were sampled, with the token or the string that stopped the sequence.

    A log-probability is that of the distribution the token was drawn from: after grammar, biases, penalties,
    temperature, min-p, top-k and top-p. With temperature 0, where nothing is drawn, it is that before the temperature.
    """

    tokens: bytes
    """int32, little-endian."""
    logprobs: bytes
    """float32."""
    stop_reason: Literal["stop", "length"]
    top: TopLogprobs | None = None
    versions: VersionSpans = ()
    """Which weights drew the tokens, if the sampler is in flight."""
    routing: SampledRouting | None = None
    """That of the prompt and of all sampled tokens but the last, which was never computed; None if the model does not
    replay it."""


class DrawnSequence(msgspec.Struct, frozen=True, array_like=True):
    """What is durable of a sequence of an in-flight sample that runs, or what a slice added to it."""

    tokens: bytes = b""
    """int32, little-endian."""
    logprobs: bytes = b""
    """float32."""
    versions: VersionSpans = ()
    stop_reason: Literal["", "stop", "length"] = ""
    """Empty while it runs."""
    top: TopLogprobs | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) // 4

    def plus(self, part: DrawnSequence) -> DrawnSequence:
        versions = self.versions
        for span in part.versions:
            versions = add_span(versions, span)
        top = part.top
        if self.top is not None and top is not None:
            tokens, logprobs = self.top.tokens + top.tokens, self.top.logprobs + top.logprobs
            top = TopLogprobs(tokens, logprobs, top.k, self.top.length + top.length)
        return DrawnSequence(
            self.tokens + part.tokens, self.logprobs + part.logprobs, versions, part.stop_reason, top or self.top
        )


class DrawnPart(msgspec.Struct, frozen=True, array_like=True):
    index: int
    """The place among the request's samples."""
    start: int
    """How many tokens of the sequence come before these."""
    added: DrawnSequence


class SampledPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of a sample that runs. Its last token is in no part: that comes with the result."""

    index: int
    """The place among the request's samples."""
    start: int
    """How many tokens of the sample come before these."""
    tokens: bytes
    """int32, little-endian."""
    logprobs: bytes
    """float32."""
    top: TopLogprobs | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // 4

    def after(self, count: int) -> SampledPart:
        """Returns the part without the tokens that are among the first so many of the sample."""
        place = 4 * (count - self.start)
        if place <= 0:
            return self
        top = self.top
        if top is not None:
            first = place * top.k
            top = TopLogprobs(top.tokens[first:], top.logprobs[first:], top.k, self.end - count)
        return SampledPart(self.index, count, self.tokens[place:], self.logprobs[place:], top)


class SampleResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sample"):
    """One sequence per requested sample, in order. Log-probabilities of the prompt are at temperature 1."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: bytes | None = None
    """float32, one per token of the prompt; NaN for the first."""
    top_prompt: TopLogprobs | None = None
    targets: TargetLogprobs | None = None
    draws: Draws | None = None

    @property
    def sampled_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences) // 4


class SampleFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failed"):
    """`user`: the request itself is wrong. `server`: a retry may succeed."""

    category: Literal["user", "server", "cancelled"]
    message: str


SampleOutcome = SampleResult | SampleFailed

_PAIR: Final = 8
"""Bytes of a token with its log-probability."""


def result_bytes(sample: SampleOperation, tokens: int, routing_bytes: int = 0) -> int:
    """The size of the result of a request if each of its samples has so many tokens, and the routing of a token takes
    so many bytes."""
    sampled = sample.num_samples * tokens * _PAIR * (1 + sample.topk_sample_logprobs)
    sampled += sample.num_samples * (sample.length + tokens) * routing_bytes
    per_place = _PAIR * (sample.topk_prompt_logprobs + sample.prompt_draws) + (4 if sample.prompt_logprobs else 0)
    return sampled + sample.length * per_place + (0 if sample.targets is None else len(sample.targets.tokens))


def check_result_size(sample: SampleOperation, tokens: int, routing_bytes: int = 0) -> None:
    """INVALID if the result could exceed `MAX_RESULT_BYTES` when each sample has at most so many tokens."""
    size = result_bytes(sample, tokens, routing_bytes)
    if size > MAX_RESULT_BYTES:
        asked = f"num_samples {sample.num_samples}, up to {tokens} tokens each, a prompt of {sample.length}"
        raise StrataError(
            Code.INVALID,
            f"the answer could have {size >> 20} MiB ({asked}), and {MAX_RESULT_BYTES >> 20} MiB is the most",
            hint="set max_tokens, or ask for fewer samples or for top-k log-probabilities of fewer tokens",
        )


class AddedSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    sample: SampleOperation
    share: str = ""
    """Fair-share key of the slots: the samples of one tenant have the same."""
    weights: str = ""
    """What the ranks call the in-flight weights that it is drawn from; empty: they have the name of its sampler."""
    drawn: Mapping[int, DrawnSequence] = {}
    """Sequences of an in-flight sample that earlier ranks began: they go on from there."""
    routing: bool = False
    """Whether its routing is recorded."""

    @property
    def weights_name(self) -> str:
        return self.weights or self.sample.sampler_id


class SamplingSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SAMPLE"):
    """Decode at most `steps` tokens of each running sequence.

    With `eager`, because a sample waits for a slot, a rank returns as soon as one of its sequences has ended.
    """

    steps: int
    add: Sequence[AddedSample] = ()
    cancel: Sequence[str] = ()
    """Request ids. An ended or unknown one is ignored."""
    eager: bool = False


class SlicePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The journaled part of a slice, beside the samples that it adds."""

    steps: int
    cancel: Sequence[str] = ()
    eager: bool = False


class EndedSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    outcome: SampleOutcome


class SliceResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="slice"):
    """The samples that ended in a slice, those that run on, and the free capacity. Summed over the ranks."""

    ended: Sequence[EndedSample]
    requests: int
    """Requests that continue in the next slice; with none, no slice is needed."""
    running: int
    """Sequences that occupy a slot."""
    waiting: int
    """Sequences that wait for a slot at a rank."""
    free_sequences: int
    free_tokens: int
    sampled_tokens: int
    prompt_tokens: int
    """Prefilled in this slice: once for all samples of a request at one rank."""
    reused_tokens: int = 0
    """Tokens of the same prompts that the prefix cache had."""
    drawn: Mapping[str, Sequence[DrawnPart]] = {}
    """What the slice added to in-flight samples that run on, by request."""


encode_result: Final = msgspec.msgpack.Encoder().encode
decode_result: Final = msgspec.msgpack.Decoder(SampleResult).decode


def decode_context(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> tuple[Sequence[int], str]:
    """The last of these tokens, at least `CONTEXT` if there are so many, and their text. They begin where a character
    does: some tokenizers make no text at all of bytes of which the first ones are missing."""
    last, text = tokens[-CONTEXT:], ""
    for size in range(CONTEXT, 2 * CONTEXT):
        last = tokens[-size:]
        text = decode(last)
        if not text.startswith(REPLACEMENT):
            break
    # What follows may complete the character that they end with.
    return last, text.rstrip(REPLACEMENT)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first of these strings, which a sampled sequence ends with."""
    return text[: min((place for place in map(text.find, stops) if place >= 0), default=None)]
