"""Penalties, biases, min-p and grammars: the distribution of each token is the one that Hugging Face's processors make,
and what a grammar lets through is what independent readers of JSON and of schemas accept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import MISSING_LOGPROB, AddedSample, SampleParams, SampleResult
from strata.train.grammar import json_grammar, tool_call_grammar
from strata.train.runner.sampling.sampling_ops import LogitsProcessor, sample_tokens
from tests.shell.train_sampler.stage import (
    BASE,
    Reference,
    Stage,
    ask,
    logprobs_in,
    prompt_of,
    tokens_in,
    top_in,
    warpers,
)

CLOSE: Final = 4e-4
"""A penalty multiplies the rounding of a logit."""


def openai_penalties(params: SampleParams, sampled: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The formula of OpenAI's documents."""
    counts = torch.bincount(torch.tensor(sampled, dtype=torch.int64), minlength=len(logits)).float()
    return logits - counts * params.frequency_penalty - (counts > 0).float() * params.presence_penalty


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.2},
        {"min_p": 0.05, "temperature": 1.6, "top_k": 40, "top_p": 0.9},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.8, "temperature": 0.9},
        {"presence_penalty": 1.5, "frequency_penalty": -0.7},
        {"frequency_penalty": 2.0, "temperature": 0.0},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"logit_bias": [(7, 4.0), (9, -100.0), (200, 3.5)]},
        {"logit_bias": [(8, 2.0)], "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_p": 0.01, "top_p": 0.95},
    ],
    ids=str,
)
def test_each_token_is_drawn_from_the_distribution_of_the_processors(
    params: dict[str, Any], stage: Stage, models: Path
) -> None:
    theirs = Reference.load(models / "llama")
    prompt = prompt_of(7, 12)
    sample = ask(prompt, num=3, max_tokens=24, seed=4, topk_sample_logprobs=6, end_tokens=False, **params)
    plain = ask(prompt, num=3, max_tokens=24, seed=4, end_tokens=False, temperature=params.get("temperature", 1.0))
    # Beside samples that nothing shapes, in one batch.
    outcomes = stage.all({"shaped": sample, "plain": plain})
    shaped, untouched = outcomes["shaped"], outcomes["plain"]
    assert isinstance(shaped, SampleResult)
    assert isinstance(untouched, SampleResult)
    assert [tokens_in(each) for each in shaped.sequences] != [tokens_in(each) for each in untouched.sequences]
    assert [each.tokens for each in untouched.sequences] == [each.tokens for each in stage.one(plain).sequences]
    biased = msgspec.structs.replace(sample.params, temperature=0.0)
    cut = msgspec.structs.replace(sample.params, logit_bias=(), repetition_penalty=1.0)
    for sequence in shaped.sequences:
        tokens = tokens_in(sequence)
        ids = torch.tensor([[*tokens_in(prompt), *tokens]])
        with torch.no_grad():
            logits = theirs.model(ids).logits[0].float()
        top_tokens, top_logprobs = top_in(sequence.top)
        for place, token in enumerate(tokens):
            end = len(tokens_in(prompt)) + place
            # In the order of vLLM: biases, repetition, presence and frequency, temperature, what is cut off.
            row = warpers(biased)(ids[:, :end], logits[end - 1 : end])[0]
            row = openai_penalties(sample.params, tokens[:place], row)
            own = torch.log_softmax(warpers(cut)(ids[:, :end], row[None]), -1)[0]
            assert abs(float(own[token]) - float(logprobs_in(sequence)[place])) < CLOSE
            if not sample.params.temperature:
                assert float(own.max() - own[token]) < CLOSE
            there = top_logprobs[place] != MISSING_LOGPROB
            assert there.sum() == min(6, int(own.isfinite().sum()))
            np.testing.assert_allclose(
                own[torch.tensor(top_tokens[place])].numpy()[there], top_logprobs[place][there], atol=CLOSE
            )


def test_min_p_is_that_of_the_warper_for_each_row() -> None:
    logits = torch.tensor([[1.5, -0.3, 0.9, 2.0, -4.0], [0.0, 0.0, 0.0, 0.0, -1.0]])
    params = [SampleParams(min_p=0.5, temperature=0.7), SampleParams()]
    uniform = torch.tensor([0.3, 0.3], dtype=torch.float64)
    found = sample_tokens(logits, LogitsProcessor(params, 5, torch.device("cpu")), uniform).distribution
    for row, each in enumerate(params):
        wanted = torch.log_softmax(warpers(each)(torch.zeros(1, 1, dtype=torch.int64), logits[row : row + 1]), -1)[0]
        torch.testing.assert_close(found[row], wanted)


