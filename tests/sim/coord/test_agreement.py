"""A requested checkpoint of programs that ask after some steps: committed where the ranks share steps, else refused."""

from __future__ import annotations

import random

import pytest

from tests.sim.coord.agreement import Agreement

HISTORIES = 40


def draw(seed: int) -> tuple[random.Random, int]:
    chance = random.Random(f"ranks {seed}")
    return chance, chance.randint(1, 5)


@pytest.mark.parametrize("lockstep", [False, True], ids=["apart", "lockstep"])
def test_ranks_that_ask_after_every_nth_step_write_one_checkpoint(lockstep: bool) -> None:
    for seed in range(HISTORIES):
        chance, count = draw(seed)
        stride, first = chance.choice((1, 2, 3, 7, 10, 50)), chance.randrange(100)
        found = Agreement(seed, [(stride,)] * count, [first] * count, lockstep=lockstep).run()
        assert found.committed is not None, f"seed {seed}: {found}"
        assert (found.committed - first) % stride == 0


def test_ranks_whose_strides_differ_write_a_checkpoint_of_a_step_that_all_ask_after() -> None:
    for seed in range(HISTORIES):
        chance, count = draw(seed)
        strides = [(chance.choice((1, 2, 3, 4, 6)),) for _ in range(count)]
        # All of them ask after step 12 and its multiples.
        found = Agreement(seed, strides, [0] * count, lockstep=False).run()
        assert found.committed is not None, f"seed {seed}: {found}"
        assert all(found.committed % stride == 0 for (stride,) in strides)


@pytest.mark.parametrize("lockstep", [False, True], ids=["apart", "lockstep"])
def test_ranks_that_share_no_step_are_refused_with_their_strides(lockstep: bool) -> None:
    for seed in range(HISTORIES):
        chance, _ = draw(seed)
        stride = chance.choice((2, 4, 10))
        found = Agreement(seed, [(stride,), (stride,)], [0, 1], lockstep=lockstep).run()
        assert found.committed is None
        assert found.refusal is not None
        assert f"after every {stride} steps" in found.refusal or "went past" in found.refusal


def test_programs_that_ask_at_odd_places_get_a_checkpoint_or_a_reason() -> None:
    outcomes = []
    for seed in range(HISTORIES):
        chance, count = draw(seed)
        places = tuple(chance.randint(1, 15) for _ in range(chance.randint(1, 6)))
        outcomes.append(Agreement(seed, [places] * count, [0] * count, lockstep=chance.random() < 0.5).run())
    assert any(found.committed is not None for found in outcomes)
