"""Worker processes that are killed or frozen: how long the others wait for them."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest

from strata.coord.pb import coordinator_pb2 as pb
from tests.shell.coord.running import PING_TIMEOUT_S, in_process, patiently, register
from tests.support.busy import BUSY

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("worker_process.py")


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 8.0)])
async def test_the_others_go_on_and_get_its_shard_when_a_worker_gets(number: signal.Signals, within_s: float) -> None:
    async with in_process(ping_timeout_s=PING_TIMEOUT_S) as running:
        await register(running.stub, "a", "doomed")
        await running.stub.AckDataset(pb.DatasetInfo(dataset_id="d", worker_id="a", num_samples=20, shard_size=10))
        worker = await asyncio.create_subprocess_exec(
            sys.executable, str(WORKER), running.address, "doomed", stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        assert worker.stdout is not None
        try:
            held = int(await worker.stdout.readline())
            waiting = asyncio.ensure_future(running.stub.Barrier(pb.BarrierRequest(worker_id="a", barrier_id="b")))
            began_s = time.monotonic()
            worker.send_signal(number)
            assert (await waiting).verdict == pb.BARRIER_VERDICT_MEMBERSHIP_CHANGED
            unblocked_s = time.monotonic() - began_s
            found = await patiently(running.stub.GetNextShards, pb.ShardRequest(dataset_id="d", worker_id="a"))
            reissued_s = time.monotonic() - began_s
        finally:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
        print(f"\n{number.name}: unblocked after {unblocked_s:.2f} s, shard re-issued after {reissued_s:.2f} s")
        assert found.start_index == held
        assert reissued_s <= within_s * BUSY
