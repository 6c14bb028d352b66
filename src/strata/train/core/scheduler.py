"""The scheduler: operations of a model in sequence, tenants by deficit round-robin, operations of a tenant by age.

Deficit round-robin (DRR): the turn of a tenant adds a quantum of tokens to its deficit counter, and an operation is
charged to the counter of its tenant. So a tenant with large batches and one with small batches get the same share, no
tenant waits longer because another has more sessions, and new sessions do not go before old ones.

Operations of different models may be coalesced into one dispatch. Each is charged to its own tenant, which may go into
debt for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
        """By tenant and model."""
        self._ring: deque[str] = deque()
        """Tenants with queued operations; the first has its turn."""
        self._deficit: dict[str, int] = {}
        """Tokens that each tenant in the ring may spend; negative is debt."""
        self._by_future: dict[str, QueuedOperation] = {}
        self._lowest = -MAX_DEBT_QUANTA * quantum_tokens
        self._charged: dict[str, int] = {}
        """What the last selected operations were charged."""
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

    def select(self, *, budget_tokens: int, coalesce: bool, most: int | None = None) -> tuple[QueuedOperation, ...]:
        """The operations of the next dispatch; empty if nothing is queued. They are charged now, and stay queued until
        they are removed.

        With `coalesce`, operations of other models join as long as they fit into the budget and are no more than
        `most`; each is charged to its own tenant, and none overtakes another of its model.
        """
        first = self._next()
        if first is None:
            return ()
        self._forecast = None
        if not coalesce or not first.batch_key:
            return (first,)
        most = len(self) if most is None else most
        selected = self._coalesce(first, budget_tokens, most)
        if first.batch_key == STEP:
            return selected
        free_tokens = budget_tokens - sum(operation.tokens for operation in selected)
        steps = self._steps_before(first.batch_key, free_tokens, most - len(selected))
        if not steps:
            return selected
        self.refund(selected)
        for step in steps:
            self._charge(step)
        return steps

    def refund(self, operations: Iterable[QueuedOperation]) -> None:
        """Return the charge of operations that were selected last and are not dispatched."""
        self._forecast = None
        for operation in operations:
            self._deficit[operation.tenant] += self._charged.pop(operation.future_id)

    def _coalesce(self, first: QueuedOperation, budget_tokens: int, most: int) -> tuple[QueuedOperation, ...]:
        """The first operation and those that join it, each tenant going into debt if need be.

        A tenant without credit joins only if no tenant waits that cannot join: what it adds is time for all.
        """
        selected = [first]
        free_tokens = budget_tokens - first.tokens
        candidates = [
            head
            for head in self._eligible_heads()
            if head.batch_key == first.batch_key and head.model_id != first.model_id
        ]
        for on_credit in (True, False):
            without_credit = []
            for head in candidates:
                if len(selected) >= most or head.tokens > free_tokens:
                    continue
                if on_credit and self._deficit[head.tenant] - self._cost(head) < self._lowest:
                    without_credit.append(head)
                    continue
                self._charge(head)
                free_tokens -= head.tokens
                selected.append(head)
            candidates = without_credit
            if not {operation.tenant for operation in (*selected, *candidates)}.issuperset(self._ring):
                break
        return tuple(selected)

    def _steps_before(self, batch_key: str, free_tokens: int, slots: int) -> tuple[QueuedOperation, ...]:
        """Optimizer steps of models whose next operations could then join the coming pass, and fit into it.

        Passes of models that alternate with their steps would otherwise never coalesce: the first model to finish its
        step would run its pass alone. The pass waits for as many steps as it has room for, and each takes some of it.
        """
        steps: list[QueuedOperation] = []
        for head in self._eligible_heads():
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

    def _eligible_heads(self) -> Iterator[QueuedOperation]:
        """The first operation of each model, in the order in which they may be coalesced."""
        for tenant in [*self._ring]:
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

    def _next(self) -> QueuedOperation | None:
        """The next operation by deficit round-robin, charged."""
        while self._ring:
            tenant = self._ring[0]
            head = self._heads(tenant)[0]
            if self._cost(head) <= self._deficit[tenant]:
                self._charged.clear()
                self._charge(head)
                return head
            self._ring.rotate(-1)
            self._deficit[self._ring[0]] += self._quantum
        return None

    def _heads(self, tenant: str) -> list[QueuedOperation]:
        """The first operation of each model of the tenant, oldest first."""
        return sorted((queue[0] for queue in self._queues[tenant].values()), key=lambda head: head.turn)

    def _charge(self, operation: QueuedOperation) -> None:
        """Debt is bounded: else a tenant that joined while there was room would wait for it long after."""
        before = self._deficit[operation.tenant]
        self._deficit[operation.tenant] = max(before - self._cost(operation), min(before, self._lowest))
        self._charged[operation.future_id] = before - self._deficit[operation.tenant]

    def _cost(self, operation: QueuedOperation) -> int:
        return max(operation.tokens, self._quantum // OPERATIONS_PER_QUANTUM, 1)


def _heap_by_age(
    queues: Iterable[deque[QueuedOperation]],
) -> list[tuple[int, int, QueuedOperation, islice[QueuedOperation]]]:
    """A heap of the first operation of each model, each with those behind it."""
    heap = [(queue[0].turn, number, queue[0], islice(queue, 1, None)) for number, queue in enumerate(queues)]
    heapify(heap)
    return heap
