"""Slow and hung workers in whole jobs: found and dealt with, and healthy ones never accused."""

from __future__ import annotations

import pytest

from strata.coord.core.facts import CommandKind, StragglerFinding, WorkerJudged, WorkerLost
from strata.coord.core.job_config import EscalationLevel, JobConfig
from tests.core.coord.jobs import CORPUS
from tests.sim.coord.pacing import Gang

SEEDS = 100
GROUPS = 4
PACES = [1.0, 3.0, 8.0]
"""What the steps of the whole job are multiplied with."""


def judged(gang: Gang) -> list[tuple[str, StragglerFinding, EscalationLevel]]:
    return [(fact.worker_id, fact.finding, fact.level) for fact in gang.faults if isinstance(fact, WorkerJudged)]


def live(seed: int, workers: int) -> Gang:
    """A healthy job: noise, checkpoints, comings and goings, and data that makes the steps of all longer or shorter."""
    step_s = [0.5, 2.0, 20.0][seed % 3]
    gang = Gang(seed, workers, step_s=step_s, tells_time=seed % 2 == 0, tells_computing=seed % 5 < 2)
    every_steps = round([0, 15, 60][seed // 3 % 3] / step_s)
    for _ in range(3):
        gang.run(150.0 + 16 * gang.step_s, every_steps=every_steps)
        gang.disturb()
        gang.step_s = step_s * gang.rng.choice(PACES)
    gang.run(150.0 + 16 * gang.step_s, every_steps=every_steps * (seed // 9 % 2))
    return gang


@pytest.mark.parametrize("group", range(GROUPS))
def test_healthy_workers_with_noise_are_never_accused(group: int) -> None:
    for seed in range(group, SEEDS, GROUPS):
        assert live(seed, 2 + seed % 17).faults == [], f"seed {seed}"


@pytest.mark.parametrize("group", range(GROUPS))
def test_two_healthy_workers_are_never_accused(group: int) -> None:
    for seed in range(group, SEEDS, GROUPS):
        assert live(seed, 2).faults == [], f"seed {seed}"


def test_a_straggler_among_sixteen_gets_a_smaller_share_of_the_buckets() -> None:
    gang = Gang(1)
    gang.run(120.0)
    before = gang.share("w05")
    gang.trainers["w05"].factor = 3.0
    while not gang.faults and gang.job.now_s < 2_000.0:
        gang.run(5.0)
    assert judged(gang) == [("w05", StragglerFinding.SLOW, EscalationLevel.REWEIGHT)]
    assert gang.share("w05") == pytest.approx(before / 3, rel=0.25)
    assert gang.job.job.generation == 1, "nobody has to stop for it"
    others = [gang.share(worker) for worker in gang.trainers if worker != "w05"]
    assert min(others) >= before * 0.9


@pytest.mark.parametrize("tells_computing", [False, True])
def test_of_two_workers_the_one_that_becomes_slow_is_found(tells_computing: bool) -> None:
    gang = Gang(7, workers=2, tells_computing=tells_computing)
    gang.run(120.0)
    assert gang.faults == []
    gang.trainers["w01"].factor = 3.0
    gang.run(200.0)
    assert judged(gang) == [("w01", StragglerFinding.SLOW, EscalationLevel.REWEIGHT)]
    gang.trainers["w01"].factor = 1.0
    gang.run(200.0)
    assert judged(gang)[1:] == [("w01", StragglerFinding.FINE, EscalationLevel.NONE)]


def test_who_stays_slow_is_told_to_rebalance_then_to_stop_and_is_gone_if_it_does_not() -> None:
    gang = Gang(2, config=JobConfig(slow_until=EscalationLevel.STOP))
    gang.run(60.0)
    gang.trainers["w03"].factor = 4.0
    told: list[CommandKind] = []
    while "w03" in gang.trainers and gang.job.now_s < 5_000.0:
        trainer = gang.trainers["w03"]
        gang.run(1.0)
        told += [kind for kind in trainer.told if kind not in told]
    assert [rung for _, _, rung in judged(gang)] == [
        EscalationLevel.REWEIGHT,
        EscalationLevel.REBALANCE,
        EscalationLevel.STOP,
    ]
    assert told == [CommandKind.REBALANCE, CommandKind.STOP]
    lost = gang.faults[-1]
    assert isinstance(lost, WorkerLost)
    assert lost.cause.startswith("did not stop when told to: w03 is slow: ")


def test_a_hung_worker_is_stopped_and_its_shards_go_to_others() -> None:
    gang = Gang(3)
    gang.run(60.0)
    gang.job.take("w07", count=3)
    shards = set(gang.held("w07"))
    assert len(shards) == 3
    hung = gang.trainers["w07"]
    hung.hung = True
    began_s = gang.job.now_s
    told: list[CommandKind] = []
    while "w07" in gang.trainers and gang.job.now_s < began_s + 1_000.0:
        gang.run(1.0)
        told += [kind for kind in hung.told if kind not in told]
    took_s = gang.job.now_s - began_s
    print(f"\nstopped after {took_s:.0f} s")
    assert judged(gang) == [
        ("w07", StragglerFinding.HUNG, EscalationLevel.REBALANCE),
        ("w07", StragglerFinding.HUNG, EscalationLevel.STOP),
    ]
    assert told == [CommandKind.REBALANCE, CommandKind.STOP]
    assert 2 * 60.0 <= took_s <= 3 * 60.0
    gang.run(1.0)
    assert "w07" not in gang.job.job.ranks
    gang.job.take("w00", count=3)
    assert shards <= set(gang.held("w00"))
    assert {rest.shard for rest in gang.job.job.datasets[CORPUS].epochs[0].returned} == set()


def test_who_keeps_up_again_gets_its_share_back_also_from_another_coordinator() -> None:
    gang = Gang(4)
    gang.run(60.0)
    gang.trainers["w05"].factor = 3.0
    while not gang.faults:
        gang.run(5.0)
    gang.job.restart()
    gang.trainers["w05"].factor = 1.0
    gang.run(200.0)
    assert judged(gang)[1:] == [("w05", StragglerFinding.FINE, EscalationLevel.NONE)]
    assert gang.job.job.members["w05"].share == 1.0


def test_another_coordinator_stops_who_was_told_to_stop() -> None:
    gang = Gang(5)
    gang.run(60.0)
    gang.trainers["w07"].hung = True
    while len(gang.faults) < 2:
        gang.run(1.0)
    gang.job.restart()
    assert list(gang.job.job.stopping) == ["w07"]
    gang.run(45.0)
    assert isinstance(gang.faults[-1], WorkerLost)
    assert gang.job.job.stopping == {}


def test_slow_hardware_gets_less_data_and_stays() -> None:
    gang = Gang(6, tells_computing=True)
    gang.trainers["w03"].factor = 5.0
    gang.run(600.0)
    assert judged(gang) == [("w03", StragglerFinding.SLOW, EscalationLevel.REWEIGHT)]
    assert "w03" in gang.job.job.ranks
