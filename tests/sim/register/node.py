"""The register's processes: a journal server, nodes that stand by and lead, clients that repeat until answered."""

from __future__ import annotations

import asyncio

import msgspec

from strata.base.errors import Code, StrataError
from strata.journal.group_commit import WriterLimits
from strata.journal.replica import Replica
from tests.sim.register.core import Register, Reply, Request, State
from tests.support.history import History
from tests.support.memory_journal import MemoryJournal
from tests.support.register_model import Add, CompareAndSet, Read, RegisterInput, Value, Write
from tests.support.remote_journal import RemoteJournal, serve
from tests.support.world import World

STREAM = "register"
LEASE_S = 1.0
CALL_S = 0.4
SNAPSHOT_EVERY = 12
LIMITS = WriterLimits(commit_timeout_s=1.0, give_up_after_s=3.0)

RegisterReplica = Replica[State, Request, Reply | None]

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


async def run_journal(world: World, kind: type[MemoryJournal]) -> None:
    journal = kind(world.clock("journal"), world.disk("journal"))

    async def answer(sender: str, payload: bytes) -> bytes:
        del sender
        return await serve(journal, payload)

    world.listen(answer)


async def run_node(world: World, name: str, machine: Register, kind: type[RegisterReplica]) -> None:
    """Stand by, lead, and start over when deposed: the life of every leader in Strata."""
    journal = RemoteJournal(lambda payload: world.call("journal", payload, CALL_S), longest_wait_s=CALL_S / 2)
    while True:
        replica = kind(journal, STREAM, machine, world.clock(name))
        try:
            await replica.stand_by(world.holder(), LEASE_S, LIMITS)
            world.trace.note(f"{name} leads epoch {replica.epoch} from {replica.position}")
            world.listen(_Front(replica).answer)
            lost = await replica.lead_until_replaced(LEASE_S, snapshot_every=SNAPSHOT_EVERY)
        except StrataError as error:
            lost = error
        world.trace.note(f"{name} follows: {lost.code}")
        world.listen(_refuse)
        # Nothing else may end a leadership: a conflict would be a batch in the wrong place.
        if lost.code not in (Code.STALE, Code.UNAVAILABLE):
            raise lost


async def _refuse(sender: str, payload: bytes) -> bytes:
    raise StrataError(Code.UNAVAILABLE, "another node leads")


class _Front:
    """Answers requests on a leading replica."""

    def __init__(self, replica: RegisterReplica) -> None:
        self._replica = replica

    async def answer(self, sender: str, payload: bytes) -> bytes:
        del sender
        request = _decode_request(payload)
        reply = await self._replica.submit(request)
        if reply is None:
            raise StrataError(Code.INVALID, "a request of the past")
        if isinstance(request.operation, Read):
            await self._replica.confirm()
        return _encode(reply)


class Client:
    """Does operations one after the other, each repeated under its number at one node after another."""

    def __init__(self, world: World, name: str, nodes: list[str], history: History[RegisterInput, Value]) -> None:
        self._world = world
        self._name = name
        self._nodes = nodes
        self._history = history
        self._number = 0
        self._leader = nodes[0]

    async def run(self, operations: int) -> None:
        for _ in range(operations):
            await asyncio.sleep(self._world.rng.expovariate(1 / 0.15))
            await self.do(self._choose(), patience_s=6.0)

    async def do(self, operation: RegisterInput, patience_s: float) -> bool:
        """Whether the operation was answered; one that was not has an unknown outcome and is never repeated."""
        self._number += 1
        request = Request(self._name, self._number, operation)
        handle = self._history.invoke(self._name, operation, self._world.loop.time())
        try:
            async with asyncio.timeout(patience_s):
                reply = await self._ask(request)
        except TimeoutError:
            handle.unknown()
            return False
        handle.returned(reply.value, self._world.loop.time())
        self._world.trace.note(f"{self._name} {operation} -> {reply.value}")
        return True

    async def _ask(self, request: Request) -> Reply:
        payload = _encode(request)
        while True:
            try:
                timeout_s = self._world.rng.uniform(0.3, 3.0)
                return _decode_reply(await self._world.call(self._leader, payload, timeout_s))
            except StrataError:
                self._leader = self._world.rng.choice(self._nodes)
                await asyncio.sleep(0.05)

    def _choose(self) -> RegisterInput:
        rng = self._world.rng
        key = rng.choice(["x", "y"])
        kind = rng.random()
        if kind < 0.35:
            return Read(key)
        if kind < 0.5:
            return Write(key, rng.randrange(1000))
        if kind < 0.9:
            return Add(key, rng.randrange(1, 100))
        return CompareAndSet(key, rng.randrange(3), rng.randrange(1000))
