"""Grammars of guided samples: of JSON that a schema describes and of calls of tools, and their compilation with limits
by llguidance (extra `guided`).

Schemas come from clients. A process with limits of memory and time compiles each before its request is accepted
(`strata.train.api.template_process`); the ranks compile it again, with the same limits of llguidance.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from strata.base.errors import Code, StrataError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
"""How the models that were trained on this form (Hermes, Qwen) write a call: a JSON object between these."""
LINE: Final = "\n"
MAX_GRAMMAR_BYTES: Final = 64 << 10
COMPILED: Final = 32
"""Grammars that a rank keeps compiled."""
LIMITS: Final[dict[str, Any]] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""What one grammar may take. A step of 100,000 units of fuel takes milliseconds."""
_FORM: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most programs write it: no model can fill its reply with spaces."""
_SHARED: Final = ("$defs", "definitions")
"""Where a schema keeps what it refers to by `#/$defs/…`: from the root."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    return f"start: %json {_encode({**schema, 'x-guidance': _FORM})}\n"


def tool_call_grammar(tools: Sequence[tuple[str, Mapping[str, Any]]], *, several: bool) -> str:
    """A call of one of these tools, by name and schema of its arguments, or several calls."""
    rules = [f"start: call ({_encode(LINE)} call)*" if several else "start: call"]
    names = [f"tool{number}" for number in range(len(tools))]
    rules.append(f"call: {_encode(CALL_START + LINE)} ({' | '.join(names)}) {_encode(LINE + CALL_END)}")
    rules += [f"{name}: %json {_encode(_call_schema(*tool))}" for name, tool in zip(names, tools, strict=True)]
    return "\n".join(rules) + "\n"


def _call_schema(name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    shared = {key: arguments[key] for key in _SHARED if key in arguments}
    own = {key: value for key, value in arguments.items() if key not in _SHARED}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {**own, "type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": _FORM,
        **shared,
    }


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def validate_grammar(grammar: str) -> str:
    """Returns why a grammar cannot be compiled; empty if it can. Blocking, for as long as the limits allow."""
    from llguidance import LLMatcher

    message = LLMatcher.validate_grammar(grammar, limits=_limits())
    return "" if message.startswith("WARNING") else message


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


class GrammarCompiler:
    """Compiles grammars for the tokens of one model."""

    def __init__(self, tokenizer: Any, end_tokens: Collection[int], vocabulary: int) -> None:
        """`tokenizer` is one of transformers, and a fast one. UNSUPPORTED without llguidance, or for another one."""
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise missing_library() from error
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(end_tokens) or None)
        except ValueError as error:
            raise StrataError(Code.UNSUPPORTED, f"grammars need a fast tokenizer: {error}") from error
        self._compile = lru_cache(COMPILED)(self._compile_grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of the grammar. INVALID if it cannot be compiled."""
        return self._compile(grammar).deep_copy()

    def _compile_grammar(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise StrataError(Code.INVALID, f"the grammar cannot be compiled: {matcher.get_error()[:300]}")
        return matcher


def check_library() -> None:
    """UNSUPPORTED if llguidance is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        raise missing_library()


def missing_library() -> StrataError:
    return StrataError(
        Code.UNSUPPORTED,
        "samples by a schema need llguidance, which is not installed here",
        hint="pip install 'strata-train[guided]' at the server and its hosts",
    )
