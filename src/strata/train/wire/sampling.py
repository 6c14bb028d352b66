"""Requests for samples in the training protocol, and their results: fields, defaults, limits (stops, target tokens),
and conversion to core types.

Of a prompt a client may get log probabilities of tokens that it names, and of alternatives that are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.sampling import (
    MISSING_LOGPROB,
    Draws,
    Layout,
    SampledSequence,
    SampleOperation,
    SampleParams,
    SampleResult,
    TargetLogprobs,
    Targets,
    TopLogprobs,
)
from strata.train.status import views
from strata.train.status.completion_log import CLIENT_BLOCK
from strata.train.wire.arrays import check_tensor
from strata.train.wire.bodies import Name, SaveBody, StrictBody, tinker_path
from strata.train.wire.fields import Token, invalid_field
from strata.train.wire.pass_request import UNPUBLISHED
from strata.train.wire.pb import tinker_pb2 as pb
from strata.train.wire.sdk_fields import SdkDecoder
from strata.train.wire.tinker_json import TensorJson, tensor_of, write

MAX_TARGETS: Final = 1 << 18
"""They go into the journal with their request."""
_FIELD: Final = "target_prompt_logprobs"
MAX_STOPS: Final = 64
Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class PromptChunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "EncodedTextChunk"
    type: str = "encoded_text"
    tokens: Sequence[Token] = ()


class ModelInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "ModelInput"
    chunks: Sequence[msgspec.Raw]


class SamplingParamsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "SamplingParams"
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Sequence[str | Token] | None = None
    """None: the model's own end of text. An empty list: nothing stops it. Anything else stops it beside that end."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0

    def to_core(self) -> SampleParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        if len(stop) > MAX_STOPS:
            raise invalid_field("sampling_params.stop", f"has {len(stop)} entries; at most {MAX_STOPS} are looked for")
        return SampleParams(
            max_tokens=self.max_tokens,
            seed=self.seed,
            stop_tokens=tuple(each for each in stop if isinstance(each, int)),
            stop_strings=tuple(each for each in stop if isinstance(each, str)),
            end_tokens=self.stop is None or len(stop) > 0,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


class SampleRequest(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "SampleRequest"
    sampling_session_id: Name | None = None
    seq_id: Number | None = None
    prompt: ModelInput
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    base_model: Name | None = None
    model_path: Name | None = None
    target_prompt_logprobs: TensorJson | None = None
    prompt_alt_tokens_k: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    prompt_logprobs_last_n: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    record_stability_info: bool | None = None
    max_staleness: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """So many in-flight saves may end while the sample runs. The SDK `tinker` does not send it."""

    def operation(self) -> SampleOperation:
        if self.sampling_session_id is None or self.seq_id is None:
            raise invalid_field("sampling_session_id", "a sample needs a sampling session and a sequence number")
        if self.record_stability_info:
            raise invalid_field(
                "record_stability_info",
                f"it is for the loss stable_reinforce, which this server has not: {UNPUBLISHED['stable_reinforce']}",
            )
        prompt = _tokens(self.prompt)
        length = len(prompt) // 4
        last, named = self.prompt_logprobs_last_n, self.target_prompt_logprobs
        if last is not None and (not self.prompt_logprobs or last >= length):
            raise invalid_field(
                "prompt_logprobs_last_n", f"needs prompt_logprobs, and is 1 to {length - 1} for this prompt"
            )
        return SampleOperation(
            sampler_id=self.sampling_session_id,
            seq_id=self.seq_id,
            prompt=prompt,
            params=self.sampling_params.to_core(),
            num_samples=self.num_samples,
            prompt_logprobs=bool(self.prompt_logprobs),
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
            prompt_logprobs_last_n=last,
            targets=None if named is None else targets_of(named, length),
            prompt_draws=self.prompt_alt_tokens_k,
            max_staleness=msgspec.UNSET if self.max_staleness is None else self.max_staleness,
        )


class _Kind(msgspec.Struct):
    type: str = "encoded_text"


_kinds: Final = msgspec.json.Decoder(_Kind)
_chunks: Final = SdkDecoder(PromptChunk)


def _tokens(prompt: ModelInput) -> bytes:
    tokens: list[int] = []
    for index, raw in enumerate(prompt.chunks):
        where = f"prompt.chunks[{index}]"
        try:
            kind = _kinds.decode(raw).type
            if kind != "encoded_text":
                raise invalid_field(where, f"this server samples from tokens, not from {kind[:80]}")
            tokens += _chunks.decode(raw).tokens
        except msgspec.MsgspecError as error:
            raise invalid_field(where, str(error)) from None
    if not tokens:
        raise invalid_field("prompt", "has no tokens")
    return np.asarray(tokens, dtype="<i4").tobytes()


class CreateSamplingSession(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "CreateSamplingSessionRequest"
    session_id: Name
    sampling_session_seq_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    base_model: Name | None = None
    model_path: Name | None = None

    def operation(self, served: str) -> ops.OpenSampler:
        """`served` is the base of this server."""
        sampler_id = sampler_id_of(self.session_id, self.sampling_session_seq_id)
        if self.model_path is not None:
            run_id, kind, name = tinker_path(self.model_path)
            return ops.OpenSampler(sampler_id, served, ops.SavedWeights(run_id, kind, name))
        if self.base_model != served:
            raise StrataError(Code.INVALID, f"base_model: this server has {served!r}, not {self.base_model!r}")
        return ops.OpenSampler(sampler_id, served)


class SaveWeightsForSampler(SaveBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "SaveWeightsForSamplerRequest"
    sampling_session_seq_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"

    def operation(self) -> ops.SaveWeights | ops.SaveSampler:
        """Files with a name, or a sampler that lives only in memory."""
        inflight = self.kind == "inflight"
        if self.path is None and self.sampling_session_seq_id is not None:
            session_id = self.model_id.rpartition(":train:")[0]
            sampler_id = sampler_id_of(session_id, self.sampling_session_seq_id)
            return ops.SaveSampler(self.model_id, self.seq_id, sampler_id, inflight)
        if inflight:
            raise invalid_field("kind", "an in-flight sampler has a sampling_session_seq_id and no path")
        return self.save("sampler_weights")


class SampleFuture(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    sample_sequence_ids: Sequence[str]
    """One for each sample, in order."""


class SamplingSession(msgspec.Struct, frozen=True, kw_only=True):
    sampling_session_id: str
    type: str = "create_sampling_session"


class JoinSamplingSession(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "JoinSamplingSessionRequest"
    sampling_session_id: Name


class JoinedSession(msgspec.Struct, frozen=True, kw_only=True):
    client_counter: int
    """No other copy has it; the first client is 0."""
    type: str = "join_sampling_session"


class SamplerReply(msgspec.Struct, frozen=True, kw_only=True):
    sampler_id: str
    base_model: str
    model_path: str | None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """`inflight`: later saves replace its weights, and the built-in sampler draws its samples, whatever engines there
    are."""


class SamplerTarget(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "SamplingSessionFuturesTarget"
    sampling_session_id: Name
    cloned_sampler_id: Annotated[int, msgspec.Meta(ge=0, le=2**62 // CLIENT_BLOCK)] = 0


class RetrieveFutures(StrictBody, frozen=True, kw_only=True):
    sdk_model: ClassVar[str] = "FuturesRetrieveRequest"
    target: SamplerTarget
    prev_cursor: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """The cursor of the reply before; 0 is the beginning."""
    timeout: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None
    """Shorter than the server would wait."""
    retrieved_request_ids: Sequence[str] = ()
    """Nothing is done about them: a result is kept for as long as was promised."""


class SampleCompletion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    state: str
    """`finished` or `failed`; which failure it is, or the result, `retrieve_future` says."""
    request_id: str
    response_payload_uncompressed_size: int | None = None


class SampleCompletions(msgspec.Struct, frozen=True, kw_only=True):
    completions: Sequence[SampleCompletion]
    cursor: int


def sampler_id_of(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def is_sampler_id(text: str) -> bool:
    return ":sample:" in text and "/" not in text


def completions_of(ended: views.SamplesEnded) -> SampleCompletions:
    completions = [
        SampleCompletion(state="failed", request_id=each.future_id)
        if each.size is None
        else SampleCompletion(
            state="finished", request_id=each.future_id, response_payload_uncompressed_size=max(each.size, 1)
        )
        for each in ended.ended
    ]
    return SampleCompletions(completions=completions, cursor=ended.cursor)


def write_proto(result: SampleResult) -> bytes:
    message = pb.SampleResponse(prompt_logprobs=result.prompt_logprobs)
    for each in result.sequences:
        reason = pb.STOP_REASON_UNSPECIFIED if each.stop_reason == "stop" else pb.STOP_REASON_LENGTH
        sequence = message.sequences.add(stop_reason=reason, tokens=each.tokens, logprobs=each.logprobs)
        if each.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top(each.top))
    if result.top_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(result.top_prompt))
    if result.targets is not None:
        message.target_prompt_logprobs.CopyFrom(targets_to_proto(result.targets))
    if result.draws is not None:
        message.prompt_alt_tokens.CopyFrom(draws_to_proto(result.draws))
    return message.SerializeToString()


def _top(top: TopLogprobs) -> pb.TopkLogprobs:
    return pb.TopkLogprobs(token_ids=top.tokens, logprobs=top.logprobs, k=top.k, length=top.length)


def write_json(result: SampleResult) -> bytes:
    reply: dict[str, Any] = {"type": "sample", "sequences": [_sequence(each) for each in result.sequences]}
    if result.prompt_logprobs is not None:
        logprobs = np.frombuffer(result.prompt_logprobs, "<f4").tolist()
        reply["prompt_logprobs"] = [None if math.isnan(each) else each for each in logprobs]
    if result.top_prompt is not None:
        reply["topk_prompt_logprobs"] = _top_logprobs(result.top_prompt)
    if result.targets is not None:
        reply["target_prompt_logprobs"] = targets_to_json(result.targets)
    if result.draws is not None:
        reply["prompt_alt_tokens"] = draws_to_json(result.draws)
    return write(reply)


def _sequence(sequence: SampledSequence) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "stop_reason": sequence.stop_reason,
        "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
        "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
    }
    if sequence.versions:
        fields["versions"] = [msgspec.structs.asdict(span) for span in sequence.versions]
    return fields if sequence.top is None else fields | {"topk_logprobs": _top_logprobs(sequence.top)}


def _top_logprobs(top: TopLogprobs) -> list[list[tuple[int, float]] | None]:
    """None where nothing was computed."""
    return [pairs or None for pairs in top_pairs(top)]


def top_pairs(top: TopLogprobs) -> list[list[tuple[int, float]]]:
    """Returns for each position the likeliest tokens with their log probabilities."""
    tokens = np.frombuffer(top.tokens, "<i4").reshape(top.length, top.k).tolist()
    logprobs = np.frombuffer(top.logprobs, "<f4").reshape(top.length, top.k).tolist()
    return [
        [(token, value) for token, value in zip(ids, values, strict=True) if value > MISSING_LOGPROB]
        for ids, values in zip(tokens, logprobs, strict=True)
    ]


def targets_of(sent: TensorJson, length: int) -> Targets:
    """A row of tokens for each token of the prompt but the first."""
    tensor = tensor_of(_FIELD, sent)
    if tensor.dtype is not ops.DType.I64 or len(tensor.shape) != 2 or tensor.shape[0] != length - 1:
        actual = f"{tensor.dtype.value} of {list(tensor.shape)}"
        raise invalid_field(_FIELD, f"is to be int64 of [{length - 1}, K], and is {actual}")
    check_tensor(_FIELD, tensor)
    tokens = np.frombuffer(tensor.data, "<i8")
    if tokens.size > MAX_TARGETS:
        raise invalid_field(_FIELD, f"names {tokens.size} tokens; at most {MAX_TARGETS} are looked up at once")
    if ((tokens < -1) | (tokens >= 2**31)).any():
        raise invalid_field(_FIELD, "names what is no token; -1 stands for none")
    shape = tensor.shape[0], tensor.shape[1]
    layout = Layout(shape, tensor.crow, tensor.col) if isinstance(tensor, ops.Sparse) else Layout(shape)
    return Targets(tokens.astype("<i4").tobytes(), layout)


def targets_to_proto(targets: TargetLogprobs) -> pb.Tensor:
    layout = targets.layout
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=layout.shape)
    if layout.crow is None or layout.col is None:
        tensor.dense = targets.logprobs
    else:
        sparse = pb.SparseCsr(values=targets.logprobs, crow_indices=layout.crow, col_indices=layout.col)
        tensor.sparse_csr.CopyFrom(sparse)
    return tensor


def draws_to_proto(draws: Draws) -> pb.PromptAltTokens:
    shape = [draws.length, draws.k]
    tokens = np.frombuffer(draws.tokens, "<i4").astype("<i8").tobytes()
    return pb.PromptAltTokens(
        tokens=pb.Tensor(dense=tokens, dtype=pb.DTYPE_INT64, shape=shape),
        logprobs=pb.Tensor(dense=draws.logprobs, dtype=pb.DTYPE_FLOAT32, shape=shape),
    )


def targets_to_json(targets: TargetLogprobs) -> dict[str, Any]:
    layout = targets.layout
    tensor: dict[str, Any] = {
        "data": np.frombuffer(targets.logprobs, "<f4").tolist(),
        "dtype": "float32",
        "shape": layout.shape,
    }
    if layout.crow is not None and layout.col is not None:
        tensor["sparse_crow_indices"] = np.frombuffer(layout.crow, "<i8").tolist()
        tensor["sparse_col_indices"] = np.frombuffer(layout.col, "<i8").tolist()
    return tensor


def draws_to_json(draws: Draws) -> dict[str, Any]:
    shape = [draws.length, draws.k]
    return {
        "tokens": {"data": np.frombuffer(draws.tokens, "<i4").tolist(), "dtype": "int64", "shape": shape},
        "logprobs": {"data": np.frombuffer(draws.logprobs, "<f4").tolist(), "dtype": "float32", "shape": shape},
    }
