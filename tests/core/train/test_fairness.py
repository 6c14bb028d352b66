"""A tenant that floods the server takes its share and no more: how long others wait is bounded, and counted here."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import pytest

from strata.train.core import ops
from strata.train.core.schedule import PER_TURN
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
    turns = math.ceil(max(own_tokens, ROW_TOKENS // PER_TURN) / ROW_TOKENS)
    others = turns * (ROW_TOKENS + largest_tokens) / TOKENS_PER_S + turns * PER_TURN * STEP_S
    return RUNNING * longest_s + others + longest_s


@pytest.mark.parametrize("share", [False, True], ids=["slices", "shared"])
@pytest.mark.parametrize(("models", "tokens"), [(1, 2 * ROW_TOKENS), (20, 8)], ids=["large", "many"])
def test_ten_thousand_operations_of_one_tenant_do_not_make_another_wait_beyond_its_share(
    share: bool, models: int, tokens: int
) -> None:
    server = Server(
        max_tokens_per_row=ROW_TOKENS,
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
