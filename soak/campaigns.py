"""The soak campaigns: simulated ones are functions of a seed, the others inject faults into real processes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from soak import fleet
from soak.coord import failover, kill, load, partitions, restart, scale, zombie
from soak.fleet_agent import kill as agent_kill
from soak.fleet_agent import zombie as agent_zombie
from soak.fleet_hub import kill as hub_kill
from soak.fleet_hub import postgres as hub_postgres
from soak.fleet_hub import two_hubs
from soak.mixed import kill as mixed_kill
from soak.train import kill as train_kill
from soak.train import noise as train_noise
from soak.trials import CampaignRequest, CampaignResult, OnProgress
from tests.sim.coord import epochs, lineage
from tests.sim.register import scenario as register
from tests.sim.train import scenario as train


class Finding(msgspec.Struct, frozen=True):
    """What one seed showed: no problem, or a text for a person."""

    seed: int
    problem: str | None


def run_register(seed: int) -> Finding:
    """A replicated register over the journal, under every fault of the simulation."""
    return Finding(seed, register.run_seed(seed).problem)


def run_lineage(seed: int) -> Finding:
    """A random history of one training job on the coordinator's core: every sample once per epoch."""
    return Finding(seed, lineage.run_history(seed))


def run_epochs(seed: int) -> Finding:
    """The same with 64 workers, a thousand faults and 20 epochs."""
    return Finding(seed, epochs.run_history(seed))


def run_train(seed: int) -> Finding:
    """Orchestrators, ranks, API servers and clients of a training server, under every fault of the simulation."""
    return Finding(seed, train.run_seed(seed).problem)


def run_fleet(seed: int) -> Finding:
    """Clients of the fleet's SQLite store at work at once: one order explains every answer."""
    return Finding(seed, fleet.sqlite(seed))


def run_fleet_postgres(seed: int) -> Finding:
    """The same on PostgreSQL, whose backends are terminated in every third history."""
    return Finding(seed, fleet.postgres(seed))


def run_schedule(seed: int) -> Finding:
    """Gangs, large jobs, owners, priorities and lost hosts: all is shared out as promised, and all jobs end."""
    return Finding(seed, fleet.schedule(seed))


@dataclass(frozen=True)
class Simulated:
    run: Callable[[int], Finding]
    chunk: int = 25
    """Seeds that a process takes at a time."""


@dataclass(frozen=True)
class Real:
    run: Callable[[CampaignRequest, OnProgress], Awaitable[CampaignResult]]
    times: int
    """How many trials, unless told."""
    workers: int
    own_server: bool = False
    """Runs on a PostgreSQL that it starts and kills itself."""


SIMULATED: Final = {
    "register": Simulated(run_register),
    "lineage": Simulated(run_lineage),
    "epochs": Simulated(run_epochs, chunk=1),
    "train-sim": Simulated(run_train, chunk=10),
    "fleet-linear": Simulated(run_fleet, chunk=5),
    "fleet-linear-postgres": Simulated(run_fleet_postgres, chunk=5),
    "fleet-schedule": Simulated(run_schedule, chunk=5),
}
REAL: Final = {
    "coordinator-kill": Real(kill.run, times=100, workers=1_000),
    "coordinator-partitions": Real(partitions.run, times=20, workers=128),
    "coordinator-scale": Real(scale.run, times=5, workers=100_000),
    "coordinator-zombie": Real(zombie.run, times=20, workers=50),
    "coordinator-failover": Real(failover.run, times=20, workers=50, own_server=True),
    "coordinator-herd": Real(load.run, times=1, workers=10_000),
    "coordinator-load": Real(load.run_loaded, times=1, workers=1_000),
    "gang-restart": Real(restart.run, times=60, workers=2),
    "fleet-hub-kill": Real(hub_kill.run, times=300, workers=12),
    "fleet-hub-postgres": Real(hub_postgres.run, times=20, workers=12, own_server=True),
    "fleet-two-hubs": Real(two_hubs.run, times=40, workers=2, own_server=True),
    "fleet-agent-kill": Real(agent_kill.run, times=300, workers=3),
    "fleet-agent-zombie": Real(agent_zombie.run, times=100, workers=2),
    "train-kill": Real(train_kill.run, times=120, workers=3),
    "train-kill-mesh": Real(train_kill.run_on_meshes, times=40, workers=3),
    "train-noise": Real(train_noise.run, times=40, workers=1),
    "mixed-kill": Real(mixed_kill.run, times=60, workers=3),
}


def quiet() -> None:
    # Thousands of failures on purpose would each be worth a line in the log of a real process.
    logging.disable(logging.CRITICAL)
