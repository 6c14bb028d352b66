"""Keys that flood the server over HTTP are told to come again, and others do not wait for their queues."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from strata.train.core.scheduler import OPERATIONS_PER_QUANTUM
from tests.shell.train_api.test_protocol import Client, Server, new_client, served

FLOODING = 3
QUOTA = 30
RUNNING = 2
LIMITS = f"max_pending_requests = 200\nmax_pending_per_tenant = {QUOTA}\nmax_running_requests = {RUNNING}"
PASSES = 4
MOST = RUNNING + FLOODING * (OPERATIONS_PER_QUANTUM + 1)
"""Operations of others before one of ours: what the ranks have, and one turn of each other key, with what it may have
saved up for one more."""


@dataclass
class Flood:
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Something was refused."""
    refused: list[str] = field(default_factory=list)


async def flood(client: Client, told: Flood) -> None:
    """As fast as the server takes them; what is refused is sent again long before it was asked to."""
    seq = 1
    while not told.stop.is_set():
        body = client.batch(seq, [1, 2, 3], pretend_s=0.03)
        reply = await client.send("POST", "/api/v1/forward_backward", json=body)
        if reply.status_code == 429:
            assert reply.headers["retry-after"]
            told.refused.append(reply.json()["error"]["message"])
            told.begun.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(told.stop.wait(), 0.02)
            continue
        assert reply.status_code == 200, reply.text
        seq += 1


async def waited_for(server: Server, own: Client, seq: int) -> int:
    """How many operations the ranks did after ours was sent and before they did it."""
    before = len(server.stack.applied())
    future = await own.post("forward_backward", own.batch(seq))
    await own.done(future)
    names = [name for _, name in server.stack.applied()]
    return names.index(future["request_id"]) - before


async def test_a_flood_by_several_keys_is_refused_in_words_and_another_key_waits_for_its_turn_only(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, limits=f"{LIMITS}\npack_tenants = false") as server:
        clients = [await new_client(server.operator, f"flood-{number}") for number in range(FLOODING)]
        for client in (*clients, server.alice):
            await client.open()
        told = Flood()
        floods = [asyncio.create_task(flood(client, told)) for client in clients]
        try:
            await asyncio.wait_for(told.begun.wait(), 60)
            waits = [await waited_for(server, server.alice, seq) for seq in range(1, PASSES + 1)]
        finally:
            told.stop.set()
            await asyncio.gather(*floods)
        assert max(waits) <= MOST < FLOODING * QUOTA
        assert all("the quota of key:flood-" in each for each in told.refused)
        assert all(f" is full: {QUOTA} operations are waiting" in each for each in told.refused)
