"""Turns on shared devices, over seeds: never both sides awake, no side starves, and each safeguard is missed."""

from __future__ import annotations

import pytest

from strata.base.errors import Code, StrataError
from strata.train.orchestrator.device_turns import STUCK_S
from tests.sim.train.device_turns import ENGINE, SAFEGUARDS, World, run_seed, seams

SEEDS = 60


@pytest.mark.proves("ranks and engines that take turns on devices are never awake at once")
def test_no_seed_finds_both_sides_awake_or_one_that_starves() -> None:
    assert {seed: found for seed in range(SEEDS) if (found := run_seed(seed))} == {}


@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_without_a_safeguard_a_seed_finds_both_awake(safeguard: str) -> None:
    found = (run_seed(seed, safeguard) for seed in range(200))
    assert any(violation and "awake at once" in violation for violation in found)


async def test_an_engine_that_is_ready_and_does_not_sleep_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1)
    world.healed = True

    async def refuse(name: str) -> None:
        raise StrataError(Code.UNAVAILABLE, f"{name} was told to sleep, and is awake")

    monkeypatch.setattr(world, "sleep_engine", refuse)
    restarted: list[str] = []
    with seams(world):
        await world.run(restarted.append, steps=600, demands_turns=False)
    assert restarted
    assert set(restarted) == {ENGINE}
    assert world.server.now_s > STUCK_S
