"""The scheduler: operations of a model in sequence, tenants by deficit round-robin (quantum, deficit, debt), which
operations share a dispatch, and the forecast of queue positions.

Deficit round-robin (DRR): the turn of a tenant adds a quantum of tokens to its deficit counter, and an operation is
charged to the counter of its tenant. So a tenant with large batches and one with small batches get the same share, no
tenant waits longer because another has more sessions, and new sessions do not go before old ones.

Operations of different models may be coalesced into one dispatch. Each is charged to its own tenant, which may go into
debt for it.

`select` is pure: it returns the operations with their charges, and `charge` applies them. The deficit counters and the
turn in the ring are soft state: they are in no fact, and a restart begins with fresh ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Final, NamedTuple

OPERATIONS_PER_QUANTUM: Final = 8
"""Operations that a quantum pays for at most: an operation with few tokens or none is not free either."""

MAX_DEBT_QUANTA: Final = 2
"""The debt that a tenant may have for coalesced operations, in quanta."""

STEP: Final = "optim_step"
"""What models do between their passes: it takes hardly longer than its dispatch."""


class QueuedOperation(NamedTuple):
    """An operation that may run as soon as those of its model before it have."""

    future_id: str
    tenant: str
    model_id: str
    kind: str
    tokens: int
    turn: int
    """Grows in the order in which operations were enqueued."""
    batch_key: str = ""
    """Operations of different models with the same key may be coalesced into one dispatch; empty: runs alone."""


class Charges(NamedTuple):
    """What a selection does to the deficit counters."""

    turns: int
    """Tenants whose turn passed; each following tenant got its quantum."""
    tokens: Mapping[str, int]
    """Tokens by tenant."""


class Selection(NamedTuple):
    """The operations of the next dispatch, and what they cost."""

    operations: tuple[QueuedOperation, ...]
    turns: int
    charged: Mapping[str, int]
    """Tokens by future: an operation is charged its cost, or less at the limit of debt."""

    def charges(self, only: Container[str] | None = None) -> Charges:
        """Returns the charges of all operations, or only of these futures if the others are not dispatched."""
        tokens: Counter[str] = Counter()
        for operation in self.operations:
            if only is None or operation.future_id in only:
                tokens[operation.tenant] += self.charged[operation.future_id]
        return Charges(self.turns, tokens)


class _Account:
    """The ring and the deficit counters while a selection is made: a copy of the scheduler's."""

    def __init__(self, ring: Iterable[str], deficit: Mapping[str, int], quantum: int) -> None:
        self.ring = deque(ring)
        self.deficit = dict(deficit)
        self.turns = 0
        self.charged: dict[str, int] = {}
        self._quantum = quantum

    def pass_turn(self) -> None:
        self.ring.rotate(-1)
        self.deficit[self.ring[0]] += self._quantum
        self.turns += 1

    def charge(self, operation: QueuedOperation, cost: int, lowest: int) -> None:
        """Debt is bounded: else a tenant that joined while there was room would wait for it long after."""
        before = self.deficit[operation.tenant]
        self.deficit[operation.tenant] = max(before - cost, min(before, lowest))
        self.charged[operation.future_id] = before - self.deficit[operation.tenant]

    def refund(self, operations: Iterable[QueuedOperation]) -> None:
        for operation in operations:
            self.deficit[operation.tenant] += self.charged.pop(operation.future_id)


class QueueForecast:
    """The whole queue in the order in which it would run if nothing else came: for queue positions and ETAs."""

    def __init__(self, order: Sequence[QueuedOperation]) -> None:
        self.order = order
        self.positions = {operation.future_id: position for position, operation in enumerate(order)}
        others = (position for position, operation in enumerate(order) if operation.tenant != order[0].tenant)
        self._first_other = next(others, len(order))
        """The first position of another tenant than that at position 0."""

    def others_before(self, position: int, tenant: str) -> bool:
        return position > 0 and (self.order[0].tenant != tenant or position > self._first_other)


