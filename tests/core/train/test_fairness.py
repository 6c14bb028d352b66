"""A tenant that floods the server takes its share and no more: how long others wait is bounded, and counted here."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

import pytest

from strata.train.core import ops
from strata.train.core.scheduler import MAX_DEBT_QUANTA, OPERATIONS_PER_QUANTUM
from strata.train.core.state import Dispatch
from tests.core.train.servers import Server, forward_backward, step

FLOOD = 10_000
PASSES = 100
ROW_TOKENS = 64
RANKS = 2
RUNNING = 2
TOKENS_PER_S = 1_000.0
STEP_S = 0.002


@dataclass
class Timed:
    """The core with ranks that take their time: so many tokens in a second, one dispatch after the other."""

    server: Server
    at_ranks: deque[Dispatch] = field(default_factory=deque)
    longest_s: float = 0.0

    def cost_s(self, dispatch: Dispatch) -> float:
        operations = [self.server.state.futures.get(each) for each in dispatch.future_ids]
        passes = [each.operation for each in operations if each and isinstance(each.operation, ops.ForwardBackward)]
        return sum(sum(each.lengths) for each in passes) / TOKENS_PER_S if passes else STEP_S * len(operations)

    def advance(self) -> None:
        """Until the ranks have done one thing more."""
        while (dispatch := self.server.dispatch()) is not None:
            self.at_ranks.append(dispatch)
        done = self.at_ranks.popleft()
        took_s = self.cost_s(done)
        self.longest_s = max(self.longest_s, took_s)
        self.server.now_s += took_s
        self.server.answer(done)

    def wait_s(self, operation: ops.Operation, tenant: str) -> float:
        """From handing it in to its result."""
        sent_s = self.server.now_s
        (future_id,) = self.server.accept(operation, tenant=tenant)
        while self.server.future(future_id, tenant).result is None:
            self.advance()
        return self.server.now_s - sent_s


def bound_s(own_tokens: int, largest_tokens: int, longest_s: float) -> float:
    """Ahead of an operation are: what the ranks have already; and in each turn that its tenant needs to save up for
    it, one turn of the other tenant, which is a quantum and at most one operation more. Then it runs itself."""
    turns = math.ceil(max(own_tokens, ROW_TOKENS // OPERATIONS_PER_QUANTUM) / ROW_TOKENS)
    others = turns * (ROW_TOKENS + largest_tokens) / TOKENS_PER_S + turns * OPERATIONS_PER_QUANTUM * STEP_S
    return RUNNING * longest_s + others + longest_s


@pytest.mark.parametrize("share", [False, True], ids=["slices", "shared"])
@pytest.mark.parametrize(("models", "tokens"), [(1, 2 * ROW_TOKENS), (20, 8)], ids=["large", "many"])
def test_ten_thousand_operations_of_one_tenant_do_not_make_another_wait_beyond_its_share(
    share: bool, models: int, tokens: int
) -> None:
    server = Server(
        max_tokens_per_row=ROW_TOKENS,
        fairness_quantum_tokens=ROW_TOKENS,
        pack_tenants=share,
        max_running=RUNNING,
        max_pending=2 * FLOOD,
        max_pending_per_tenant=FLOOD,
    )
    server.ranks = RANKS
    flooding = [server.model(number, tenant="flood") for number in range(models)]
    quiet = server.model(tenant="quiet")
    for seq in range(1, FLOOD // models + 1):
        server.accept(*(forward_backward(each, seq, [tokens]) for each in flooding), tenant="flood")
    timed = Timed(server)
    own_tokens = ROW_TOKENS // 2
    waits = [
        timed.wait_s(forward_backward(quiet, 2 * number + 1, [own_tokens]), "quiet")
        + timed.wait_s(step(quiet, 2 * number + 2), "quiet")
        for number in range(PASSES)
    ]
    most_s = bound_s(own_tokens, tokens, timed.longest_s) + bound_s(0, tokens, timed.longest_s)
    p99_s = sorted(waits)[math.ceil(0.99 * len(waits)) - 1]
    assert p99_s <= max(waits) <= most_s
    # In the order in which they came, the first pass alone would have waited for all of the flood.
    assert most_s < FLOOD * tokens / TOKENS_PER_S / 50
    # The flood is held back, not stopped.
    assert server.state.futures.pending("flood") < FLOOD - PASSES


def test_nobody_pays_for_operations_of_others_that_cannot_run() -> None:
    """One tenant sends what is longer than the context. It could share a pass with the operations of a second tenant,
    but not with those of a third: the second is not held back for it."""
    server = Server(
        max_tokens_per_row=ROW_TOKENS,
        fairness_quantum_tokens=ROW_TOKENS,
        max_running=1,
        max_pending=FLOOD,
        max_pending_per_tenant=FLOOD,
    )
    server.ranks, server.max_context = 1, ROW_TOKENS - 10
    small, large = 8, [(ROW_TOKENS - 6) // 2] * 2
    quiet, rival = server.model(tenant="quiet"), server.model(tenant="rival")
    unrunnable = [server.model(number, tenant="unrunnable") for number in range(100)]
    for number in range(1, 20):
        server.accept(forward_backward(quiet, number, [small]), tenant="quiet")
        server.accept(forward_backward(rival, number, large), tenant="rival")
    for model_id in unrunnable:
        server.accept(forward_backward(model_id, 1, [server.max_context + 1]), tenant="unrunnable")
    ran: list[str] = []
    turn = ROW_TOKENS // small
    while len(ran) <= turn:
        dispatch = server.dispatch()
        assert dispatch is not None
        ran += dispatch.future_ids
        server.answer(dispatch)
    assert any(server.future(f"{each}:1", "unrunnable").result is not None for each in unrunnable)
    assert sum(each.startswith(quiet) for each in ran) == turn


def test_who_goes_along_with_others_gets_no_more_than_who_cannot() -> None:
    """What goes along makes a pass longer for all that wait behind it."""
    server = Server(
        max_tokens_per_row=ROW_TOKENS,
        fairness_quantum_tokens=ROW_TOKENS,
        max_running=1,
        max_pending=FLOOD,
        max_pending_per_tenant=FLOOD,
    )
    server.ranks = 1
    small, large, apart = server.model(tenant="small"), server.model(tenant="large"), server.model(tenant="apart")
    tokens = {small: 8, large: 48, apart: ROW_TOKENS}
    for number in range(1, 500):
        server.accept(forward_backward(small, number, [tokens[small]]), tenant="small")
        server.accept(forward_backward(large, number, [tokens[large]]), tenant="large")
        server.accept(forward_backward(apart, number, [tokens[apart]], forward_only=True), tenant="apart")
    had = dict.fromkeys(tokens, 0)
    for _ in range(300):
        dispatch = server.dispatch()
        assert dispatch is not None
        for future_id in dispatch.future_ids:
            model_id = future_id.rpartition(":")[0]
            had[model_id] += tokens[model_id]
        server.answer(dispatch)
    assert had[large] > ROW_TOKENS * 10
    assert max(had.values()) - min(had.values()) <= (MAX_DEBT_QUANTA + 1) * ROW_TOKENS + max(tokens.values())


def test_the_quantum_and_not_the_length_of_a_row_says_how_long_a_turn_is() -> None:
    turns = {quantum: turn_lengths(quantum, row_tokens) for quantum, row_tokens in ((20, 64), (40, 64))}
    assert turns == {20: [2, 2, 2, 2], 40: [4, 4, 4, 4]}
    assert turn_lengths(20, 256) == turns[20]


def turn_lengths(quantum: int, row_tokens: int) -> list[int]:
    """How many operations of ten tokens each of two tenants runs before the other one's turn."""
    server = Server(
        max_tokens_per_row=row_tokens,
        fairness_quantum_tokens=quantum,
        max_running=1,
        pack_tenants=False,
        max_pending=100,
    )
    models = {tenant: server.model(tenant=tenant) for tenant in ("one", "two")}
    for tenant, model in models.items():
        server.accept(*(forward_backward(model, number, [10]) for number in range(1, 21)), tenant=tenant)
    tenants = []
    for _ in range(4 * quantum // 10):
        dispatch = server.dispatch()
        assert dispatch is not None
        tenants.append(server.state.futures.tenant_of(dispatch.future_ids[0]))
        server.answer(dispatch)
    return [len(list(run)) for _, run in itertools.groupby(tenants)]