POINT: Final[Any] = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMAS: Final[list[dict[str, Any]]] = [
    {"type": "object"},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blå"]}, "maxItems": 3},
            "score": {"type": "number", "minimum": -100, "maximum": 100},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
        },
        "required": ["name", "age", "tags", "score", "next"],
        "additionalProperties": False,
        "$defs": {"point": POINT},
    },
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 1, "maxItems": 4},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]+$", "maxLength": 12},
    {"const": {"a": [1, None, "x"]}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_what_is_sampled_by_a_schema_conforms_to_it(schema: dict[str, Any], stage: Stage, models: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(str(models / "llama"))
    found = stage.one(ask(prompt_of(3, 9), num=16, max_tokens=300, seed=1, grammar=json_grammar(schema)))
    ended = [each for each in found.sequences if each.stop_reason == "stop"]
    assert len(ended) >= 4, "too few ended to say something"
    for sequence in ended:
        text = tokenizer.decode(tokens_in(sequence)[:-1])
        jsonschema_rs.Draft202012Validator(schema).validate(json.loads(text))
        assert np.isfinite(logprobs_in(sequence)).all()


def test_the_log_probabilities_of_guided_tokens_are_those_among_what_is_allowed(stage: Stage, models: Path) -> None:
    """The only choice is between two constants, whose tokens are all the grammar allows."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(models / "llama"))
    prompt = prompt_of(3, 9)
    grammar = 'start: "a" | "b"\n'
    sample = ask(prompt, num=64, max_tokens=2, seed=1, grammar=grammar, topk_sample_logprobs=3)
    found = stage.one(sample)
    choices = [tokenizer.convert_tokens_to_ids(each) for each in "ab"]
    own = Reference.load(models / "llama").distributions(prompt, [0])[-1]
    wanted = torch.log_softmax(own[choices], -1)
    for sequence in found.sequences:
        first, second = tokens_in(sequence)
        assert abs(float(logprobs_in(sequence)[0]) - float(wanted[choices.index(first)])) < CLOSE
        # Nothing but the end is left.
        assert (second, float(logprobs_in(sequence)[1]), sequence.stop_reason) == (tokenizer.eos_token_id, 0.0, "stop")
    assert {tokens_in(each)[0] for each in found.sequences} == set(choices)


@pytest.mark.parametrize("several", [False, True])
def test_a_forced_call_is_of_one_of_the_tools_with_its_arguments(stage: Stage, models: Path, several: bool) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(str(models / "llama"))
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    closed = {"additionalProperties": False}
    arguments: dict[str, Any] = {
        "add": {"type": "object", "properties": {"a": number}, "required": ["a"], **closed},
        "move": {"properties": {"to": {"$ref": "#/$defs/p"}}, "required": ["to"], "$defs": {"p": POINT}, **closed},
    }
    grammar = tool_call_grammar(list(arguments.items()), several=several)
    found = stage.one(ask(prompt_of(3, 9), num=16, max_tokens=200, seed=1, grammar=grammar))
    names: set[str] = set()
    for sequence in found.sequences:
        if sequence.stop_reason != "stop":
            continue
        text = tokenizer.decode(tokens_in(sequence)[:-1])
        calls = text.split("</tool_call>\n") if several else [text]
        for call in calls:
            written = json.loads(call.removesuffix("</tool_call>").removeprefix("<tool_call>"))
            assert written.keys() == {"name", "arguments"}
            jsonschema_rs.Draft202012Validator(arguments[written["name"]]).validate(written["arguments"])
            names.add(written["name"])
    assert names == {"add", "move"}


def test_a_grammar_that_cannot_be_compiled_is_refused(stage: Stage) -> None:
    for grammar in ("start: (", "nonsense", 'start: %json {"type": "color"}'):
        with pytest.raises(StrataError, match="the grammar cannot be compiled") as error:
            stage.sampler.cost(AddedSample("it", ask(prompt_of(1, 3), BASE, grammar=grammar)))
        assert error.value.code is Code.INVALID
