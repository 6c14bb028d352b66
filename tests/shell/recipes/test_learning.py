"""The arithmetic of the kinds of training, beside torch and by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from strata.base.errors import Code, StrataError
from strata.sdk.operations import Sample
from strata.sdk.recipes.environment import with_failed
from strata.sdk.recipes.preference import preference_loss, preference_weight
from strata.sdk.recipes.recipe import (
    Recipe,
    RecipeData,
    RecipePreference,
    RecipeReinforcement,
    RecipeReward,
    RecipeSampling,
)
from strata.sdk.recipes.reinforcement import (
    ReinforcementTraining,
    choose_loss,
    draw_answers,
    gap_metrics,
    group_advantages,
    pass_rate,
)
from strata.sdk.recipes.rendering import Renderer
from strata.sdk.recipes.rewards import load_reward
from strata.sdk.recipes.rollouts import PromptRow, Rollout
from strata.train.core.model_options import LossName
from strata.train.runner.model.tiny import train_tokenizer
from strata.train.runner.passes.losses import check_config


@pytest.mark.parametrize("margin", [-900.0, -3.0, 0.0, 0.5, 40.0, 9000.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_weight_of_a_pair_are_those_that_torch_derives(margin: float, smoothing: float) -> None:
    dpo = RecipePreference(beta=0.3, label_smoothing=smoothing)
    chosen = torch.tensor(margin, dtype=torch.float64, requires_grad=True)
    logsigmoid = torch.nn.functional.logsigmoid
    loss = -(1 - smoothing) * logsigmoid(0.3 * chosen) - smoothing * logsigmoid(-0.3 * chosen)
    loss.backward()  # type: ignore[no-untyped-call]
    assert chosen.grad is not None
    assert preference_loss(margin, dpo) == pytest.approx(loss.item(), rel=1e-12)
    assert preference_weight(margin, dpo) == pytest.approx(-chosen.grad.item(), rel=1e-9, abs=1e-300)


def test_advantages_are_over_the_mean_of_the_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalise=False) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([2.0, 0.0], normalise=True) == [1.0, -1.0]
    assert group_advantages([1.0, 1.0], normalise=True) == [0.0, 0.0]


def steps_of(*rewards: float, signal: bool) -> list[dict[str, float]]:
    return [{"reward": each, "no_signal_share": 0.5 if signal else 1.0} for each in rewards]


def test_a_run_without_signal_ends_and_says_so() -> None:
    method = reinforcement(RecipeReinforcement(patience=3))
    silent = steps_of(0.0, 0.0, 0.0, signal=False)
    assert method.stop_reason(silent) == (
        "nothing to learn from: in 3 steps all answers to a prompt earned the same, 0 in the mean"
    )
    assert not method.stop_reason(silent[:2])
    assert not method.stop_reason([*silent, *steps_of(0.1, signal=True), *silent[:2]])
    assert not reinforcement(RecipeReinforcement(patience=0)).stop_reason(silent * 9)


def test_a_reward_that_did_not_rise_is_named_at_the_end() -> None:
    method = reinforcement(RecipeReinforcement())
    assert method.outcome(steps_of(0.2, 0.5, 0.5, 0.2, signal=True)) == (
        "the reward did not rise: 0.2 in the first quarter of the steps, 0.2 in the last"
    )
    assert not method.outcome(steps_of(0.2, 0.1, 0.1, 0.3, signal=True))
    assert not method.outcome(steps_of(0.2, 0.1, 0.0, signal=True)), "too few steps to say"


@pytest.mark.parametrize(("number", "k"), [(1, 1), (5, 1), (6, 3), (8, 8)])
def test_the_rate_at_k_is_that_of_all_choices_of_k_answers(number: int, k: int) -> None:
    for passed in range(number + 1):
        answers = [place < passed for place in range(number)]
        choices = list(itertools.combinations(answers, k))
        assert pass_rate(number, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_a_group_of_equal_rewards_has_no_advantage_by_rounding(reward: float) -> None:
    for size in range(2, 50):
        assert group_advantages([reward] * size, normalise=True) == [0.0] * size


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_a_failed_episode_of_a_group_of_equal_rewards_is_no_signal_by_rounding(reward: float) -> None:
    prompt = PromptRow([], {"task": 0})
    failed = StrataError(Code.UNAVAILABLE, "an episode failed")
    for size in range(1, 9):
        group = [Rollout(prompt, Sample([], [], "stop"), reward)] * size
        assert {each.reward for each in with_failed(prompt, [*group, failed])} == {reward}
    assert with_failed(prompt, [failed])[0].reward == 0.0


def test_a_correction_is_a_range_of_importance_weights() -> None:
    tolerance = {"gap_tolerance": 1e-3}
    assert choose_loss(RecipeReinforcement()) == (
        "cispo",
        {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0, **tolerance},
    )
    masked = RecipeReinforcement(correction="mask", correction_level="sequence", correction_limit=4.0)
    switches = {"mask_outliers": 1.0, "sequence_level": 1.0}
    assert choose_loss(masked) == (
        "cispo",
        {"clip_low_threshold": 0.25, "clip_high_threshold": 4.0, **switches, **tolerance},
    )
    ignored = RecipeReinforcement(correction="none", correction_level="sequence")
    assert choose_loss(ignored) == ("cispo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0})
    for loss in ("ppo", "cispo"):
        assert choose_loss(RecipeReinforcement(loss=loss)) == (loss, tolerance)
    for name, config in map(choose_loss, (RecipeReinforcement(), masked, ignored)):
        check_config(LossName(name), config)


def test_the_gap_is_that_of_the_first_substep_and_the_limited_share_that_of_all() -> None:
    first = {"sampled_tokens:sum": 4.0, "sampler_gap:sum": 2.0, "clipped_tokens:sum": 1.0}
    second = {"sampled_tokens:sum": 6.0, "sampler_gap:sum": 9.0, "clipped_tokens:sum": 4.0}
    assert gap_metrics([first, second], RecipeReinforcement()) == {"sampler_gap": 0.5, "limited_share": 0.5}
    assert gap_metrics([first], RecipeReinforcement(correction="none")) == {"sampler_gap": 0.5}
    assert gap_metrics([], RecipeReinforcement()) == {}


@pytest.mark.parametrize(
    ("reward", "text", "expected"),
    [
        (RecipeReward(check="exact"), " 12\n", 1.0),
        (RecipeReward(check="exact"), "12.", 0.0),
        (RecipeReward(check="number"), "5 + 7 makes 12.0", 1.0),
        (RecipeReward(check="number"), "12 or 13", 0.0),
        (RecipeReward(check="number"), "no idea", 0.0),
        (RecipeReward(check="regex", pattern=r"<a>(.*?)</a>"), "so <a> 12 </a>", 1.0),
        (RecipeReward(check="regex", pattern=r"<a>(.*?)</a>"), "so <a>13</a>", 0.0),
        (RecipeReward(check="regex", pattern=r"\d"), "x", 0.0),
        (RecipeReward(check="regex", pattern=r"\d"), "3", 1.0),
    ],
)
def test_a_built_in_check(reward: RecipeReward, text: str, expected: float) -> None:
    assert load_reward(reward, Path())(text, {"answer": 12}) == expected


def test_a_reward_may_be_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(text, row):\n    return len(text) < row['most']\n", encoding="utf-8")
    reward = load_reward(RecipeReward(check="mine.py:short"), tmp_path)
    assert [reward(text, {"most": 3}) for text in ("ab", "abc")] == [1.0, 0.0]
    for check, problem in (("mine.py:long", "has no function 'long'"), ("no.py:x", "there is no Python file")):
        with pytest.raises(StrataError, match=problem):
            load_reward(RecipeReward(check=check), tmp_path)


def reinforcement(
    grpo: RecipeReinforcement,
    sampling: RecipeSampling = RecipeSampling(),  # noqa: B008
) -> ReinforcementTraining:
    recipe = Recipe(kind="grpo", data=RecipeData(path="x"), grpo=grpo, sampling=sampling)
    return ReinforcementTraining(
        examples=[],
        evaluation=[],
        recipe=recipe,
        renderer=Renderer(train_tokenizer(512)),
        reward=load_reward(RecipeReward(), Path()),
        draw=draw_answers(recipe),
        reference=None,
    )


def test_a_reward_does_not_see_the_text_that_has_stopped_the_answer() -> None:
    tokenizer = train_tokenizer(512)
    method = reinforcement(RecipeReinforcement(), RecipeSampling(stop=("\n", "END")))
    rewards = []
    for text in ("12", "12\n", "12END", "12 or 13\n", "\n12"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        sample = Sample(tokens=tokens, logprobs=[0.0] * len(tokens), stop_reason="stop")
        rewards.append(method.reward_of(Rollout(PromptRow([1], {"answer": "12"}), sample)))
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_row_without_the_answer_is_refused() -> None:
    with pytest.raises(StrataError, match="has no column 'answer'"):
        load_reward(RecipeReward(check="exact"), Path())("x", {"prompt": "y"})
