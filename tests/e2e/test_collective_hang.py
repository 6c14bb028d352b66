"""A rank hangs while all others wait for it in a collective of gloo: it is named, its process ends, the job goes on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from tests.shell.coord.running import connect
from tests.shell.coord_worker.running import Program, Site, site
from tests.support.busy import BUSY

PROGRAM = Path(__file__).with_name("hang_program.py")
SAMPLES = 1_200


async def start(found: Site, worker_id: str, **given: Any) -> Program:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        json.dumps(given),
        env={
            "PATH": os.defpath,
            "STRATA_WORKER_ADDRESS": found.coordinator.address,
            "STRATA_WORKER_ID": worker_id,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_FR_BUFFER_SIZE": "64",
        },
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 22,
    )
    found.programs.append(Program(process, worker_id))
    return found.programs[-1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hang_at", [50, random.Random().randrange(100, 150)], ids=["soon", "later"])
async def test_the_job_goes_on_without_the_rank_that_hangs(tmp_path: Path, hang_at: int) -> None:
    print(f"hangs at step {hang_at}")
    async with site(tmp_path, min_workers="2", heartbeat_interval_s="1", hang_floor_s="8") as found:
        await found.coordinator.serving()
        given: dict[str, Any] = {
            "world_size": 3,
            "samples": SAMPLES,
            "out": str(tmp_path),
            "hangs": "w1",
            "hang_at": hang_at,
        }
        programs = [await start(found, f"w{number}", **given) for number in range(3)]
        for each in programs:
            await each.event("begun", within_s=120)
        await programs[1].event("hangs", within_s=120)
        began_s = monotonic()
        survivors = [programs[0], programs[2]]
        resumed = await asyncio.gather(*(each.event("begun", within_s=120) for each in survivors))
        took_s = max(event["at_s"] for event in resumed) - began_s
        print(f"trains again {took_s:.1f} s after the hang")
        assert {event["world_size"] for event in resumed} == {2}
        assert took_s < 30.0 * BUSY
        assert await programs[1].process.wait() == -signal.SIGKILL
        async with connect(found.coordinator.address) as channel:
            stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
            events = (await stub.ListEvents(pb.ListEventsRequest(kinds=[pb.EVENT_KIND_HANG]))).events
        assert await asyncio.gather(*(each.end(within_s=180) for each in survivors)) == [0, 0]
        (hang,) = events
        print(hang.message)
        assert list(hang.workers) == ["w1"]
        assert f"hang_program.py:{line_of('time.sleep(3_600)')} in train" in hang.message
        assert "gloo:all_reduce" in hang.message
        model = Counter(sample for each in survivors for sample in each.all("trained")[0]["model"])
        assert model == Counter(range(SAMPLES))


def line_of(text: str) -> int:
    lines = PROGRAM.read_text("utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
