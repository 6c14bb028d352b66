"""Answers that a run keeps, so that it continues with those that it drew."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from strata.sdk.operations import Sample
from strata.sdk.recipes.rollouts import PromptRow, Rollout, RolloutFile

PROMPTS = [PromptRow([1, 2], {"answer": "3"}), PromptRow([4], {"answer": "5"})]


def nearest_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def drawn(step: int) -> list[list[Rollout]]:
    logprobs = [nearest_float32(-0.1 * (step + 1)), nearest_float32(-1 / 3)]
    return [[Rollout(prompt, Sample([7, step], logprobs, "length"))] for prompt in PROMPTS]


def never() -> list[list[Rollout]]:
    pytest.fail("these answers were drawn before")


def test_a_run_that_continues_has_the_answers_of_the_steps_after_its_state(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    before = RolloutFile.open(file, None)
    for step in range(3):
        assert before.groups(step, PROMPTS, lambda step=step: drawn(step)) == drawn(step)  # type: ignore[misc]
    again = RolloutFile.open(file, 1)
    assert [again.groups(step, PROMPTS, never) for step in (1, 2)] == [drawn(1), drawn(2)]
    assert again.groups(3, PROMPTS, lambda: drawn(3)) == drawn(3)
    assert RolloutFile.open(file, 3).groups(3, PROMPTS, never) == drawn(3)


def test_a_line_that_was_not_written_to_its_end_is_drawn_again(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    before = RolloutFile.open(file, None)
    for step in range(2):
        before.groups(step, PROMPTS, lambda step=step: drawn(step))  # type: ignore[misc]
    file.write_bytes(file.read_bytes()[:-9])
    again = RolloutFile.open(file, 0)
    assert again.groups(0, PROMPTS, never) == drawn(0)
    assert again.groups(1, PROMPTS, lambda: drawn(5)) == drawn(5)
    assert RolloutFile.open(file, 0).groups(1, PROMPTS, never) == drawn(5)


def test_a_saved_state_and_a_run_that_begins_leave_no_answers(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    RolloutFile.open(file, None).groups(0, PROMPTS, lambda: drawn(0))
    anew = RolloutFile.open(file, None)
    assert anew.groups(0, PROMPTS, lambda: drawn(4)) == drawn(4)
    anew.clear()
    assert not file.exists()
    anew.clear()
