"""What became durable, in order, watched as it happens: by whoever wrote it, and whatever became of that process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from strata.journal.port import Batch
from strata.train.core import commands, facts, ops
from strata.train.core.future import OperationFuture
from strata.train.core.sampling import DrawnSequence, SampleOperation
from strata.train.core.scheduler import OPERATIONS_PER_QUANTUM
from strata.train.core.state import Rules, queued_operation
from tests.sim.train.wires import TrainWorld
from tests.support.memory_journal import Appended, Frame, MemoryJournal


@dataclass
class Awaited:
    """An operation that may run, and what ran since then."""

    fact: facts.OperationAccepted
    cost: int
    own: int = 0
    """Cost of it and of all of its tenant that could run before it came."""
    excused: int = 0
    """Turns that others had because the order of turns was lost, or one was spent on what could not run."""
    others: Counter[str] = field(default_factory=Counter)


class Audit:
    def __init__(self, world: TrainWorld, rules: Rules, ranks: int) -> None:
        self._world = world
        self._rules = rules
        self._ranks = ranks
        self._position = 0
        self._epoch = 0
        self._bytes: dict[int, bytes] = {}
        self.accepted: dict[str, facts.OperationAccepted] = {}
        self.dispatched: dict[int, facts.Dispatched] = {}
        self.number_of: dict[str, int] = {}
        self.results: dict[str, ops.Result] = {}
        self.given_up: dict[int, str] = {}
        self.drawn: dict[str, DrawnSequence] = {}
        """What is durable of in-flight samples."""
        self.resumed: dict[str, set[int]] = {}
        """How many tokens of an in-flight sample were durable when ranks were told of it again."""
        self.saves: dict[str, int] = {}
        """In-flight saves that ended since the first durable token of each."""
        self._published: dict[str, list[tuple[int, int]]] = {}
        """In-flight saves of each model: dispatch and version."""
        self.expired = False
        self._released: Counter[str] = Counter()
        self._arrived: dict[str, set[int]] = {}
        self._ready: dict[str, Awaited] = {}
        self._pending: Counter[str] = Counter()
        self._sampling: set[str] = set()
        self._largest = 0
        """What the dearest operation cost."""

    def note(self, batch: Batch) -> None:
        for position, encoded in enumerate(batch.facts, batch.first):
            known = self._bytes.setdefault(position, encoded)
            if known != encoded:
                self._world.violated(f"fact {position} of the journal was replaced")
            if position <= self._position:
                continue
            self._position = position
            if batch.epoch != self._epoch:
                self._epoch = batch.epoch
                self._excuse()
            self._take(facts.decode(encoded))

    def _take(self, fact: facts.Fact) -> None:
        match fact:
            case facts.OperationAccepted():
                self._accept(fact)
            case facts.Dispatched():
                self._dispatch(fact)
            case facts.OperationFinished():
                self._finish(fact.future_id, fact.result)
            case facts.SliceEnded():
                self._draw(fact)
            case facts.DispatchFailed():
                self._give_up(fact)
            case facts.RanksRenewed():
                self._sampling.clear()
            case _:
                pass

    def _give_up(self, fact: facts.DispatchFailed) -> None:
        """A slice with all that is being sampled."""
        self.given_up[fact.number] = fact.reason
        dispatch = self.dispatched[fact.number]
        for future_id in list(self._sampling) if dispatch.slice is not None else dispatch.future_ids:
            self._finish(future_id, ops.Failed("server", fact.reason))

    def model_of(self, sample: ops.Operation | None) -> str:
        """The model whose in-flight weights it is drawn from; empty: its weights never change."""
        sampler_id = sample.sampler_id if isinstance(sample, SampleOperation) else ""
        operations = (each.operation for each in self.accepted.values())
        saves = [each for each in operations if isinstance(each, ops.SaveSampler)]
        return next((save.model_id for save in saves if save.inflight and save.sampler_id == sampler_id), "")

    def _draw(self, fact: facts.SliceEnded) -> None:
        for future_id, parts in fact.drawn.items():
            for part in parts:
                known = self.drawn.get(future_id, DrawnSequence())
                if part.start != known.length:
                    self._world.violated(f"{future_id} has {known.length} tokens, and {part.start} are before the next")
                newest = [version for number, version in self._published_by(future_id) if number < fact.number][-1:]
                if [span.version for span in part.added.versions] != newest:
                    self._world.violated(
                        f"slice {fact.number} drew {future_id} with {part.added.versions}, not {newest}"
                    )
                self.drawn[future_id] = known.plus(part.added)
                self.saves.setdefault(future_id, 0)

    def _published_by(self, future_id: str) -> list[tuple[int, int]]:
        return self._published.get(self.model_of(self.accepted[future_id].operation), [])

    def _publish(self, fact: facts.OperationAccepted) -> None:
        save = fact.operation
        if not isinstance(save, ops.SaveSampler) or not save.inflight:
            return
        if not isinstance(self.results[fact.future_id], ops.SamplerOpened):
            return
        self._published.setdefault(save.model_id, []).append((self.number_of[fact.future_id], save.seq_id))
        for future_id in self.saves:
            if future_id not in self.results and self.model_of(self.accepted[future_id].operation) == save.model_id:
                self.saves[future_id] += 1

    # What clients and ranks heard

    def heard(self, future_id: str) -> None:
        """A client was told that this was accepted."""
        if future_id not in self.accepted:
            self._world.violated(f"a client heard that {future_id} was accepted, which is in no journal")

    def told(self, command: commands.DispatchCommand, group: str) -> None:
        """The ranks were told a dispatch."""
        fact = self.dispatched.get(command.number)
        if fact is None:
            self._world.violated(f"{group} was told dispatch {command.number}, which is in no journal")
            return
        unloads = isinstance(command.work, commands.ManageModel) and isinstance(command.work.operation, ops.UnloadModel)
        if command.number in self.given_up and not unloads:
            self._world.violated(f"{group} was told dispatch {command.number}, which was given up")
        if isinstance(command.work, commands.PassCommand):
            ids = [item.request_id for item in command.work.items]
            if ids != list(fact.future_ids) or _plain(command.work.rows) != _plain(fact.rows):
                self._world.violated(f"{group} was told dispatch {command.number} in another composition")

    # What became true

    def _accept(self, fact: facts.OperationAccepted) -> None:
        if fact.future_id in self.accepted:
            self._world.violated(f"{fact.future_id} was accepted twice")
        self.accepted[fact.future_id] = fact
        operation = fact.operation
        if isinstance(operation, SampleOperation):
            return
        self._pending[fact.tenant] += 1
        # One of each model that others of it wait for always comes in. A model comes with its first checkpoint and goes
        # whenever it is told to.
        models = sum(1 for each in self.accepted.values() if isinstance(each.operation, ops.CreateModel))
        most = self._rules.tenant_quota + 2 * models + 1
        if self._pending[fact.tenant] > most:
            self._world.violated(f"{self._pending[fact.tenant]} operations of {fact.tenant} wait, more than {most}")
        if not isinstance(operation, ops.Sequenced) or operation.seq_id == 0:
            self._hand_on(fact)
            return
        model_id = operation.model_id
        arrived = self._arrived.setdefault(model_id, set())
        arrived.add(operation.seq_id)
        while self._released[model_id] + 1 in arrived:
            self._released[model_id] += 1
            self._hand_on(self.accepted[f"{model_id}:{self._released[model_id]}"])

    def _hand_on(self, fact: facts.OperationAccepted) -> None:
        if fact.future_id in self.results:
            return
        future = OperationFuture(fact.future_id, fact.tenant, "", fact.digest, fact.operation, fact.at_s)
        cost = max(queued_operation(future).tokens, self._quantum // OPERATIONS_PER_QUANTUM, 1)
        self._largest = max(self._largest, cost)
        mine = sum(each.cost for each in self._ready.values() if each.fact.tenant == fact.tenant)
        self._ready[fact.future_id] = Awaited(fact, cost, mine + cost)

    @property
    def _quantum(self) -> int:
        return self._rules.fairness_quantum_tokens

    def _dispatch(self, fact: facts.Dispatched) -> None:
        if fact.number != len(self.dispatched) + 1:
            self._world.violated(f"dispatch {fact.number} came after {len(self.dispatched)}")
        self.dispatched[fact.number] = fact
        for future_id in fact.future_ids:
            self._may_run(future_id)
            self.number_of[future_id] = fact.number
        if fact.slice is not None:
            self._sampling.update(fact.future_ids)
            for future_id in self.drawn.keys() & set(fact.future_ids):
                self.resumed.setdefault(future_id, set()).add(self.drawn[future_id].length)
        if fact.slice is not None or not fact.future_ids:
            return
        # The others go along in the same pass and take no time of anybody's.
        leader = self._ready.get(fact.future_ids[0])
        for future_id in fact.future_ids:
            self._gone(future_id)
        if leader is None:
            return
        for waiting in self._ready.values():
            if waiting.fact.tenant != leader.fact.tenant:
                waiting.others[leader.fact.tenant] += leader.cost
                self._judge(waiting)

    def _may_run(self, future_id: str) -> None:
        fact = self.accepted.get(future_id)
        if fact is None:
            self._world.violated(f"{future_id} was dispatched, and never accepted")
            return
        if future_id in self.results:
            self._world.violated(f"{future_id} was dispatched after its end")
        operation = fact.operation
        if isinstance(operation, SampleOperation):
            return
        if future_id in self.number_of:
            self._world.violated(f"{future_id} was dispatched twice")
        if isinstance(operation, ops.Sequenced):
            for before in range(1, operation.seq_id):
                other = f"{operation.model_id}:{before}"
                if other not in self.number_of and other not in self.results:
                    self._world.violated(f"{future_id} was dispatched before {other}")

    def _judge(self, waiting: Awaited) -> None:
        """Deficit round-robin: so many turns until it has paid for itself, and in each of them a quantum for others."""
        # Whoever went along with others may owe as much as a pass holds.
        debts = self._ranks
        turns = -(-waiting.own // self._quantum) + 1 + debts + waiting.excused
        for tenant, cost in waiting.others.items():
            if cost > turns * self._quantum + self._largest:
                name, quantum = waiting.fact.future_id, self._quantum
                self._world.violated(f"{name} waits while {tenant} had {cost} tokens in {turns} turns of {quantum}")
                waiting.excused += 1000

    def _excuse(self) -> None:
        for waiting in self._ready.values():
            waiting.excused += 1

    def _gone(self, future_id: str) -> None:
        gone = self._ready.pop(future_id, None)
        if gone is not None:
            self._pending[gone.fact.tenant] -= 1

    def _finish(self, future_id: str, result: ops.Result) -> None:
        fact = self.accepted.get(future_id)
        if fact is None:
            self._world.violated(f"{future_id} ended, and was never accepted")
            return
        if future_id in self.results:
            self._world.violated(f"{future_id} ended twice")
        self.results[future_id] = result
        self._sampling.discard(future_id)
        self._publish(fact)
        if future_id in self._ready:
            self._gone(future_id)
            # A turn was spent on it, and on whatever would have gone along.
            self._excuse()
        elif future_id not in self.number_of and not isinstance(fact.operation, SampleOperation):
            self._pending[fact.tenant] -= 1


def _plain(rows: object) -> object:
    return [[[(each.item, each.datum) for each in row] for row in rank] for rank in rows]  # type: ignore[attr-defined]


def audited(audit: Audit) -> type[MemoryJournal]:
    """A journal that is watched."""

    class Audited(MemoryJournal):
        def _take(self, frame: Frame) -> None:
            super()._take(frame)
            if isinstance(frame, Appended):
                audit.note(frame.batch)

    return Audited
