"""OpenAI-compatible requests and replies: which parameters are read, ignored or refused, limits (`n`, messages, tools,
prompts, stop strings), the default `max_tokens` (16), and the form of replies.

A parameter whose meaning this server would silently break is refused with the reason. Parameters that only describe
the caller are read and ignored; a parameter that is not declared here is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.train.core.sampling import SampleParams
from strata.train.grammar import MAX_GRAMMAR_BYTES, json_grammar, tool_call_grammar
from strata.train.wire.bodies import Int64
from strata.train.wire.fields import Token, invalid_field

MAX_N: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_MESSAGES: Final = 2048
MAX_TOOLS: Final = 128
MAX_PROMPTS: Final = 256
MAX_STOP_STRINGS: Final = 16
MAX_BIASES: Final = 1024
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Templates put the role into control tokens, so it is none of the caller's words."""
DEFAULT_MAX_TOKENS: Final = 16
"""Tokens of a completion that is no chat, as OpenAI has it."""

StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
TokenLimit = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TopCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TemplateValue = bool | int | Annotated[str, msgspec.Meta(max_length=256)] | None

_NEUTRAL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "best_of": ((1,), "every sample is returned, so it has to be left out"),
    "store": ((False,), "completions are not stored for later retrieval"),
    "suffix": (("",), "text is continued at its end only"),
}
"""Parameters that have to have one of these values, and why."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Ignored: nothing is added to the chunks."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: dict[str, Any] = {}
    name: Any = None
    description: Any = None
    strict: Any = None
    """These three are ignored: every schema is enforced."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """None for a text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return {"type": "object"}
            case "json_schema":
                if self.json_schema is None:
                    raise invalid_field("response_format.json_schema", "is missing")
                return self.json_schema.schema


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of completions share."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    """A name of the base model, or the `tinker://` path of a checkpoint."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Int64 | None = None
    stop: StopString | Annotated[Sequence[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], msgspec.Meta(max_length=MAX_BIASES)] | None = None
    return_token_ids: bool | None = None
    """The reply has the tokens of the prompt, and those that were sampled."""
    user: Any = None
    """Ignored: the tenant is that of the key."""

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> Sequence[str]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_neutral(self) -> None:
        """INVALID if a parameter has a value that the sampler would ignore."""
        for name, (values, reason) in _NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in values:
                raise invalid_field(name, reason)
        if self.stream_options is not None and not self.stream:
            raise invalid_field("stream_options", "is for streams only")

    @property
    def biases(self) -> Sequence[tuple[int, float]]:
        biases = self.logit_bias or {}
        if not all(re.fullmatch(r"[0-9]{1,9}", token) for token in biases):
            raise invalid_field("logit_bias", "has keys that are no tokens")
        return tuple(sorted((int(token), bias) for token, bias in biases.items() if bias))

    def params(self, max_tokens: int | None, stop_tokens: Sequence[int] = (), grammar: str = "") -> SampleParams:
        penalty = self.repetition_penalty
        shape = {
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": None if penalty == 1 else penalty,
            "logit_bias": self.biases,
            "grammar": grammar,
        }
        # What is not named is not encoded: 0.2.0 reads plain samples.
        named: dict[str, Any] = {name: value for name, value in shape.items() if value}
        return SampleParams(
            max_tokens=max_tokens,
            seed=self.seed,
            stop_tokens=tuple(stop_tokens),
            stop_strings=tuple(self.stop_strings),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=-1 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            **named,
        )


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: Annotated[Sequence[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tools: Annotated[Sequence[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    store: bool | None = None
    chat_template_kwargs: Annotated[dict[str, TemplateValue], msgspec.Meta(max_length=16)] | None = None
    """Variables of the model's own template, such as `enable_thinking`; no template is taken from a request."""
    prompt_token_ids: Annotated[Sequence[Token], msgspec.Meta(min_length=1)] | None = None
    """The prompt itself, in place of what the template makes of the messages."""
    metadata: Any = None
    prompt_cache_key: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    verbosity: Any = None
    """These six are ignored."""

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Those that the model is shown."""
        return None if self.tool_choice == "none" or not self.tools else list(self.tools)

    @property
    def top(self) -> int:
        return self.top_logprobs or 0

    def check(self) -> None:
        self.check_neutral()
        if self.max_tokens == 0:
            raise invalid_field("max_tokens", "has to be at least 1")
        if self.top_logprobs and not self.logprobs:
            raise invalid_field("top_logprobs", "needs logprobs")
        if self.parallel_tool_calls is False and self.offered_tools and not self._forces_tools:
            raise invalid_field("parallel_tool_calls", "the sampler limits a reply to one call only if it has to call")

    @property
    def _forces_tools(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    def grammar(self) -> str:
        """Returns what the reply has to be; empty if it may be any text."""
        schema = None if self.response_format is None else self.response_format.schema
        if schema is not None and self.offered_tools:
            raise invalid_field("response_format", "cannot be enforced on a reply that may call a tool")
        if schema is not None:
            grammar = json_grammar(schema)
        elif self._forces_tools:
            grammar = tool_call_grammar(self._forced_tools(), several=self.parallel_tool_calls is not False)
        else:
            return ""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            field = "tools" if schema is None else "response_format"
            raise invalid_field(field, f"has more than {MAX_GRAMMAR_BYTES >> 10} KiB")
        return grammar

    def _forced_tools(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Name and schema of the arguments of each tool that the reply may call."""
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        forced: list[tuple[str, Mapping[str, Any]]] = []
        for place, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            schema = (function.get("parameters") or {}) if isinstance(function, dict) else None
            if not isinstance(name, str) or not isinstance(schema, dict):
                raise invalid_field(f"tools[{place}]", "needs a function with a name, and parameters by a schema")
            if wanted in (None, name):
                forced.append((name, schema))
        if not forced:
            raise invalid_field("tool_choice", "names no tool of the request")
        return forced

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as templates expect them: one text each, and arguments of calls as objects."""
        return [template_message(f"messages[{index}]", message) for index, message in enumerate(self.messages)]


def template_message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") not in ROLES:
        raise invalid_field(f"{where}.role", f"is to be one of {', '.join(sorted(ROLES))}")
    rewritten = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        rewritten["content"] = "".join(
            _text_of(f"{where}.content[{place}]", part) for place, part in enumerate(content)
        )
    elif content is not None and not isinstance(content, str):
        raise invalid_field(f"{where}.content", "is to be text, or a list of parts")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        rewritten["tool_calls"] = [
            _template_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)
        ]
    elif calls is not None:
        raise invalid_field(f"{where}.tool_calls", "is to be a list")
    return rewritten


def _text_of(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise invalid_field(where, 'only parts of the type "text" are read')
    return text


def _template_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise invalid_field(where, "is to have a function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        raise invalid_field(f"{where}.function.arguments", "are not JSON") from None
    return {**call, "function": {**function, "arguments": parsed}}


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: str | Sequence[str | Token | Sequence[Token]]
    """A text, several texts, tokens, or several lists of tokens."""
    echo: bool | None = None
    logprobs: TopCount | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def generated(self) -> int:
        """The most tokens of each sample that are shown; with `echo` there may be none."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        self.check_neutral()
        if self.max_tokens == 0 and not self.echo:
            raise invalid_field("max_tokens", "has to be at least 1 without echo")

    def prompts(self) -> Sequence[str | Sequence[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        tokens = [each for each in prompt if isinstance(each, int)]
        if tokens and len(tokens) == len(prompt):
            return [tokens]
        several = [each for each in prompt if not isinstance(each, int)]
        if not several or tokens or len({type(each) for each in several}) > 1:
            raise invalid_field("prompt", "is to be a text, a list of texts, tokens, or a list of lists of tokens")
        if len(several) > MAX_PROMPTS:
            raise invalid_field("prompt", f"has {len(several)} prompts; at most {MAX_PROMPTS} are taken at once")
        return several


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    owned_by: str
    root: str
    """The base model."""
    object: Literal["model"] = "model"


class ModelCards(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[ModelCard]
    object: Literal["list"] = "list"


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(prompt_tokens: int, completion_tokens: int) -> TokenUsage:
    return TokenUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: Sequence[int] | None
    """None if the token is a part of a character."""
    top_logprobs: Sequence[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: Sequence[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str
    """JSON."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | msgspec.UnsetType = msgspec.UNSET
    """The index in a stream."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None
    tool_calls: Sequence[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] = "assistant"


FinishReason = Literal["stop", "length", "tool_calls"]


TokenIds = Sequence[int] | msgspec.UnsetType
"""Left out unless the client wants them."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: TokenIds = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: TokenIds = msgspec.UNSET
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: Sequence[ToolCall] = ()


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: TokenIds = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: TokenUsage | None = None
    prompt_token_ids: TokenIds = msgspec.UNSET
    """The first chunk of the first choice has them."""
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of the tokens of one choice, in order."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    """None for the first token of a text."""
    top_logprobs: Sequence[Mapping[str, float] | None]
    text_offset: Sequence[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET
    """The first chunk of each choice in a stream has them."""


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Also a chunk of a stream."""

    id: str
    created: int
    model: str
    choices: Sequence[TextChoice]
    usage: TokenUsage | None = None
    object: Literal["text_completion"] = "text_completion"
