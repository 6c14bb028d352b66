"""The text of a sample while it runs, against what the tokenizers of transformers decode in one piece."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from strata.base.errors import StrataError
from strata.train.api.text import ModelText, TextStream
from strata.train.core.sampling import REPLACEMENT
from strata.train.grammar import CALL_START
from strata.train.runner.model.tiny import train_tokenizer
from strata.train.runner.sampling.sequences import StopStrings

WORDS: Final = ("▁one", "▁two", "ab", "c", "日", "\n", "▁", "é")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: spaces are a sign, a text has none at its beginning, and some tokens are bytes."""
    vocabulary = {"</s>": 0} | {word: place for place, word in enumerate(WORDS, 1)}
    vocabulary |= {f"<0x{byte:02X}>": len(WORDS) + 1 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")  # type: ignore[no-untyped-call]


def bytes_of(text: str) -> list[int]:
    return [len(WORDS) + 1 + byte for byte in text.encode()]


BYTE_LEVEL: Final = train_tokenizer(400)
FALLBACK: Final = byte_fallback()


def streamed(tokenizer: Any, tokens: list[int], cuts: list[int], stops: list[str], *, tools: bool = False) -> list[str]:
    """What is shown after each group of tokens."""
    stream, shown, start = TextStream(ModelText(tokenizer), stops, (), tools=tools), [], 0
    for cut in [*cuts, len(tokens)]:
        shown.append(stream.add(tokens[start : start + cut]))
        start += cut
        if start >= len(tokens):
            break
    return shown


def first_stop(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


PIECES: Final = ("Grüße", "日本語", "😀👍🏽", "a b", " stop", "s", "st", "sto", "\n", "é\u0301", "STOP!")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=8),
    st.lists(st.integers(1, 5), max_size=60),
    st.lists(st.sampled_from(["stop", "STOP!", "日本", "b", " sx", "é"]), max_size=3),
)
def test_a_stream_adds_up_to_the_text_before_its_stop_and_cuts_no_character(
    pieces: list[str], cuts: list[int], stops: list[str]
) -> None:
    text = "".join(pieces)
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False)
    expected = first_stop(text, stops)
    shown = streamed(BYTE_LEVEL, tokens, cuts, stops)
    assert expected.startswith("".join(shown))
    assert REPLACEMENT not in "".join(shown)
    stream = TextStream(ModelText(BYTE_LEVEL), stops, (), tools=False)
    sent = "".join(stream.add([token]) for token in tokens)
    assert sent + stream.rest(expected) == expected
    if not stops:
        assert sent == expected, "nothing is held back that cannot be a part of something"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_tokens_stream_as_they_decode(data: st.DataObject) -> None:
    """Also bytes that are no text, and special tokens."""
    assert BYTE_LEVEL.all_special_ids == [0, 1]
    tokens = data.draw(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), min_size=1, max_size=40))
    expected = str(BYTE_LEVEL.decode(tokens, skip_special_tokens=True))
    stream = TextStream(ModelText(BYTE_LEVEL), (), (), tools=False)
    sent = "".join(stream.add([token]) for token in tokens)
    assert expected.startswith(sent)
    assert sent + stream.rest(expected) == expected
    assert expected[len(sent) :].strip(REPLACEMENT) == "" or expected.endswith(REPLACEMENT)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["▁one", "▁two", "ab", "c", "日", "▁", "語", "😀", "ö"]), st.integers(0, 9)),
        min_size=1,
        max_size=12,
    )
)
def test_tokens_of_bytes_and_of_words_stream_as_they_decode(pieces: list[tuple[str, int]]) -> None:
    """Each after so many special tokens."""
    tokens: list[int] = []
    for piece, special in pieces:
        tokens += [0] * special + ([WORDS.index(piece) + 1] if piece in WORDS else bytes_of(piece))
    expected = str(FALLBACK.decode(tokens, skip_special_tokens=True))
    stream = TextStream(ModelText(FALLBACK), (), (), tools=False)
    assert "".join(stream.add([token]) for token in tokens) == expected
    assert REPLACEMENT not in expected


def test_text_that_contradicts_what_was_returned_is_an_error() -> None:
    """A byte that is no text makes none of those before it, by this kind of tokenizer."""
    stream, tokens = TextStream(ModelText(FALLBACK), (), (), tools=False), [*bytes_of("L"), bytes_of("日")[0]]
    assert "".join(stream.add([token]) for token in tokens) == "L"
    with pytest.raises(StrataError, match="differs from what was sent"):
        stream.rest(str(FALLBACK.decode(tokens, skip_special_tokens=True)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["▁one", "ab", "日", "語", "😀", "ö"]), min_size=1, max_size=9), st.integers(0, 20))
def test_text_goes_on_after_a_prompt_that_ends_in_bytes(pieces: list[str], cut: int) -> None:
    tokens: list[int] = []
    ends = [0]
    for piece in pieces:
        tokens += [WORDS.index(piece) + 1] if piece in WORDS else bytes_of(piece)
        ends.append(len(tokens))
    prompt = ends[cut % len(ends)]
    whole = str(FALLBACK.decode(tokens, skip_special_tokens=True))
    text = ModelText(FALLBACK)
    continued = text.continuation(tokens[:prompt], tokens[prompt:])
    assert text.decode(tokens[:prompt]) + continued == whole
    stream = TextStream(text, (), tokens[:prompt], tools=False)
    assert "".join(stream.add([token]) for token in tokens[prompt:]) == continued


def test_a_stop_string_of_bytes_is_found_among_bytes() -> None:
    tokens = bytes_of("日語日語本")
    stops = StopStrings(lambda each: str(FALLBACK.decode(list(each))), ["語本"], bytes_of("語😀"))
    assert [end for end in range(1, len(tokens) + 1) if stops.match(tokens[:end])] == [len(tokens)]


@pytest.mark.parametrize("stop", ["stop", "日本"])
def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none(stop: str) -> None:
    stream = TextStream(ModelText(BYTE_LEVEL), [stop], (), tools=False)

    def add(text: str) -> str:
        return stream.add(BYTE_LEVEL.encode(text, add_special_tokens=False))

    assert add(f"a{stop[:-1]}") == "a"
    assert add("x") == f"{stop[:-1]}x"
    assert add(stop[:1]) == ""
    assert add(f"{stop[1:]} and more") == ""
    assert stream.rest(f"a{stop[:-1]}x") == ""


def test_a_call_of_a_tool_is_held_back_with_the_space_before_it() -> None:
    stream = TextStream(ModelText(BYTE_LEVEL), [], (), tools=True)

    def add(text: str) -> str:
        return stream.add(BYTE_LEVEL.encode(text, add_special_tokens=False))

    assert add("I look \n") == "I look"
    assert add("again.\n<tool") == " \nagain."
    assert add("box> ") == "\n<toolbox>"
    assert add(f"{CALL_START}{{") == ""
    assert add('"name": "add"}</tool_call> x') == ""
