"""Whose turn it is: of each model strictly by number, between tenants by the tokens they had, within one by age.

Deficit round-robin: a tenant's turn brings it a quantum of tokens to spend, and what an operation costs is taken from
what it saved up. So a tenant with large batches and one with small ones get the same share, no tenant waits longer
because another has more sessions, and new sessions do not go before old ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Final, NamedTuple

PER_TURN: Final = 8
"""Operations that one turn of a tenant can hold at most: what has few tokens or none is not free either."""

CREDIT_TURNS: Final = 2
"""Turns that a tenant may owe for what it had by going along."""

STEP: Final = "optim_step"
"""What models do between their passes: it takes hardly longer than handing it on does."""


class Entry(NamedTuple):
    """An operation that may run as soon as those of its model before it have."""

    future_id: str
    tenant: str
    model_id: str
    kind: str
    tokens: int
    turn: int
    """Grows: who was handed on first."""
    shares: str = ""
    """Operations of different models with the same text here may go into one dispatch; empty: runs alone."""


class Foreseen:
    """Everything that waits in the order it would run if nothing else came: for telling people where they stand."""

    def __init__(self, order: Sequence[Entry]) -> None:
        self.order = order
        self.places = {entry.future_id: place for place, entry in enumerate(order)}
        differ = (place for place, entry in enumerate(order) if entry.tenant != order[0].tenant)
        self._second = next(differ, len(order))
        """The first place of another tenant than that of the first."""

    def others_before(self, place: int, tenant: str) -> bool:
        return place > 0 and (self.order[0].tenant != tenant or place > self._second)


class Scheduler:
    """Operations that may run, and what each tenant has saved up. Only the second is lost with the process."""

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum = quantum_tokens
        self._lines: dict[str, dict[str, deque[Entry]]] = {}
        self._ring: deque[str] = deque()
        self._saved: dict[str, int] = {}
        self._where: dict[str, Entry] = {}
        self._lowest = -CREDIT_TURNS * quantum_tokens
        self._paid: dict[str, int] = {}
        """By those that were chosen last."""
        self._foreseen: Foreseen | None = None
        """Until something changes: many may ask in between, and it takes a look at everything that waits."""

    def __len__(self) -> int:
        return len(self._where)

    def add(self, entry: Entry) -> None:
        """After all others of its model."""
        self._foreseen = None
        lines = self._lines.get(entry.tenant)
        if lines is None:
            lines = self._lines[entry.tenant] = {}
            self._ring.append(entry.tenant)
            # The first in an empty ring is already at its turn.
            self._saved[entry.tenant] = self._quantum if len(self._ring) == 1 else 0
        lines.setdefault(entry.model_id, deque()).append(entry)
        self._where[entry.future_id] = entry

    def remove(self, future_id: str) -> None:
        """Dispatched, or given up. One that is not here (a gap holds it) is no matter."""
        entry = self._where.pop(future_id, None)
        if entry is None:
            return
        self._foreseen = None
        lines = self._lines[entry.tenant]
        line = lines[entry.model_id]
        line.remove(entry)
        if not line:
            del lines[entry.model_id]
        if not lines:
            # Who has nothing to run saves nothing up.
            del self._lines[entry.tenant], self._saved[entry.tenant]
            at_its_turn = self._ring[0] == entry.tenant
            self._ring.remove(entry.tenant)
            if at_its_turn and self._ring:
                self._saved[self._ring[0]] += self._quantum

    def choose(self, *, budget_tokens: int, share: bool, most: int | None = None) -> tuple[Entry, ...]:
        """What to run now, as one dispatch; empty if there is nothing. It stays here until it is removed, and is paid
        for already.

        With `share`, others that can go along do, as long as they fit into the budget and are no more than `most`; each
        is paid for by its own tenant, and none goes before its turn within its model.
        """
        first = self._next()
        if first is None:
            return ()
        self._foreseen = None
        if not share or not first.shares:
            return (first,)
        most = len(self) if most is None else most
        chosen = self._together(first, budget_tokens, most)
        if first.shares == STEP:
            return chosen
        room_tokens = budget_tokens - sum(entry.tokens for entry in chosen)
        steps = self._steps_before(first.shares, room_tokens, most - len(chosen))
        if not steps:
            return chosen
        self.give_back(chosen)
        for step in steps:
            self._pay(step)
        return steps

    def give_back(self, entries: Iterable[Entry]) -> None:
        """What they paid: they were chosen last, and are not run after all."""
        self._foreseen = None
        for entry in entries:
            self._saved[entry.tenant] += self._paid.pop(entry.future_id)

    def _together(self, first: Entry, budget_tokens: int, most: int) -> tuple[Entry, ...]:
        """The first, and those that go along: into debt, if need be, for which they wait later.

        Who has no credit left goes along only if nobody waits who cannot: what it adds is time for all.
        """
        chosen = [first]
        room_tokens = budget_tokens - first.tokens
        left = [head for head in self._along() if head.shares == first.shares and head.model_id != first.model_id]
        for on_credit in (True, False):
            broke = []
            for head in left:
                if len(chosen) >= most or head.tokens > room_tokens:
                    continue
                if on_credit and self._saved[head.tenant] - self._cost(head) < self._lowest:
                    broke.append(head)
                    continue
                self._pay(head)
                room_tokens -= head.tokens
                chosen.append(head)
            left = broke
            if not {entry.tenant for entry in (*chosen, *left)}.issuperset(self._ring):
                break
        return tuple(chosen)

    def _steps_before(self, shares: str, room_tokens: int, places: int) -> tuple[Entry, ...]:
        """Steps of models whose next operations could then share the pass that is to come, and fit into it.

        Passes of models that take turns with their steps would otherwise never meet: whoever is done with its step
        first goes on alone. The pass waits for as many steps as there is room in it, and each takes some of that room.
        """
        steps: list[Entry] = []
        for head in self._along():
            if len(steps) >= places:
                break
            line = self._lines[head.tenant][head.model_id]
            if head.shares == STEP and len(line) > 1 and line[1].shares == shares and line[1].tokens <= room_tokens:
                steps.append(head)
                room_tokens -= line[1].tokens
        return tuple(steps)

    def _along(self) -> Iterator[Entry]:
        """The first of each model, in the order in which they may go along."""
        for tenant in [*self._ring]:
            yield from self._heads(tenant)

    def foreseen(self) -> Foreseen:
        """One after the other; what goes along with others comes earlier. The same one until something changes."""
        if self._foreseen is None:
            self._foreseen = Foreseen(self._one_by_one())
        return self._foreseen

    def _one_by_one(self) -> list[Entry]:
        """As `_next` and `remove` would take them. Heaps of the heads, as this goes through everything."""
        ring, saved = deque(self._ring), dict(self._saved)
        heads = {tenant: _by_age(lines.values()) for tenant, lines in self._lines.items()}
        order: list[Entry] = []
        while ring:
            tenant = ring[0]
            _, number, head, rest = heads[tenant][0]
            if (cost := self._cost(head)) > saved[tenant]:
                ring.rotate(-1)
                saved[ring[0]] += self._quantum
                continue
            saved[tenant] -= cost
            order.append(head)
            if (after := next(rest, None)) is not None:
                heapreplace(heads[tenant], (after.turn, number, after, rest))
                continue
            heappop(heads[tenant])
            if not heads[tenant]:
                ring.popleft()
                if ring:
                    saved[ring[0]] += self._quantum
        return order

    def _next(self) -> Entry | None:
        """The next one in turn, paid for."""
        while self._ring:
            tenant = self._ring[0]
            head = self._heads(tenant)[0]
            if self._cost(head) <= self._saved[tenant]:
                self._paid.clear()
                self._pay(head)
                return head
            self._ring.rotate(-1)
            self._saved[self._ring[0]] += self._quantum
        return None

    def _heads(self, tenant: str) -> list[Entry]:
        """The first of each model, oldest first."""
        return sorted((line[0] for line in self._lines[tenant].values()), key=lambda head: head.turn)

    def _pay(self, entry: Entry) -> None:
        """Nobody falls lower than its credit: else who went along while there was room would wait for it long after."""
        before = self._saved[entry.tenant]
        self._saved[entry.tenant] = max(before - self._cost(entry), min(before, self._lowest))
        self._paid[entry.future_id] = before - self._saved[entry.tenant]

    def _cost(self, entry: Entry) -> int:
        return max(entry.tokens, self._quantum // PER_TURN, 1)


def _by_age(lines: Iterable[deque[Entry]]) -> list[tuple[int, int, Entry, islice[Entry]]]:
    """A heap of the first of each model, with those behind it."""
    heap = [(line[0].turn, number, line[0], islice(line, 1, None)) for number, line in enumerate(lines)]
    heapify(heap)
    return heap
