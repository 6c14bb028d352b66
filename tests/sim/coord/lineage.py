"""Random histories of one job, judged by the model they train: every sample's gradient once per epoch.

Workers read samples into their part of the model, ack, take checkpoints, crash, freeze and come back as zombies;
replies get lost; the coordinator dies and starts again from its journal; all workers of the job are killed and started
again with empty state. There are two kinds of job:

- *synchronous*: whenever the members change, all go back to the last checkpoint. A model is the multiset of samples in
  it; after a recovery it is what the checkpoint saved. In the end each (epoch, sample) is in it exactly once.
- *elastic*: members come and go while the others go on. What counts is what was acked; in the end each (epoch, sample)
  was acked exactly once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from strata.base.errors import Code, StrataError
from strata.coord.core import inputs
from strata.coord.core.facts import (
    CheckpointCommitted,
    CheckpointPart,
    Consumed,
    Dataset,
    RegisteredWorker,
    ShardAcked,
    ShardsGranted,
)
from strata.coord.core.inputs import Ack, Caller, HeartbeatReply, Outcome, Recovery, ShardAssignment
from strata.coord.core.job_config import JobConfig
from strata.coord.core.machine import CoordMachine, decode_fact
from strata.coord.core.state import CoordState

JOB = "job"
DATASET = "corpus"
Model = Counter[tuple[int, int]]


@dataclass(frozen=True)
class Scale:
    """How large a history is. The numbers are the least and the most of what the seed may choose."""

    workers: tuple[int, int] = (2, 4)
    most_workers: int = 5
    samples: tuple[int, int] = (20, 60)
    epochs: int = 3
    steps: int = 300
    faults: int = 0
    """The faulty part goes on after `steps` until there were so many, lost replies not counted."""
    finish_turns: int = 2_000
    sweeps: bool = False
    """All workers read, ask or report at a time instead of one, so that a large job gets on between two faults."""


SMALL = Scale()


class Coordinator:
    """The real core over a journal that is a list; dying loses what nobody was told of, or keeps it."""

    def __init__(self, machine: CoordMachine, rng: random.Random) -> None:
        self.machine = machine
        self.rng = rng
        self.facts: list[bytes] = []
        self.ends: list[int] = [0]
        """Where each decision ends: its facts are committed together, all or none."""
        self.snapshot: tuple[int, bytes] | None = None
        self.epoch = 0
        self.now_s = 0.0
        self.state = self._start()

    def ask(self, given: inputs.Input) -> Outcome:
        self.machine.observe(self.state, given, self.now_s)
        facts, outcome = self.machine.decide(self.state, given, self.now_s)
        self.machine.observe_outcome(self.state, given, outcome, self.now_s)
        for fact in facts:
            self.state = self.machine.apply(self.state, fact)
        self.facts += facts
        self.ends.append(len(self.facts))
        return outcome

    def die(self, told: int) -> None:
        """Facts after the last reply may or may not have reached the disk."""
        end = self.rng.choice([end for end in self.ends if end >= told])
        self.ends = [each for each in self.ends if each <= end]
        del self.facts[end:]
        if self.snapshot is not None and self.snapshot[0] > len(self.facts):
            self.snapshot = None
        self.state = self._start()

    def save(self) -> None:
        self.snapshot = (len(self.facts), self.machine.save(self.state))

    def _start(self) -> CoordState:
        position, state = 0, self.machine.initial()
        if self.snapshot is not None:
            position, saved = self.snapshot
            state = self.machine.load(saved)
        for fact in self.facts[position:]:
            state = self.machine.apply(state, fact)
        self.epoch += 1
        state.leader_epoch = self.epoch
        return state


@dataclass
class Held:
    epoch: int
    at: int
    end: int


@dataclass
class Saved:
    """What a worker took for a checkpoint and has to report."""

    checkpoint_id: str
    step: int
    part: Model
    consumed: tuple[Consumed, ...]


@dataclass
class SimWorker:
    worker_id: str
    incarnation: str
    generation: int = 0
    epoch: int = 0
    held: dict[int, Held] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    """Leases read to the end and not known to be acked, with their ends."""
    given_up: dict[int, int] = field(default_factory=dict)
    """Leases that could not be read beyond a place, where they are not known to have been given back."""
    part: Model = field(default_factory=Counter)
    saved: Saved | None = None
    rank: int = -1
    finished: bool = False
    asks_where: bool = False
    """It has asked which checkpoint to go back to, and got no answer."""
    awake: bool = False
    """Of a zombie: whether it goes on again."""

    @property
    def caller(self) -> Caller:
        return Caller(JOB, self.worker_id, self.incarnation, self.generation)


@dataclass
class Told:
    """Seen by the harness only: what each worker put into a checkpoint."""

    parts: dict[str, Model] = field(default_factory=dict)


class LineageError(AssertionError):
    """The model is not what it should be."""


class History:
    """One seed."""

    def __init__(self, seed: int, machine: CoordMachine, scale: Scale = SMALL) -> None:
        self.rng = random.Random(seed)
        self.scale = scale
        self.elastic = seed % 3 == 0
        self.samples = self.rng.randint(*scale.samples)
        self.coordinator = Coordinator(machine, self.rng)
        self.workers: dict[str, SimWorker] = {}
        self.zombies: list[SimWorker] = []
        self.base: Model = Counter()
        self.models: dict[str | None, Model] = {None: Counter()}
        self.reports: dict[str, Told] = {}
        self.next_worker = 0
        self.step = 0
        self.told = 0
        self.faulty = True
        self.recovered: set[int] = set()
        self.rollbacks = 0
        """Recoveries that went back to a checkpoint, not to the beginning."""
        self.faults: Counter[str] = Counter()

    def run(self) -> None:
        # Silence is noticed soon: a history has more deaths then.
        config = JobConfig(settle_s=0.1, heartbeat_interval_s=1.0, missed_beats=3, max_shard_failures=10_000)
        self._send(inputs.CreateJob(JOB, config))
        for _ in range(self.rng.randint(*self.scale.workers)):
            self._join()
        kinds, weights = zip(*(self._sweeps() if self.scale.sweeps else self._steps()), strict=True)
        for action in self.rng.choices(kinds, weights, k=self.scale.steps):
            action()
        while self.faults.total() - self.faults["reply lost"] < self.scale.faults:
            self.rng.choices(kinds, weights)[0]()
        self.faulty = False
        self._finish()

    def _steps(self) -> list[tuple[Callable[[], None], int]]:
        """What happens, one worker at a time, and how often relative to the rest."""
        return [
            (self._work, 40),
            (self._ask, 30),
            (self._tick, 12),
            (self._checkpoint, 4),
            (self._report, 10),
            (self._crash_worker, 1),
            (self._freeze, 1),
            (self._zombie, 4),
            (self._forge, 2),
            (self._give_up, 2),
            (self._join, 1),
            (self._replace, 1),
            (self._restart, 2),
            (self._restart_job, 1),
            (self._snapshot, 1),
        ]

    def _sweeps(self) -> list[tuple[Callable[[], None], int]]:
        def everybody(act: Callable[[SimWorker], None]) -> Callable[[], None]:
            def sweep() -> None:
                for worker in list(self.workers.values()):
                    act(worker)

            return sweep

        return [
            (everybody(self._work_on), 20),
            (everybody(self._ask_or_not), 20),
            (self._tick, 12),
            (self._checkpoint, 16),
            (everybody(self._report_saved), 30),
            (self._crash_worker, 1),
            (self._freeze, 1),
            (self._zombie, 4),
            (self._forge, 4),
            (self._give_up, 6),
            (self._join, 3),
            (self._replace, 1),
            (self._restart, 3),
            (self._restart_job, 1),
            (self._snapshot, 1),
        ]

    def _finish(self) -> None:
        if not self.workers:
            self._join()
        for turn in range(self.scale.finish_turns):
            if self._is_over():
                break
            self._tick()
            for action in (self._work, self._ask, self._report) * max(1, len(self.workers) // 5):
                action()
            if turn % 50 == 0:
                self._zombie()
        else:
            raise LineageError("the epochs do not come to an end")
        model = self._acked() if self.elastic else self._trained()
        expected = Counter({(epoch, sample): 1 for epoch in range(self.scale.epochs) for sample in range(self.samples)})
        if model != expected:
            doubled = sorted(item for item, count in model.items() if count > 1)
            raise LineageError(f"missing {sorted((expected - model).keys())[:5]}, doubled {doubled[:5]}")

    def _is_over(self) -> bool:
        """Everybody has read everything, and nobody is dead without the coordinator knowing it."""
        job = self.coordinator.state.jobs[JOB]
        return (
            job.settled
            and set(job.members) == set(self.workers)
            and all(worker.finished and worker.generation == job.generation for worker in self.workers.values())
        )

    def _trained(self) -> Model:
        return self.base + sum((worker.part for worker in self.workers.values()), Counter())

    def _acked(self) -> Model:
        """What the journal says was consumed."""
        model: Model = Counter()
        leases: dict[int, tuple[int, int]] = {}
        for fact in map(decode_fact, self.coordinator.facts):
            if isinstance(fact, ShardsGranted):
                leases |= {grant.lease_id: (fact.epoch, grant.start) for grant in fact.grants}
            if isinstance(fact, ShardAcked):
                epoch, start = leases[fact.lease_id]
                model.update((epoch, sample) for sample in range(start, fact.until))
                leases[fact.lease_id] = (epoch, max(start, fact.until))
        return model

    # Calls

    def _send(self, given: inputs.Input) -> Outcome | None:
        """Ask; None if the answer got lost. What was decided holds all the same."""
        outcome = self.coordinator.ask(given)
        for fact in outcome.facts:
            if isinstance(fact, CheckpointCommitted):
                told = self.reports[fact.checkpoint_id]
                self.models[fact.checkpoint_id] = self.base + sum(told.parts.values(), Counter())
        if self.faulty and self.rng.random() < 0.05:
            self.faults["reply lost"] += 1
            return None
        self.told = len(self.coordinator.facts)
        return outcome

    def _try(self, worker: SimWorker, given: inputs.Input) -> Outcome | None:
        """As a worker should: wait while a generation forms, catch up when it changed, end when evicted."""
        try:
            return self._send(given)
        except StrataError as error:
            if _is_out(error):
                self._evicted(worker)
            elif error.code is Code.PRECONDITION:
                self._catch_up(worker)
            elif error.code is not Code.UNAVAILABLE:
                raise
            return None

    def _evicted(self, worker: SimWorker) -> None:
        if self.workers.get(worker.worker_id) is worker:
            del self.workers[worker.worker_id]
        if worker in self.zombies:
            self.zombies.remove(worker)
        if not self.workers:
            self._join()

    def _catch_up(self, worker: SimWorker) -> None:
        """The generation is another one: go back with everybody, or go on in it."""
        if not self.elastic:
            self._recover(worker)
        elif self._generation_of(worker):
            worker.generation = self._generation_of(worker)
            worker.rank = self.coordinator.state.jobs[JOB].ranks[worker.worker_id]
            worker.saved = None

    def _recover(self, worker: SimWorker) -> None:
        caller = Caller(JOB, worker.worker_id, worker.incarnation)
        try:
            outcome = self._send(inputs.RequestRecovery(caller, worker.generation or self._generation_of(worker)))
        except StrataError as error:
            if _is_out(error):
                self._evicted(worker)
            elif error.code is not Code.UNAVAILABLE:
                raise
            return
        worker.asks_where = outcome is None
        if outcome is None:
            # The answer was lost: it asks again before anything else, as the same call.
            return
        reply = outcome.reply
        assert isinstance(reply, Recovery)
        self._go_back(worker, reply)

    def _generation_of(self, worker: SimWorker) -> int:
        """As the answer to its registration tells a new worker."""
        job = self.coordinator.state.jobs[JOB]
        return job.generation if worker.worker_id in job.ranks else 0

    def _go_back(self, worker: SimWorker, reply: Recovery) -> None:
        generation = self.coordinator.state.jobs[JOB].recovered_generation
        if generation not in self.recovered:
            # The first to load the checkpoint: what everybody trained since is given up.
            self.recovered.add(generation)
            self.rollbacks += reply.checkpoint is not None
            self.base = self.models[reply.checkpoint.checkpoint_id if reply.checkpoint else None].copy()
            for each in self.workers.values():
                each.part = Counter()
            # Only now: to one that is told later the others may have begun the next checkpoint already.
            self.step = reply.checkpoint.step if reply.checkpoint else 0
        worker.part = Counter() if worker.generation < generation else worker.part
        worker.generation, worker.rank = reply.place.generation, reply.place.rank
        worker.held, worker.read, worker.given_up, worker.saved = {}, {}, {}, None
        worker.epoch, worker.finished = 0, False

    # Actions

    def _pick(self) -> SimWorker | None:
        return self.rng.choice(list(self.workers.values())) if self.workers else None

    def _join(self) -> None:
        if len(self.workers) >= self.scale.most_workers:
            return
        self._register(f"w{self.next_worker + 1}")

    def _replace(self) -> None:
        """A supervisor starts a worker again while the old one is only slow. Then the new one dies."""
        old = self._pick()
        if old is not None and len(self.workers) > 1:
            self.faults["replaced"] += 1
            self.zombies.append(self.workers.pop(old.worker_id))
            self._register(old.worker_id)
            if self.rng.random() < 0.5:
                del self.workers[old.worker_id]

    def _restart_job(self) -> None:
        """Every process is killed and started again under the same names: fewer or more, with empty state."""
        self.faults["job restarted"] += 1
        names = list(self.workers)
        self.workers.clear()
        for name in names[self.rng.randint(0, 1) if len(names) > 1 else 0 :]:
            self._register(name)
        if self.rng.random() < 0.3:
            self._join()

    def _register(self, worker_id: str) -> None:
        """A process starts. What the answer says of it is lost now and then; it goes on as if nothing had been said."""
        self.next_worker += 1
        worker = SimWorker(worker_id, f"incarnation-{self.next_worker}")
        self.workers[worker.worker_id] = worker
        self._send(
            inputs.Register(
                JOB, RegisteredWorker(worker_id=worker.worker_id, incarnation=worker.incarnation, elastic=self.elastic)
            )
        )
        dataset = Dataset(dataset_id=DATASET, samples=self.samples, shard_size=4, buckets=8)
        self._send(inputs.RegisterDataset(Caller(JOB, worker.worker_id, worker.incarnation), dataset))

    def _work(self) -> None:
        worker = self._pick()
        if worker is not None:
            self._work_on(worker)

    def _work_on(self, worker: SimWorker) -> None:
        if worker.held:
            self._read(worker)

    def _read(self, worker: SimWorker) -> None:
        lease_id = self.rng.choice(list(worker.held))
        held = worker.held[lease_id]
        for _ in range(self.rng.randint(1, 4)):
            if held.at < held.end:
                worker.part[held.epoch, held.at] += 1
                held.at += 1
        if held.at == held.end:
            worker.read[lease_id] = held.end
            del worker.held[lease_id]

    def _ask(self) -> None:
        worker = self._pick()
        if worker is not None:
            self._ask_or_not(worker)

    def _ask_or_not(self, worker: SimWorker) -> None:
        if not worker.finished:
            self._ask_for(worker)

    def _start(self, worker: SimWorker) -> None:
        """It takes the place that its registration gave it, with empty state: only a refusal makes it recover."""
        if worker.asks_where:
            self._recover(worker)
        else:
            worker.generation = self._generation_of(worker)
            worker.rank = self.coordinator.state.jobs[JOB].ranks.get(worker.worker_id, -1)

    def _ask_for(self, worker: SimWorker, foreign: int | None = None) -> None:
        if worker.generation == 0 or worker.asks_where:
            self._start(worker)
            return
        # Between taking its part of a checkpoint and reporting it a worker acks nothing.
        acks = [] if worker.saved else [Ack(lease_id) for lease_id in worker.read]
        if not worker.saved and self.rng.random() < 0.3:
            acks += [Ack(lease_id, held.at) for lease_id, held in worker.held.items()]
        if not worker.saved:
            # Every other one could be read, and is left to a faster worker.
            acks += [
                Ack(lease_id, at, failed=lease_id % 2 == 0, returned=lease_id % 2 == 1)
                for lease_id, at in worker.given_up.items()
            ]
        if foreign is not None:
            acks.append(Ack(foreign))
        given = inputs.NextShards(
            caller=worker.caller,
            dataset_id=DATASET,
            data_epoch=worker.epoch,
            count=self.rng.randint(1, 2),
            acks=tuple(acks),
            held=(*worker.held, *worker.read, *worker.given_up),
        )
        outcome = self._try(worker, given)
        if outcome is None:
            return
        reply = outcome.reply
        assert isinstance(reply, ShardAssignment)
        if set(reply.stale) - {foreign}:
            raise LineageError(f"{worker.worker_id} holds the generation, but not lease {reply.stale[0]}")
        for ack in acks:
            worker.read.pop(ack.lease_id, None)
            worker.given_up.pop(ack.lease_id, None)
        for lease in reply.leases:
            worker.held.setdefault(lease.lease_id, Held(worker.epoch, lease.shard_range.start, lease.shard_range.end))
        if reply.end_of_epoch and not worker.read and not worker.held and not worker.given_up:
            worker.epoch += 1
            worker.finished = worker.epoch == self.scale.epochs

    def _checkpoint(self) -> None:
        """Everybody takes its part at a moment of its own; here all agree on the step at least."""
        job = self.coordinator.state.jobs[JOB]
        up_to_date = [worker for worker in self.workers.values() if worker.generation == job.generation]
        if not job.settled or len(up_to_date) < len(job.ranks) or any(worker.saved for worker in up_to_date):
            return
        self.step += 1
        checkpoint_id = f"c{self.step}"
        self.reports[checkpoint_id] = Told()
        self.models.pop(checkpoint_id, None)
        for worker in up_to_date:
            self._take(worker, checkpoint_id)
            if self.rng.random() < 0.5:
                self._work()

    def _take(self, worker: SimWorker, checkpoint_id: str) -> None:
        places = {lease_id: held.at for lease_id, held in worker.held.items()} | worker.read | worker.given_up
        epochs = {lease_id: held.epoch for lease_id, held in worker.held.items()}
        consumed = tuple(
            Consumed(DATASET, epochs.get(lease_id, worker.epoch), lease_id, until) for lease_id, until in places.items()
        )
        worker.saved = Saved(checkpoint_id, self.step, worker.part.copy(), consumed)
        self.reports[checkpoint_id].parts[worker.worker_id] = worker.part.copy()

    def _report(self) -> None:
        worker = self._pick()
        if worker is not None:
            self._report_saved(worker)

    def _report_saved(self, worker: SimWorker) -> None:
        saved = worker.saved
        if saved is None:
            return
        part = CheckpointPart(worker.rank, f"/{saved.checkpoint_id}/{worker.rank}", 1, "sha256:0")
        given = inputs.ReportCheckpoint(worker.caller, saved.checkpoint_id, saved.step, part, saved.consumed)
        outcome = self._try(worker, given)
        if outcome is not None and worker.saved is saved:
            worker.saved = None

    def _crash_worker(self) -> None:
        worker = self._pick()
        if worker is not None and len(self.workers) > 1:
            self.faults["crashed"] += 1
            del self.workers[worker.worker_id]
            if self.rng.random() < 0.5:
                self._send(inputs.Detached(worker.caller))

    def _freeze(self) -> None:
        worker = self._pick()
        if worker is not None and len(self.workers) > 1:
            self.faults["frozen"] += 1
            del self.workers[worker.worker_id]
            self.zombies.append(worker)
            if self.rng.random() < 0.7:
                self._send(inputs.Detached(worker.caller))

    def _zombie(self) -> None:
        """One that was thought dead goes on as if nothing had happened. Its part is in no model."""
        if not self.zombies:
            return
        worker = self.rng.choice(self.zombies)
        worker.awake = True
        if worker.held:
            self._read(worker)
        if worker.finished:
            return
        try:
            self._ask_for(worker)
        except LineageError:
            return

    def _forge(self) -> None:
        """A worker acks what is not its own."""
        worker, other = self._pick(), self._pick()
        if worker is None or other is None or worker is other or not other.held or worker.saved or worker.finished:
            return
        self.faults["forged ack"] += 1
        foreign = self.rng.choice(list(other.held))
        self._ask_for(worker, foreign)

    def _give_up(self) -> None:
        """A worker cannot read the rest of a shard and says so until it is heard."""
        worker = self._pick()
        if worker is None or not worker.held or worker.saved or worker.finished:
            return
        self.faults["failed ack"] += 1
        lease_id = self.rng.choice(list(worker.held))
        worker.given_up[lease_id] = worker.held.pop(lease_id).at
        self._ask_for(worker)

    def _restart(self) -> None:
        self.faults["coordinator killed"] += 1
        self.coordinator.die(self.told)
        self.told = len(self.coordinator.facts)

    def _snapshot(self) -> None:
        self.coordinator.save()
        self.told = len(self.coordinator.facts)

    def _tick(self) -> None:
        self.coordinator.now_s += self.rng.uniform(0.1, 0.6)
        for worker in list(self.workers.values()):
            self._beat(worker)
        for zombie in [zombie for zombie in self.zombies if zombie.awake]:
            outcome = self._try(zombie, inputs.Heartbeat(Caller(JOB, zombie.worker_id, zombie.incarnation)))
            member = self.coordinator.state.jobs[JOB].members.get(zombie.worker_id)
            if outcome is not None and member is not None and member.worker.incarnation == zombie.incarnation:
                # It woke up before anybody missed it: a healthy worker.
                self.zombies.remove(zombie)
                self.workers[zombie.worker_id] = zombie
        self._send(inputs.Tick())

    def _beat(self, worker: SimWorker) -> None:
        outcome = self._try(worker, inputs.Heartbeat(Caller(JOB, worker.worker_id, worker.incarnation)))
        reply = outcome.reply if outcome else None
        # Also one that has read everything hears here that the others had to go back.
        if isinstance(reply, HeartbeatReply) and worker.generation not in (0, reply.generation):
            self._catch_up(worker)


def _is_out(error: StrataError) -> bool:
    """Evicted, replaced, or forgotten before anybody was told of its registration."""
    return error.code in (Code.NOT_FOUND, Code.STALE) or error.detail.get("reason") == "not-registered"


def run_history(seed: int, machine: CoordMachine | None = None) -> str | None:
    """The problem of a seed, or None."""
    return problem_of(History(seed, machine or CoordMachine()))


def problem_of(history: History) -> str | None:
    try:
        history.run()
    except LineageError as error:
        return str(error)
    except StrataError as error:
        return f"refused: {error.code.value}: {error}"
    return None
