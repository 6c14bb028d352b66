"""A gang of workers that train in virtual time on the real core: steps of random length, checkpoints, barriers, beats.

Everything healthy workers do that takes long and is no fault happens here, and with it what is one: a worker can be
made slow, and it can hang while its heartbeats go on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from strata.base.errors import StrataError
from strata.coord.core.facts import CommandKind, Fact, WorkerJudged, WorkerLost
from strata.coord.core.inputs import Heartbeat, HeartbeatReply, Leave
from strata.coord.core.job_config import JobConfig
from strata.coord.core.liveness import interval_s
from strata.coord.core.state import StepProgress
from tests.core.coord.jobs import CORPUS, Job

TICK_S = 1.0
BUCKETS = 1024


@dataclass
class Trainer:
    worker_id: str
    factor: float
    next_beat_s: float
    done_at_s: float
    step: int = 0
    took_s: float = 0.0
    computed_s: tuple[float, ...] = ()
    busy_until_s: float = 0.0
    waits_at: str | None = None
    hung: bool = False
    told: tuple[CommandKind, ...] = ()


class Gang:
    """`faults` are the facts that say that somebody is slow, hangs or is gone."""

    def __init__(
        self,
        seed: int,
        workers: int = 16,
        *,
        step_s: float = 1.0,
        tells_time: bool = True,
        tells_computing: bool = False,
        config: JobConfig | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.step_s = step_s
        self.tells_time = tells_time
        self.tells_computing = tells_computing
        self.job = Job(config or JobConfig())
        self.job.join(*(f"w{number:02}" for number in range(workers)))
        self.job.register_dataset("w00", samples=1_000_000, buckets=BUCKETS, shard_size=10)
        self.faults: list[Fact] = []
        self.trainers = {worker_id: self._start(worker_id) for worker_id in self.job.job.members}

    def _start(self, worker_id: str) -> Trainer:
        now_s = self.job.now_s
        factor = self.rng.uniform(0.92, 1.08)
        return Trainer(worker_id, factor, now_s + self.rng.uniform(0, 5), now_s + self.step_s)

    def run(self, seconds: float, *, every_steps: int = 0) -> None:
        """All meet and write a checkpoint every so many steps; 0: never."""
        end_s = self.job.now_s + seconds
        while self.job.now_s < end_s:
            self.job.now_s += TICK_S
            for trainer in list(self.trainers.values()):
                self._train(trainer, every_steps)
            for trainer in list(self.trainers.values()):
                if self.job.now_s >= trainer.next_beat_s and trainer.worker_id in self.job.job.members:
                    self._beat(trainer)
            found = self.job.tick()
            self.faults += [fact for fact in found if isinstance(fact, WorkerJudged | WorkerLost)]
            for trainer in list(self.trainers.values()):
                if trainer.worker_id not in self.job.job.members:
                    del self.trainers[trainer.worker_id]

    def _train(self, trainer: Trainer, every_steps: int) -> None:
        now_s = self.job.now_s
        if trainer.hung or not self._go_on(trainer):
            return
        while trainer.done_at_s <= now_s:
            trainer.step += 1
            trainer.took_s = self._time_s(trainer)
            trainer.done_at_s += trainer.took_s
            trainer.computed_s = (*trainer.computed_s, trainer.took_s)[-32:]
            if every_steps and trainer.step % every_steps == 0:
                trainer.waits_at = f"step-{trainer.step}"
                return

    def _go_on(self, trainer: Trainer) -> bool:
        """Whether it may train: it is at no barrier, and busy with nothing else."""
        now_s = self.job.now_s
        if trainer.waits_at is not None:
            try:
                released = self.job.arrive(trainer.worker_id, trainer.waits_at).verdict is not None
            except StrataError:
                # A generation is forming.
                return False
            if released:
                trainer.waits_at = None
                # All write their part of a checkpoint, which takes each of them its time.
                trainer.busy_until_s = now_s + self.rng.uniform(1.0, 90.0)
        if trainer.waits_at is not None or now_s < trainer.busy_until_s:
            trainer.done_at_s = max(trainer.done_at_s, max(now_s, trainer.busy_until_s) + self._time_s(trainer))
            return False
        return True

    def _time_s(self, trainer: Trainer) -> float:
        hiccup = 5.0 if self.rng.random() < 0.03 else 1.0
        return self.step_s * trainer.factor * self.rng.lognormvariate(0.0, 0.15) * hiccup

    def _beat(self, trainer: Trainer) -> None:
        now_s = self.job.now_s
        interval = interval_s(self.job.state, self.job.job)
        trainer.next_beat_s = now_s + interval * self.rng.uniform(0.9, 1.3)
        progress = StepProgress(
            trainer.step,
            trainer.took_s if self.tells_time and trainer.took_s else None,
            now_s < trainer.busy_until_s,
            self.job.job.generation,
            trainer.computed_s if self.tells_computing else (),
        )
        pulse = self.job.told(HeartbeatReply, Heartbeat(self.job.caller(trainer.worker_id), progress=progress))
        trainer.told = tuple(command.kind for command in pulse.commands)
        self.job.beat(trainer.worker_id, acked_commands=tuple(command.command_id for command in pulse.commands))

    # What healthy jobs go through

    def disturb(self) -> None:
        """Somebody leaves, somebody comes, another coordinator takes over, or this one was not looking for a while."""
        kind = self.rng.choice(["leave", "come", "restart", "blind"])
        if kind == "leave" and len(self.trainers) > 4:
            gone = self.rng.choice(list(self.trainers))
            del self.trainers[gone]
            self.job.submit(Leave(self.job.caller(gone)))
        elif kind == "come":
            worker_id = f"x{len(self.job.journal)}"
            self.job.register(worker_id)
            self.trainers[worker_id] = self._start(worker_id)
        elif kind == "restart":
            self.job.restart()
        else:
            self.job.now_s += 30.0
            for trainer in self.trainers.values():
                trainer.done_at_s += 30.0

    def share(self, worker_id: str) -> float:
        """Of the buckets, as a new placement has them."""
        self.job.next("w00", held=None)
        owned = self.job.indexes.placements[BUCKETS].by_worker.get(worker_id, [])
        return len(owned) / BUCKETS

    def held(self, worker_id: str) -> Iterator[int]:
        """The shards that a worker holds."""
        for ledger in self.job.job.datasets[CORPUS].epochs.values():
            for lease_id in ledger.held.get(worker_id, ()):
                yield ledger.leases[lease_id].shard
