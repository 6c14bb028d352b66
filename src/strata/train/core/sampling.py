"""Sampling: what a client asks for, what comes of it, and the quanta in which the ranks work on it.

The ranks keep the sequences they are sampling, and what they remember of them, between two commands. A command (a
`Quantum`) brings new requests, takes back cancelled ones, and lets them go on for so many tokens; its reply has what
ended meanwhile. So training goes on between two quanta, and nobody asks whether something is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from strata.base.errors import Code, StrataError

MISSING_LOGPROB: Final = -99999.0
"""In a place of a `TopLogprobs` that holds no token; the token there is 0."""
MOST_ANSWER_BYTES: Final = 64 << 20
"""What one request can be answered. Rank 0 has it in memory until the last of its samples has ended, and it goes to the
client in one piece. 64 samples of 4096 tokens, each with the 20 likeliest, are two thirds of it."""


class SampleParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_tokens: int | None = None
    """None is as many as the model's context leaves room for."""
    seed: int | None = None
    """The same seed and prompt give the same tokens. Without one, chance comes from the request's own name: asked
    again under that name it gives the same, and another request gives something else."""
    stop_tokens: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    end_tokens: bool = True
    """Whether the model's own end of text stops a sequence too."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = -1
    """-1 and 0 are no limit."""
    top_p: float = 1.0


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which places of a matrix are given: all, row by row, or those of compressed rows. Both indices are int64."""

    shape: tuple[int, int]
    crow: bytes | None = None
    col: bytes | None = None


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of which a client wants to know how likely they were, a row for each token of the prompt but the first."""

    tokens: bytes
    """int32, little-endian; -1 asks for nothing."""
    layout: Layout


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sample"):
    """Continue a prompt, `num_samples` times. A sampler's weights never change; its requests have no order."""

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
    """Only the last so many tokens of the prompt are spoken of."""
    targets: Targets | None = None
    prompt_draws: int = 0
    """So many tokens are drawn at each place of the prompt but the first."""

    @property
    def wants_prompt(self) -> bool:
        numbers = self.prompt_logprobs or self.topk_prompt_logprobs or self.prompt_draws
        return bool(numbers) or self.targets is not None

    @property
    def length(self) -> int:
        return len(self.prompt) // 4


class TopLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For each of `length` places the `k` likeliest tokens, likeliest first; `MISSING_LOGPROB` where there are less."""

    tokens: bytes
    """int32, little-endian, place by place."""
    logprobs: bytes
    """float32."""
    k: int
    length: int


class TargetLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    logprobs: bytes
    """float32, 0 where nothing was asked for."""
    layout: Layout


class Draws(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At each of `length` places `k` tokens, each drawn by itself at the request's temperature from all tokens."""

    tokens: bytes
    """int32, little-endian, place by place."""
    logprobs: bytes
    """float32, the model's own."""
    k: int
    length: int


class SampledSequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was sampled, with the token or the string that stopped it.

    A log-probability is that of the distribution the token was drawn from: after temperature, top-k and top-p. With
    temperature 0, where nothing is drawn, it is the model's own.
    """

    tokens: bytes
    """int32, little-endian."""
    logprobs: bytes
    """float32."""
    stop_reason: Literal["stop", "length"]
    top: TopLogprobs | None = None


class SampleResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sample"):
    """One sequence per sample asked for, in order. What is said of the prompt is the model's own, at temperature 1."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: bytes | None = None
    """float32, one per token of the prompt; NaN for the first, which nothing comes before."""
    top_prompt: TopLogprobs | None = None
    targets: TargetLogprobs | None = None
    draws: Draws | None = None


class SampleFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failed"):
    """`user`: the request itself cannot work. `server`: the same again may work."""

    category: Literal["user", "server", "cancelled"]
    message: str


SampleOutcome = SampleResult | SampleFailed

_PAIR: Final = 8
"""Bytes of a token with its log-probability."""


def answer_bytes(sample: Sample, tokens: int) -> int:
    """How large the result of a request is, if each of its samples has so many tokens."""
    sampled = sample.num_samples * tokens * _PAIR * (1 + sample.topk_sample_logprobs)
    per_place = _PAIR * (sample.topk_prompt_logprobs + sample.prompt_draws) + (4 if sample.prompt_logprobs else 0)
    return sampled + sample.length * per_place + (0 if sample.targets is None else len(sample.targets.tokens))


def check_answer(sample: Sample, tokens: int) -> None:
    """INVALID if the result could be larger than it may be, where each sample has at most so many tokens."""
    size = answer_bytes(sample, tokens)
    if size > MOST_ANSWER_BYTES:
        asked = f"num_samples {sample.num_samples}, up to {tokens} tokens each, a prompt of {sample.length}"
        raise StrataError(
            Code.INVALID,
            f"the answer could have {size >> 20} MiB ({asked}), and {MOST_ANSWER_BYTES >> 20} MiB is the most",
            hint="set max_tokens, or ask for fewer samples or for top-k log-probabilities of fewer tokens",
        )


class Added(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    sample: Sample
    share: str = ""
    """Requests with the same text here share what is theirs of the places: those of one tenant."""


class Quantum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SAMPLE"):
    """Let the ranks go on sampling for at most `steps` tokens of each sequence.

    With `eager`, because somebody waits for a place, a rank comes back as soon as one of its sequences has ended.
    """

    steps: int
    add: Sequence[Added] = ()
    cancel: Sequence[str] = ()
    """Request ids. One that has ended meanwhile, or never was, is no error."""
    eager: bool = False


class QuantumPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is journaled of a quantum beside the requests that it adds."""

    steps: int
    cancel: Sequence[str] = ()
    eager: bool = False


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request_id: str
    outcome: SampleOutcome


class QuantumDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="quantum"):
    """What ended in a quantum, how much goes on, and what there is room for. All of it in the sum over the ranks."""

    ended: Sequence[Ended]
    requests: int
    """That go on with the next quantum; with none, there is nothing to send one for."""
    running: int
    """Sequences that have their place."""
    waiting: int
    """Sequences that wait at a rank for theirs."""
    free_sequences: int
    free_tokens: int
    sampled_tokens: int
    prompt_tokens: int
    """That were computed in this quantum: once for all samples of a request that one rank has."""


encode_result: Final = msgspec.msgpack.Encoder().encode
decode_result: Final = msgspec.msgpack.Decoder(SampleResult).decode
