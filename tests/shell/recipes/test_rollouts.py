"""Answers that a run keeps, so that it continues with those that it drew."""

from __future__ import annotations

import struct
from pathlib import Path

from strata.sdk.operations import Sample
from strata.sdk.recipes.environment import kept_branches
from strata.sdk.recipes.rollouts import PromptRow, Rollout, RolloutFile
from strata.sdk.rollout_sessions import RolloutBranch

PROMPTS = [PromptRow([1, 2], {"answer": "3"}), PromptRow([4], {"answer": "5"})]


def nearest_float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def drawn(step: int) -> list[list[Rollout]]:
    logprobs = [nearest_float32(-0.1 * (step + 1)), nearest_float32(-1 / 3)]
    return [[Rollout(prompt, Sample([7, step], logprobs, "length"))] for prompt in PROMPTS]


def keep(file: RolloutFile, *steps: int) -> None:
    for step in steps:
        file.keep(step, drawn(step), max(0, step - 1))
        assert file.take(step, PROMPTS) == (drawn(step), max(0, step - 1))


def test_a_run_that_continues_has_the_answers_of_the_steps_after_its_state(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    keep(RolloutFile.open(path, None), 0, 1, 2)
    again = RolloutFile.open(path, 1)
    assert sorted(again.steps) == [1, 2]
    assert [again.take(step, PROMPTS) for step in (1, 2)] == [(drawn(1), 0), (drawn(2), 1)]
    assert not again.steps, "each was taken once"
    keep(again, 3)
    assert RolloutFile.open(path, 3).take(3, PROMPTS) == (drawn(3), 2)


def test_a_line_that_was_not_written_to_its_end_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    keep(RolloutFile.open(path, None), 0, 1)
    path.write_bytes(path.read_bytes()[:-9])
    again = RolloutFile.open(path, 0)
    assert sorted(again.steps) == [0]
    again.keep(1, drawn(5), 1)
    assert RolloutFile.open(path, 0).take(1, PROMPTS) == (drawn(5), 1)


def test_a_saved_state_and_a_run_that_begins_leave_no_answers(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    keep(RolloutFile.open(path, None), 0)
    anew = RolloutFile.open(path, None)
    assert not anew.steps
    keep(anew, 0)
    anew.clear()
    assert not path.exists()
    anew.clear()


def test_an_episode_is_kept_with_its_mask_its_reward_and_its_other_branches(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    other = Rollout(PROMPTS[0], Sample([1, 6], [0.0, -0.5], "stop"), 0.5, [False, True])
    episode = Rollout(PROMPTS[0], Sample([1, 2, 3], [0.0, -0.5, 0.0], "stop"), 0.5, [False, True, False], (other,))
    RolloutFile.open(file, None).keep(0, [[episode]], 0)
    assert RolloutFile.open(file, 0).take(0, PROMPTS[:1]) == ([[episode]], 0)


def test_only_what_the_model_has_sampled_of_an_episode_has_an_advantage() -> None:
    """The tool's answer, 8 and 9, comes between two turns; the first token has nothing that would predict it."""
    sample = Sample([4, 5, 8, 9, 6], [0.0, -0.25, 0.0, 0.0, -0.5], "stop")
    episode = Rollout(PromptRow([], {"task": 0}), sample, 1.0, [False, True, False, False, True])
    datum = episode.datum([0.5] * 5)
    assert datum.tokens == [4, 5, 8, 9]
    assert datum.targets == [5, 8, 9, 6]
    assert datum.weights == [1.0, 0.0, 0.0, 1.0]
    assert datum.advantages == [0.5, 0.0, 0.0, 0.5]
    assert datum.logprobs == [-0.25, 0.0, 0.0, -0.5]
    assert episode.learned_tokens == 2
    assert episode.mean([9.0, 1.0, 9.0, 9.0, 2.0]) == 1.5


def test_what_a_lost_branch_shares_with_kept_ones_is_learned_once() -> None:
    """Token 2 is of a turn that all share; the server counts it in the first branch alone."""
    lost = RolloutBranch([0, 1], ["a", "b"], [1, 2, 3, 4], [0, 1, 0, 1], [0.0, -0.5, 0.0, -0.25])
    kept = RolloutBranch([0, 2], ["a", "c"], [1, 2, 3, 5], [0, 0, 0, 1], [0.0, 0.0, 0.0, -0.75])
    last = RolloutBranch([0, 3], ["a", "d"], [1, 2, 6], [0, 0, 1], [0.0, 0.0, -1.0])
    other = RolloutBranch([4], ["e"], [7, 2], [0, 1], [0.0, -2.0])
    first, *others = kept_branches([lost, other, kept, last], {"a", "c", "d", "e"})[1:]
    assert (first.weights, first.logprobs) == ([0, 1, 0, 1], [0.0, -0.5, 0.0, -0.75])
    assert others == [last]
    assert kept_branches([lost, other], {"a", "e"}) == [other]
    assert kept_branches([lost, kept], {"a", "b", "c"}) == [lost, kept]
