"""Renders rows to tokens by the chat template, decides which tokens are learned, and words missing columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from strata.base.errors import Code, StrataError
from strata.sdk.operations import Datum
from strata.sdk.recipes.rows import Row

Prompt = str | Sequence[Mapping[str, Any]]
"""Text as it is, or the messages of a conversation."""
Supervise = Literal["assistant", "all"]
ROWS: Final = {
    "sft": "messages, or prompt and completion, or text",
    "dpo": "prompt, chosen and rejected, or chosen and rejected as conversations",
    "grpo": "prompt",
    "distill": "prompt",
}
"""The columns that each kind of recipe reads."""
_SEGMENTS = list[tuple[str, bool]]
_ROLES: Final = {"human": "user", "gpt": "assistant"}
"""The roles of ShareGPT, in the words of chat templates."""


@dataclass(frozen=True)
class TokenExample:
    """A sequence, and for each of its tokens whether it is learned."""

    tokens: Sequence[int]
    learned: Sequence[bool]

    @property
    def learned_tokens(self) -> int:
        """The first token has nothing before it that would predict it."""
        return sum(self.learned[1:])

    def datum(self, weight: float = 1.0) -> Datum:
        weights = [weight if each else 0.0 for each in self.learned[1:]]
        return Datum(self.tokens[:-1], self.tokens[1:], weights)


class Renderer:
    """Texts and conversations as tokens, by the model's own tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, name: str | Path) -> Renderer:
        """Loads from a folder, or by an id of the Hugging Face Hub whose files are in the cache."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(name), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise StrataError(Code.INVALID, f"cannot load the tokenizer {name}: {reason}") from error
        return cls(tokenizer)

    def example(self, row: Row, supervise: Supervise) -> TokenExample:
        """Makes an example of a row with messages, with a prompt and a completion, or with a text."""
        messages = _messages(row)
        if messages is not None:
            return self._conversation(messages, supervise, row.get("tools"))
        if "prompt" in row and "completion" in row:
            return self.answer(row["prompt"], row["completion"])
        if isinstance(row.get("text"), str):
            tokens = [*self._tokenizer.encode(row["text"]), *self._end]
            return TokenExample(tokens, [True] * len(tokens))
        raise _missing("sft", row)

    def pair(self, row: Row) -> tuple[TokenExample, TokenExample]:
        """The chosen and the rejected answer of a row, each after its prompt."""
        answers = [row.get(name) for name in ("chosen", "rejected")]
        prompt = row.get("prompt")
        if prompt is None and not any(isinstance(answer, str) for answer in answers):
            # Two conversations, whose beginning is the prompt.
            prompt = []
        if prompt is None or None in answers:
            raise _missing("dpo", row)
        chosen, rejected = (self.answer(prompt, answer) for answer in answers if answer is not None)
        return chosen, rejected

    def answer(self, prompt: Prompt, answer: Prompt) -> TokenExample:
        """A prompt and the answer that is learned; the last message of an answer that is a conversation.

        Such a conversation may have the prompt as its beginning.
        """
        if isinstance(prompt, str) and isinstance(answer, str):
            before = self._tokenizer.encode(prompt)
            after = [*self._tokenizer.encode(answer, add_special_tokens=False), *self._end]
            return TokenExample([*before, *after], [False] * len(before) + [True] * len(after))
        opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        closing = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else list(answer)
        whole = closing if _begins_with(closing, opening) else [*opening, *closing]
        return self._conversation(whole, "last", None)

    def prompt(self, row: Row) -> list[int]:
        """Returns what an answer is sampled after."""
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            tokens: list[int] = self._tokenizer.encode(prompt)
            return tokens
        messages = prompt if isinstance(prompt, Sequence) and prompt else None
        if messages is None:
            raise _missing("grpo", row)
        return self._encode(self._template(messages, answer_next=True, tools=row.get("tools")))

    def text(self, tokens: Sequence[int]) -> str:
        """Decodes an answer, without the special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def require_same_tokens(self, other: Renderer, whose: str) -> None:
        """INVALID if a number is another token for the other tokenizer."""
        own, others = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        differing = sorted(token for token in own.keys() | others.keys() if own.get(token) != others.get(token))
        if differing:
            raise StrataError(
                Code.INVALID,
                f"{whose} has another tokenizer: it has {len(others)} tokens and the model has {len(own)}; "
                f"{len(differing)} differ, such as {differing[0]!r}",
                hint="take a teacher of the same family",
            )

    @property
    def _end(self) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [] if end is None else [int(end)]

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], supervise: Supervise | Literal["last"], tools: Any
    ) -> TokenExample:
        whole = self._template(messages, tools=tools)
        segments: _SEGMENTS = [(whole, True)]
        if supervise != "all":
            segments = self._answers(messages, whole, tools, only_last=supervise == "last")
        tokens: list[int] = []
        learned: list[bool] = []
        for text, is_learned in segments:
            # Each segment by itself, as a sampler that continues a prompt would have it.
            encoded = self._encode(text)
            tokens += encoded
            learned += [is_learned] * len(encoded)
        return TokenExample(tokens, learned)

    def _answers(self, messages: Sequence[Mapping[str, Any]], whole: str, tools: Any, *, only_last: bool) -> _SEGMENTS:
        """The rendered conversation, cut where an answer of the assistant begins and ends."""
        segments: _SEGMENTS = []
        position = 0
        for index, message in enumerate(messages):
            is_last = index == len(messages) - 1
            if message.get("role") != "assistant" or (only_last and not is_last):
                continue
            before = self._template(messages[:index], answer_next=True, tools=tools) if index else ""
            through = whole if is_last else self._template(messages[: index + 1], tools=tools)
            if not (whole.startswith(through) and through.startswith(before) and len(before) >= position):
                raise StrataError(
                    Code.INVALID,
                    "the chat template renders an earlier answer otherwise once others follow it",
                    hint='end each conversation with the answer to learn, or set data.supervise = "all"',
                )
            segments += [(whole[position : len(before)], False), (whole[len(before) : len(through)], True)]
            position = len(through)
        if not segments:
            raise StrataError(Code.INVALID, "a conversation has no answer of the assistant to learn")
        return [*segments, (whole[position:], False)]

    def _template(self, messages: Sequence[Mapping[str, Any]], *, answer_next: bool = False, tools: Any = None) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise StrataError(
                Code.INVALID,
                "the model's tokenizer has no chat template",
                hint="give prompts and answers as text, which is used as it is",
            )
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer_next, tools=tools or None
            )
        except Exception as error:
            raise StrataError(Code.INVALID, f"the chat template fails: {error}") from error
        return rendered

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


def _messages(row: Row) -> list[Mapping[str, Any]] | None:
    if isinstance(row.get("messages"), Sequence):
        return list(row["messages"])
    if isinstance(row.get("conversations"), Sequence):
        return [
            {"role": _ROLES.get(each["from"], each["from"]), "content": each["value"]} for each in row["conversations"]
        ]
    return None


def _begins_with(conversation: Sequence[Mapping[str, Any]], opening: Sequence[Mapping[str, Any]]) -> bool:
    """Says whether the opening is the beginning of the conversation, which may have a system message in front of it."""
    messages, expected = (
        [(each.get("role"), each.get("content")) for each in part] for part in (conversation, opening)
    )
    if messages and messages[0][0] == "system" and (not expected or expected[0][0] != "system"):
        messages = messages[1:]
    return messages[: len(expected)] == expected


def _missing(kind: str, row: Row) -> StrataError:
    return StrataError(
        Code.INVALID,
        f"a row needs {ROWS[kind]}; this one has {', '.join(row) or 'nothing'}",
        hint=f"strata recipes show {kind}",
    )
