"""Order of data, schedules and steps follow from the recipe alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from strata.base.errors import StrataError
from strata.sdk.recipes.batches import batch_at, derive_seed, held_out, learning_rate, total_steps
from strata.sdk.recipes.recipe import RecipeTraining


def test_every_pass_over_the_data_has_each_example_once_in_another_order() -> None:
    train = RecipeTraining(batch_size=4, seed=3)
    drawn = [each for step in range(10) for each in batch_at(step, 10, train)]
    passes = [drawn[at : at + 10] for at in range(0, 40, 10)]
    assert all(Counter(each) == Counter(range(10)) for each in passes)
    assert len({tuple(each) for each in passes}) == 4
    assert batch_at(7, 10, train) == drawn[28:32]
    assert batch_at(7, 10, RecipeTraining(batch_size=4, seed=4)) != drawn[28:32]


def test_what_is_held_out_is_not_trained_on() -> None:
    kept, chosen = held_out(20, 0.2, seed=1)
    assert len(chosen) == 4
    assert sorted(kept + chosen) == list(range(20))
    with pytest.raises(StrataError, match="too few"):
        held_out(1, 0.5, seed=1)


def test_steps_follow_from_epochs() -> None:
    assert total_steps(10, RecipeTraining(batch_size=4)) == 3
    assert total_steps(10, RecipeTraining(batch_size=4, epochs=2.0)) == 5
    assert total_steps(10, RecipeTraining(steps=7)) == 7


def test_the_cosine_schedule_is_that_of_torch() -> None:
    train = RecipeTraining(learning_rate=0.1, schedule="cosine")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for step in range(20):
        assert learning_rate(step, 20, train) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_zero() -> None:
    train = RecipeTraining(learning_rate=1.0, schedule="linear", warmup_steps=4)
    assert [learning_rate(step, 8, train) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed("sample", 1, 2) == derive_seed("sample", 1, 2) == 31_457_386
    assert derive_seed("sample", 1, 2) != derive_seed("sample", 12)
