"""One seed of the register: three nodes, a journal server and four clients, tormented, healed and judged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from tests.sim.register import ablation
from tests.sim.register.core import Register
from tests.sim.register.node import Client, RegisterReplica, run_journal, run_node
from tests.support.history import History
from tests.support.linearizable import Linearizable, check
from tests.support.memory_journal import MemoryJournal
from tests.support.register_model import Add, RegisterInput, RegisterModel, Value
from tests.support.world import Faults, World

NODES = ["node-1", "node-2", "node-3"]
OPERATIONS = 20
TORMENT_S = 12.0
CONVERGES_S = 30.0


class Outcome(msgspec.Struct, frozen=True):
    seed: int
    trace: str
    operations: int
    answered: int
    problem: str | None
    """Why the seed is a violation; None if it is not."""


def run_seed(seed: int, *, without: str | None = None, faults: Faults | None = None) -> Outcome:
    """Run one seed, with every safeguard or `without` one of them."""
    world = World(seed, faults or Faults().drawn(random.Random(f"faults of {seed}")))
    history: History[RegisterInput, Value] = History()
    journal = ablation.JOURNALS.get(without or "", MemoryJournal)
    machine = ablation.MACHINES.get(without or "", Register)()
    replica = ablation.REPLICAS.get(without or "", RegisterReplica)
    try:
        stuck = world.run(_scenario(world, history, journal, lambda name: run_node(world, name, machine, replica)))
    except Exception as error:  # noqa: BLE001 - whatever breaks in a simulated process is a finding of this seed
        stuck = f"a process failed: {error.__cause__ or error!r}"
    operations = history.operations()
    return Outcome(
        seed=seed,
        trace=world.trace.digest(),
        operations=len(operations),
        answered=sum(operation.returned_at is not None for operation in operations),
        problem=stuck or _judge(history),
    )


async def _scenario(
    world: World,
    history: History[RegisterInput, Value],
    journal: type[MemoryJournal],
    node: Callable[[str], Coroutine[Any, Any, None]],
) -> str | None:
    world.add("journal", lambda: run_journal(world, journal))
    for name in NODES:
        world.add(name, partial(node, name))
    clients = [Client(world, f"client-{i}", NODES, history) for i in range(4)]
    working = [world.loop.create_task(client.run(OPERATIONS)) for client in clients]
    await world.inject_faults(["journal", *NODES], TORMENT_S)
    await asyncio.gather(*working)
    for client in clients:
        if not await client.do(Add("x", 1), patience_s=CONVERGES_S):
            return f"no answer within {CONVERGES_S} s after everything healed"
    return None


def _judge(history: History[RegisterInput, Value]) -> str | None:
    verdict = check(history, RegisterModel())
    return None if isinstance(verdict, Linearizable) else verdict.explain()
