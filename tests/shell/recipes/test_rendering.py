"""Which tokens are learned, beside what transformers makes of the same conversation."""

from __future__ import annotations

from typing import Any

import pytest

from strata.base.errors import StrataError
from strata.sdk.recipes.rendering import Renderer
from strata.train.runner.model.tiny import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(512)


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]


def test_a_conversation_is_what_the_chat_template_makes_of_it(renderer: Renderer, tokenizer: Any) -> None:
    example = renderer.example({"messages": TALK}, "assistant")
    assert tokenizer.decode(example.tokens) == tokenizer.apply_chat_template(TALK, tokenize=False)
    learned = [token for token, is_learned in zip(example.tokens, example.learned, strict=True) if is_learned]
    assert tokenizer.decode(learned) == "Two.<|im_end|>\nFour.<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(TALK[:2], tokenize=False, add_generation_prompt=True)
    before = tokenizer.encode(prompt, add_special_tokens=False)
    assert example.tokens[: len(before)] == before


def test_all_of_a_conversation_can_be_learned(renderer: Renderer) -> None:
    assert all(renderer.example({"messages": TALK}, "all").learned)


def test_sharegpt_is_the_same_conversation(renderer: Renderer) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[each["role"]], "value": each["content"]} for each in TALK]
    assert renderer.example({"conversations": shared}, "assistant") == renderer.example({"messages": TALK}, "assistant")


def test_text_is_used_as_it_is_and_ends(renderer: Renderer, tokenizer: Any) -> None:
    example = renderer.example({"prompt": "2+3=", "completion": "5"}, "assistant")
    assert tokenizer.decode(example.tokens) == "2+3=5<|endoftext|>"
    assert example.learned_tokens == 2
    assert renderer.example({"text": "abc"}, "assistant").learned_tokens == len(tokenizer.encode("abc"))


def test_a_pair_learns_the_last_answer_alone(renderer: Renderer, tokenizer: Any) -> None:
    chosen, rejected = renderer.pair({"prompt": TALK[:4], "chosen": "Four.", "rejected": "FOUR."})
    for example, text in ((chosen, "Four."), (rejected, "FOUR.")):
        learned = [token for token, is_learned in zip(example.tokens, example.learned, strict=True) if is_learned]
        assert tokenizer.decode(learned) == f"{text}<|im_end|>\n"


@pytest.mark.parametrize("prompt", ["One?", TALK[1:2]])
@pytest.mark.parametrize("system", [[], TALK[:1]])
def test_a_prompt_that_the_answers_of_a_pair_begin_with_is_there_once(
    renderer: Renderer, tokenizer: Any, prompt: Any, system: list[dict[str, str]]
) -> None:
    whole = [*system, *TALK[1:3]]
    chosen, _ = renderer.pair({"prompt": prompt, "chosen": whole, "rejected": whole})
    assert tokenizer.decode(chosen.tokens) == tokenizer.apply_chat_template(whole, tokenize=False)
    without, _ = renderer.pair({"chosen": whole, "rejected": whole})
    assert without == chosen
    apart, _ = renderer.pair({"prompt": [*system, *TALK[1:2]], "chosen": TALK[2:3], "rejected": TALK[2:3]})
    assert apart == chosen


def test_a_pair_of_texts_needs_a_prompt(renderer: Renderer) -> None:
    with pytest.raises(StrataError, match=r"a row needs prompt, chosen and rejected.*this one has question"):
        renderer.pair({"question": "One?", "chosen": "Two.", "rejected": "TWO."})
    with pytest.raises(StrataError, match="a row needs prompt, chosen and rejected"):
        renderer.pair({"prompt": None, "chosen": TALK[1:3], "rejected": "TWO."})


def test_another_tokenizer_is_refused(renderer: Renderer) -> None:
    renderer.require_same_tokens(Renderer(train_tokenizer(512)), "the teacher")
    with pytest.raises(StrataError, match=r"the teacher has another tokenizer: it has 3\d\d tokens and"):
        renderer.require_same_tokens(Renderer(train_tokenizer(300)), "the teacher")


def test_a_prompt_of_messages_asks_for_the_answer(renderer: Renderer, tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(TALK[:2], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(renderer.prompt({"prompt": TALK[:2]})) == rendered


def test_a_row_of_another_form_is_refused(renderer: Renderer) -> None:
    with pytest.raises(StrataError, match="a row needs messages, or prompt and completion, or text"):
        renderer.example({"question": "x"}, "assistant")
    with pytest.raises(StrataError, match="has no answer of the assistant"):
        renderer.example({"messages": TALK[:2]}, "assistant")


def test_a_template_that_renders_history_otherwise_is_refused(tokenizer: Any) -> None:
    class Forgetful:
        chat_template = "x"
        eos_token_id = 0

        def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
            # Earlier answers lose their thoughts, as with some reasoning models.
            return "".join(each["content"] for each in messages[:-1]).replace("Two", "") + messages[-1]["content"]

        def encode(self, text: str, **_: object) -> list[int]:
            return list(text.encode())

    with pytest.raises(StrataError, match="renders an earlier answer otherwise"):
        Renderer(Forgetful()).example({"messages": TALK}, "assistant")
