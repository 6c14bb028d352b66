"""What an operator orders happens: a checkpoint of one step, and a drain that the others survive. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from strata.coord.core.facts import CheckpointCommitted, WorkerLost
from tests.shell.coord_worker.running import Program, Site, site

FSDP_RANK = Path(__file__).with_name("fsdp_rank.py")
MORE_STEPS = 50


async def gang(found: Site, *args: str) -> tuple[int, list[dict[str, object]]]:
    """The exit status of `strata gang`, and its rows."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("strata")),
        *("gang", *args, "--address", found.coordinator.address, "-o", "jsonl"),
        env={"PATH": os.defpath},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.splitlines()]


@pytest.mark.timeout(400)
async def test_a_checkpoint_of_workers_that_are_not_in_step_is_one_of_one_step(tmp_path: Path) -> None:
    async with site(tmp_path, min_workers="2", heartbeat_interval_s="1") as found:
        paces = {"quick": 0.004, "slow": 0.02}
        workers = [
            await found.start("pace", name, join={"patience_s": 90}, step_s=pace, out=str(tmp_path))
            for name, pace in paces.items()
        ]
        for worker in workers:
            await worker.event("stepping", within_s=90)
        status, (row,) = await gang(found, "checkpoint", "default", "--wait", "60")
        assert status == 0
        status, _ = await gang(found, "stop", "default", "--all", "--wait", "60")
        assert status == 0
        assert await asyncio.gather(*(worker.end(within_s=60) for worker in workers)) == [0, 0]
        assert [[event["step"] for event in worker.all("saved")] for worker in workers] == [[row["step"]]] * 2
        committed = [fact for fact in await found.facts() if isinstance(fact, CheckpointCommitted)]
        assert [(fact.step, fact.checkpoint_id) for fact in committed] == [(row["step"], row["checkpoint_id"])]
        assert row["ranks"] == 2


async def pacing(found: Site, folder: Path, **given: Mapping[str, int]) -> list[Program]:
    """Workers that step; by name, how each reports and asks."""
    workers = [
        await found.start("pace", name, join={"patience_s": 90}, step_s=0.005, out=str(folder), **habits)
        for name, habits in given.items()
    ]
    for worker in workers:
        await worker.event("stepping", within_s=90)
    return workers


@pytest.mark.timeout(400)
@pytest.mark.parametrize("habits", [{"report_every": 10, "ask_every": 10}, {"ask_every": 10}], ids=["reports", "asks"])
async def test_programs_that_report_or_ask_after_every_tenth_step_write_a_checkpoint(
    tmp_path: Path, habits: Mapping[str, int]
) -> None:
    async with site(tmp_path, min_workers="2", heartbeat_interval_s="1") as found:
        workers = await pacing(found, tmp_path, a=habits, b=habits)
        status, (row,) = await gang(found, "checkpoint", "default", "--wait", "60")
        assert (status, int(str(row["step"])) % 10, row["ranks"]) == (0, 0, 2)
        status, _ = await gang(found, "drain", "default", "a", "--wait", "60")
        assert status == 0
        assert await workers[0].end(within_s=60) == 0
        saved = [[event["step"] for event in worker.all("saved")] for worker in workers]
        assert saved[0][0] == row["step"]
        assert all(step % 10 == 0 for steps in saved for step in steps)


@pytest.mark.timeout(400)
async def test_ranks_that_share_no_step_are_refused_by_name_and_go_on(tmp_path: Path) -> None:
    async with site(tmp_path, min_workers="2", heartbeat_interval_s="1") as found:
        odd, even = {"ask_every": 2, "ask_from": 1}, {"ask_every": 2}
        workers = await pacing(found, tmp_path, odd=odd, even=even)
        status, rows = await gang(found, "checkpoint", "default", "--wait", "90")
        assert (status, rows) == (100, [])
        assert (await gang(found, "drain", "default", "odd", "--wait", "90"))[0] == 100
        status, rows = await gang(found, "events", "default", "--kind", "command_refused")
        assert [str(row["message"]).count("after every 2 steps") for row in rows] == [1, 1]
        status, _ = await gang(found, "stop", "default", "--all", "--wait", "60")
        assert status == 0
        assert await asyncio.gather(*(worker.end(within_s=60) for worker in workers)) == [0, 0]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("every", [1, 3])
async def test_a_drained_fsdp_rank_leaves_and_the_others_lose_no_step(tmp_path: Path, every: int) -> None:
    import torch
    from safetensors.torch import load_file

    from tests.shell.coord_worker.fsdp_rank import learn, new_model

    async with site(tmp_path, min_workers="2", heartbeat_interval_s="1") as found:
        ranks = {name: await fsdp_rank(found, name, tmp_path, every) for name in ("a", "b", "c")}
        try:
            for process in ranks.values():
                await step_of(process, 10)
            status, rows = await gang(found, "drain", "default", "b", "--wait", "60")
            assert (status, [(row["worker"], row["answer"]) for row in rows]) == (0, [("b", "left")])
            assert [await ended(process) for process in ranks.values()] == [0, 0, 0]
        finally:
            for process in ranks.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        facts = await found.facts()
        assert [fact.cause for fact in facts if isinstance(fact, WorkerLost)] == ["left"] * 3
        (drained,) = [fact.step for fact in facts if isinstance(fact, CheckpointCommitted)]
        assert drained > 10
        assert drained % every == 0
    # torch alone, in one process: a step that was lost or repeated would show.
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, drained + MORE_STEPS + 1):
        learn(model, optimizer, step)
    assert not (tmp_path / "final-b.safetensors").exists()
    for name in ("a", "c"):
        found_weight = load_file(tmp_path / f"final-{name}.safetensors")["weight"]
        torch.testing.assert_close(found_weight, model.weight.detach(), rtol=1e-4, atol=1e-5)


async def fsdp_rank(found: Site, name: str, folder: Path, every: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(FSDP_RANK), str(folder), "3", str(MORE_STEPS), str(every)),
        env={
            "PATH": os.defpath,
            "STRATA_WORKER_ADDRESS": found.coordinator.address,
            "STRATA_WORKER_ID": name,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        stdout=asyncio.subprocess.PIPE,
    )


async def step_of(process: asyncio.subprocess.Process, step: int) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(120):
        while (line := await process.stdout.readline()) and json.loads(line)["step"] < step:
            pass
    assert line, f"it ended with {await process.wait()}"


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(120):
        await process.communicate()
    assert process.returncode is not None
    return process.returncode