class Scheduler:
    """Operations that may run, and the deficit counter of each tenant. Only the counters are lost with the process."""

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum = quantum_tokens
        self._queues: dict[str, dict[str, deque[QueuedOperation]]] = {}
        """Queues by tenant and model."""
        self._ring: deque[str] = deque()
        """Tenants with queued operations; the first has its turn."""
        self._deficit: dict[str, int] = {}
        """Tokens that each tenant in the ring may spend; negative is debt."""
        self._by_future: dict[str, QueuedOperation] = {}
        self._lowest = -MAX_DEBT_QUANTA * quantum_tokens
        self._forecast: QueueForecast | None = None
        """Cached until something changes: many clients poll in between, and it goes through the whole queue."""

    def __len__(self) -> int:
        return len(self._by_future)

    def add(self, operation: QueuedOperation) -> None:
        """Enqueue it behind all others of its model."""
        self._forecast = None
        queues = self._queues.get(operation.tenant)
        if queues is None:
            queues = self._queues[operation.tenant] = {}
            self._ring.append(operation.tenant)
            # The first tenant in an empty ring has its turn at once.
            self._deficit[operation.tenant] = self._quantum if len(self._ring) == 1 else 0
        queues.setdefault(operation.model_id, deque()).append(operation)
        self._by_future[operation.future_id] = operation

    def remove(self, future_id: str) -> None:
        """It was dispatched or cancelled. One that is not queued, because a gap holds it, is ignored."""
        operation = self._by_future.pop(future_id, None)
        if operation is None:
            return
        self._forecast = None
        queues = self._queues[operation.tenant]
        queue = queues[operation.model_id]
        queue.remove(operation)
        if not queue:
            del queues[operation.model_id]
        if not queues:
            # DRR: an idle tenant accumulates no deficit.
            del self._queues[operation.tenant], self._deficit[operation.tenant]
            had_turn = self._ring[0] == operation.tenant
            self._ring.remove(operation.tenant)
            if had_turn and self._ring:
                self._deficit[self._ring[0]] += self._quantum

    def select(self, *, budget_tokens: int, coalesce: bool, most: int | None = None) -> Selection:
        """The operations of the next dispatch; none if nothing is queued. Changes nothing: `charge` does, and they stay
        queued until they are removed.

        With `coalesce`, operations of other models join as long as they fit into the budget and are no more than
        `most`; each is charged to its own tenant, and none overtakes another of its model.
        """
        account = _Account(self._ring, self._deficit, self._quantum)
        operations = self._select(account, budget_tokens, len(self) if most is None else most, coalesce=coalesce)
        return Selection(operations, account.turns, account.charged)

    def _select(
        self, account: _Account, budget_tokens: int, most: int, *, coalesce: bool
    ) -> tuple[QueuedOperation, ...]:
        first = self._next(account)
        if first is None:
            return ()
        if not coalesce or not first.batch_key:
            return (first,)
        selected = self._coalesce(account, first, budget_tokens, most)
        if first.batch_key == STEP:
            return selected
        free_tokens = budget_tokens - sum(operation.tokens for operation in selected)
        steps = self._steps_before(account, first.batch_key, free_tokens, most - len(selected))
        if not steps:
            return selected
        account.refund(selected)
        for step in steps:
            self._charge(account, step)
        return steps

    def charge(self, charges: Charges) -> None:
        """Apply the charges of a selection, before its operations are removed."""
        self._forecast = None
        for _ in range(charges.turns):
            self._ring.rotate(-1)
            self._deficit[self._ring[0]] += self._quantum
        for tenant, tokens in charges.tokens.items():
            self._deficit[tenant] -= tokens

    def deficits(self) -> list[tuple[str, int]]:
        """The soft state: tenants in the order of their turns, each with its deficit counter."""
        return [(tenant, self._deficit[tenant]) for tenant in self._ring]

    def _coalesce(
        self, account: _Account, first: QueuedOperation, budget_tokens: int, most: int
    ) -> tuple[QueuedOperation, ...]:
        """The first operation and those that join it, each tenant going into debt if need be.

        A tenant without credit joins only if no tenant waits that cannot join: what it adds is time for all.
        """
        selected = [first]
        free_tokens = budget_tokens - first.tokens
        candidates = self._joinable(account, first)
        for on_credit in (True, False):
            without_credit = []
            for head in candidates:
                if len(selected) >= most or head.tokens > free_tokens:
                    continue
                if on_credit and account.deficit[head.tenant] - self._cost(head) < self._lowest:
                    without_credit.append(head)
                    continue
                self._charge(account, head)
                free_tokens -= head.tokens
                selected.append(head)
            candidates = without_credit
            if not {operation.tenant for operation in (*selected, *candidates)}.issuperset(account.ring):
                break
        return tuple(selected)

    def _joinable(self, account: _Account, first: QueuedOperation) -> list[QueuedOperation]:
        """Heads of other models that may run in the same dispatch."""
        return [
            head
            for head in self._eligible_heads(account)
            if head.batch_key == first.batch_key and head.model_id != first.model_id
        ]

    def _steps_before(
        self, account: _Account, batch_key: str, free_tokens: int, slots: int
    ) -> tuple[QueuedOperation, ...]:
        """Optimizer steps of models whose next operations could then join the coming pass, and fit into it.

        Passes of models that alternate with their steps would otherwise never coalesce: the first model to finish its
        step would run its pass alone. The pass waits for as many steps as it has room for, and each takes some of it.
        """
        steps: list[QueuedOperation] = []
        for head in self._eligible_heads(account):
            if len(steps) >= slots:
                break
            queue = self._queues[head.tenant][head.model_id]
            if (
                head.batch_key == STEP
                and len(queue) > 1
                and queue[1].batch_key == batch_key
                and queue[1].tokens <= free_tokens
            ):
                steps.append(head)
                free_tokens -= queue[1].tokens
        return tuple(steps)

    def _eligible_heads(self, account: _Account) -> Iterator[QueuedOperation]:
        """The first operation of each model, in the order in which they may be coalesced."""
        for tenant in account.ring:
            yield from self._heads(tenant)

    def forecast(self) -> QueueForecast:
        """One operation after the other; coalesced ones run earlier. The same object until something changes."""
        if self._forecast is None:
            self._forecast = QueueForecast(self._forecast_order())
        return self._forecast

    def _forecast_order(self) -> list[QueuedOperation]:
        """The order of `_next` and `remove`, with heaps of the heads, as it goes through the whole queue."""
        ring, deficit = deque(self._ring), dict(self._deficit)
        heads = {tenant: _heap_by_age(queues.values()) for tenant, queues in self._queues.items()}
        order: list[QueuedOperation] = []
        while ring:
            tenant = ring[0]
            _, number, head, rest = heads[tenant][0]
            if (cost := self._cost(head)) > deficit[tenant]:
                ring.rotate(-1)
                deficit[ring[0]] += self._quantum
                continue
            deficit[tenant] -= cost
            order.append(head)
            if (following := next(rest, None)) is not None:
                heapreplace(heads[tenant], (following.turn, number, following, rest))
                continue
            heappop(heads[tenant])
            if not heads[tenant]:
                ring.popleft()
                if ring:
                    deficit[ring[0]] += self._quantum
        return order

    def _next(self, account: _Account) -> QueuedOperation | None:
        """The next operation by deficit round-robin, charged."""
        while account.ring:
            tenant = account.ring[0]
            head = self._heads(tenant)[0]
            if self._cost(head) <= account.deficit[tenant]:
                self._charge(account, head)
                return head
            account.pass_turn()
        return None

    def _heads(self, tenant: str) -> list[QueuedOperation]:
        """The first operation of each model of the tenant, oldest first."""
        return sorted((queue[0] for queue in self._queues[tenant].values()), key=lambda head: head.turn)

    def _charge(self, account: _Account, operation: QueuedOperation) -> None:
        account.charge(operation, self._cost(operation), self._lowest)

    def _cost(self, operation: QueuedOperation) -> int:
        return max(operation.tokens, self._quantum // OPERATIONS_PER_QUANTUM, 1)


def _heap_by_age(
    queues: Iterable[deque[QueuedOperation]],
) -> list[tuple[int, int, QueuedOperation, islice[QueuedOperation]]]:
    """A heap of the first operation of each model, each with those behind it."""
    heap = [(queue[0].turn, number, queue[0], islice(queue, 1, None)) for number, queue in enumerate(queues)]
    heapify(heap)
    return heap
