"""torchrun's rendezvous when the host of rank 0 dies in the middle of a round."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil  # type: ignore[import-untyped]
import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import RendezvousParameters

from strata.coord.core.facts import nodes_job
from strata.coord.worker import join_async
from strata.coord.worker.torch_rendezvous import BACKOFF, StrataRendezvous
from tests.shell.coord.running import in_process


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendezvous sets variables for the workers that torchrun starts: other tests must not find them."""
    for name in ("ADDRESS", "JOB", "IP", "TORCHRUN"):
        monkeypatch.setenv(f"STRATA_WORKER_{name}", "")
        monkeypatch.delenv(f"STRATA_WORKER_{name}")


def handler(address: str, failure_file: Path) -> StrataRendezvous:
    configuration = {"last_call_timeout": "0", "failure_file": quote(str(failure_file))}
    return StrataRendezvous(RendezvousParameters("strata", address, "gang", 1, 2, "127.0.0.1", **configuration))


async def is_connected_to(port: int) -> None:
    here = psutil.Process()
    async with asyncio.timeout(20):
        while not any(each.raddr and each.raddr.port == port for each in here.net_connections("tcp")):
            await asyncio.sleep(0.02)


async def test_a_round_whose_first_node_dies_is_repeated_once_the_coordinator_knows(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    async with in_process() as running:
        place: dict[str, Any] = {"ip": "127.0.0.1", "port": store.port}
        job = nodes_job("gang")
        async with join_async(address=running.address, job=job, id="first", elastic=True, **place) as first:
            node = handler(running.address, tmp_path / "failure")
            rendezvous = asyncio.create_task(asyncio.to_thread(node.next_rendezvous))
            async with asyncio.timeout(20):
                while first.world_size < 2:
                    await asyncio.sleep(0.02)
                    await first.follow()
            assert first.rank == 0
            await first.barrier("round")
            port = store.port
            await is_connected_to(port)
            # It waits for what the first one never tells; its connection is reset, and the coordinator hears later.
            await asyncio.wait({rendezvous}, timeout=0.5)
            del store
            _, waits = await asyncio.wait({rendezvous}, timeout=1.0)
            assert waits, rendezvous.exception()
        async with asyncio.timeout(20):
            info = await rendezvous
        assert (info.rank, info.world_size) == (0, 1)
        await asyncio.to_thread(node.shutdown)
    assert not (tmp_path / "failure").exists(), "it ended well"


async def test_a_rendezvous_that_ends_torchrun_says_so_in_a_file_and_failed_workers_do_not(tmp_path: Path) -> None:
    file = tmp_path / "a, b=c"
    async with in_process() as running:
        for error in (RuntimeError("the workers failed"), DistNetworkError("reset by peer")):
            assert not file.exists()
            node = await asyncio.to_thread(handler, running.address, file)
            with suppress(type(error)):
                try:
                    raise error
                finally:
                    node.shutdown()
    assert file.read_text("utf-8") == "DistNetworkError: reset by peer"


async def test_workers_that_fail_again_and_again_are_started_after_longer_and_longer_delays(tmp_path: Path) -> None:
    async with in_process() as running:
        node = await asyncio.to_thread(handler, running.address, tmp_path / "failure")
        rounds, waited_s = [], []
        for _ in range(4):
            began_s = time.monotonic()
            await asyncio.to_thread(node.next_rendezvous)
            waited_s.append(time.monotonic() - began_s)
            rounds.append(node._round)
        await asyncio.to_thread(node.shutdown)
    assert rounds == sorted(set(rounds)), "each round is a generation of its own"
    least_s = [BACKOFF.delay_s(failures, 0.0) for failures in (1, 2, 3)]
    assert [waited >= least for waited, least in zip(waited_s[1:], least_s, strict=True)] == [True] * 3, waited_s
