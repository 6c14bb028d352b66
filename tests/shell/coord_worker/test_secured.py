"""The SDK against coordinators as they are run: TLS, mTLS, tokens, a leader and a standby; and with a broken NVML."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import strata.coord.worker as strata
from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.coord.core.job_config import JobConfig
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.tokens import Claims, RevokedTokens, TokenRole
from tests.shell.coord.running import CoordinatorProcess, Running, in_process
from tests.shell.coord.test_access import LATER, SECRET, bearer, certificate, tls_files, token
from tests.shell.coord_worker.test_calls import worker
from tests.support.ports import port_of, reserve_port


@asynccontextmanager
async def guarded(folder: Path, *, mutual: bool) -> AsyncIterator[tuple[Running, dict[str, Any]]]:
    """A coordinator that asks for tokens and, if `mutual`, for certificates; and what a worker needs to know."""
    authority = certificate("authority")
    tls = tls_files(folder, certificate("server", authority), authority if mutual else None)
    own = certificate("worker", authority)
    for name, content in (("ca.pem", authority.pem), ("worker.pem", own.pem), ("worker.key", own.key_pem)):
        (folder / name).write_bytes(content)
    given: dict[str, Any] = {"tls_ca": str(folder / "ca.pem"), "id": "", "patience_s": 20}
    if mutual:
        given |= {"tls_certificate": str(folder / "worker.pem"), "tls_key": str(folder / "worker.key")}
    credentials = grpc.ssl_channel_credentials(
        authority.pem, own.key_pem if mutual else None, own.pem if mutual else None
    )
    async with in_process(tokens=SECRET, tls=tls, credentials=credentials) as running:
        yield running, given


@pytest.mark.parametrize("mutual", [False, True])
async def test_a_worker_with_a_token_works_over_tls(tmp_path: Path, mutual: bool) -> None:
    async with (
        guarded(tmp_path, mutual=mutual) as (running, given),
        worker(running, **given, token=token(worker="w7")) as found,
    ):
        assert found.job == "j"
        await found.dataset("corpus", samples=20, shard_size=10)
        assert sum([len(shard) async for shard in found.shards("corpus", 0, prefetch=1)]) == 20
        await found.barrier("end")
        shown = await running.stub.GetJob(pb.GetJobRequest(), metadata=bearer(token()))
        assert [(each.worker_id, each.attached) for each in shown.job.workers] == [("w7", True)]


async def refusal(running: Running, given: dict[str, Any]) -> StrataError:
    with pytest.raises(StrataError) as caught:
        async with worker(running, **given):
            pass
    return caught.value


@pytest.mark.parametrize("mutual", [False, True])
async def test_who_is_not_let_in_is_told_why(tmp_path: Path, mutual: bool) -> None:
    async with guarded(tmp_path, mutual=mutual) as (running, given):
        wrong = token(worker="w7")[:-4] + "AAAA"
        error = await refusal(running, given | {"token": wrong})
        assert (error.code, wrong in str(error)) == (Code.UNAUTHENTICATED, False)
        error = await refusal(running, given | {"token": token(expires_s=1, worker="w7")})
        assert error.code is Code.UNAUTHENTICATED
        error = await refusal(running, given | {"token": token(worker="w7"), "id": "w8"})
        assert error.code is Code.FORBIDDEN
        error = await refusal(running, given | {"token": token(worker="w7"), "job": "another"})
        assert error.code is Code.FORBIDDEN
        assert (await refusal(running, given | {"id": "w7"})).code is Code.UNAUTHENTICATED
        assert not running.service.state.jobs


async def outlives(running: Running, given: dict[str, Any], seconds: float) -> None:
    """A worker that reads one shard every 0.2 s for so long."""
    async with worker(running, **given, patience_s=5) as found:
        await found.dataset("corpus", samples=2_000, shard_size=10)
        until_s = time.monotonic() + seconds
        async for _ in found.shards("corpus", 0, prefetch=0):
            if time.monotonic() > until_s:
                break
            await asyncio.sleep(0.2)


BRISK = JobConfig(settle_s=0.05, heartbeat_interval_s=0.3)


@pytest.mark.proves("Never again: every worker died with its token")
async def test_a_run_that_is_longer_than_its_token_is_renewed_by_heartbeats() -> None:
    now_s = round(time.time())
    claims = Claims("j", TokenRole.WORKER, now_s + 3, "w7", id="t1", issued_s=now_s, renew_until_s=now_s + 60)
    async with in_process(BRISK, tokens=SECRET) as running:
        await outlives(running, {"id": "", "token": SECRET.issue(claims)}, 10)


async def test_a_token_that_is_not_renewed_ends_the_worker_when_it_expires() -> None:
    now_s = round(time.time())
    async with in_process(BRISK, tokens=SECRET) as running:
        with pytest.raises(StrataError, match="expired") as caught:
            await outlives(
                running, {"id": "", "token": SECRET.issue(Claims("j", TokenRole.WORKER, now_s + 2, "w7"))}, 5
            )
        assert caught.value.code is Code.UNAUTHENTICATED


@pytest.mark.proves("Never again: every worker died with its token")
async def test_a_token_file_that_is_replaced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    now_s = round(time.time())
    file.write_text(SECRET.issue(Claims("j", TokenRole.WORKER, now_s + 2, "w7")), encoding="utf-8")
    monkeypatch.setenv("STRATA_WORKER_TOKEN_FILE", str(file))
    async with in_process(BRISK, tokens=SECRET) as running:
        working = asyncio.create_task(outlives(running, {"id": ""}, 5))
        await asyncio.sleep(1)
        file.write_text(SECRET.issue(Claims("j", TokenRole.WORKER, LATER, "w7")), encoding="utf-8")
        await working


async def test_a_revoked_token_ends_its_worker_and_its_renewals(tmp_path: Path) -> None:
    now_s = round(time.time())
    claims = Claims("j", TokenRole.WORKER, now_s + 2, "w7", id="t1", issued_s=now_s, renew_until_s=now_s + 60)
    file = tmp_path / "revoked"
    async with in_process(BRISK, tokens=SECRET, revoked=RevokedTokens(file, SystemClock())) as running:
        working = asyncio.create_task(outlives(running, {"id": "", "token": SECRET.issue(claims)}, 10))
        await asyncio.sleep(3)
        assert not working.done()
        file.write_text("another\nt1\n", encoding="utf-8")
        with pytest.raises(StrataError, match="revoked"):
            await working


async def test_a_stranger_to_the_authority_is_not_connected_to(tmp_path: Path) -> None:
    async with guarded(tmp_path, mutual=True) as (running, given):
        (tmp_path / "strange.pem").write_bytes(certificate("stranger").pem)
        given |= {"token": token(worker="w7"), "patience_s": 1}
        without = {name: value for name, value in given.items() if name not in ("tls_certificate", "tls_key")}
        for unfit in (given | {"tls_ca": str(tmp_path / "strange.pem")}, without):
            error = await refusal(running, unfit)
            assert error.code is Code.UNAVAILABLE
            assert "no answer of the coordinator in 1 s" in str(error)
        error = await refusal(running, given | {"tls_ca": str(tmp_path / "none.pem")})
        assert (error.code, "none.pem" in str(error)) == (Code.INVALID, True)
        assert not running.service.state.jobs


async def test_a_worker_finds_the_leader_among_several_addresses_and_its_successor(postgres_url: str) -> None:
    async with AsyncExitStack() as stack:
        coordinators: list[CoordinatorProcess] = []
        for _ in range(2):
            port = port_of(stack.enter_context(reserve_port()))
            coordinator = CoordinatorProcess(postgres_url, port, {"STRATA_COORDINATOR_LEASE_S": "1"})
            stack.push_async_callback(coordinator.close)
            await coordinator.start()
            await (coordinator.standing_by() if coordinators else coordinator.serving())
            coordinators.append(coordinator)
        leader, standby = coordinators
        nobody = port_of(stack.enter_context(reserve_port()))
        addresses = f"127.0.0.1:{nobody},{standby.address},{leader.address}"
        found = await stack.enter_async_context(strata.join_async(address=addresses, id="w", patience_s=20))
        await found.dataset("corpus", samples=200, shard_size=10)
        read: list[int] = []
        killed_s = back_s = 0.0
        async for shard in found.shards("corpus", 0, prefetch=1):
            read += range(shard.start, shard.end)
            if killed_s and not back_s:
                back_s = time.monotonic() - killed_s
            if len(read) == 50:
                await leader.kill()
                killed_s = time.monotonic()
        print(f"\nthe next shard came {back_s:.2f} s after the leader was killed")
        assert sorted(read) == list(range(200))
        assert found.generation == 1


def library(folder: Path, kind: str) -> dict[str, str]:
    """An environment in which NVML is what `kind` says."""
    match kind:
        case "absent":
            return {}
        case "no library at all":
            (folder / "libnvidia-ml.so.1").write_bytes(b"this is no library")
        case _:
            # A library that can be loaded and has none of the functions.
            maths = next(Path("/lib").glob("*/libm.so.6"))
            (folder / "libnvidia-ml.so.1").symlink_to(maths)
    return {"LD_LIBRARY_PATH": str(folder)}


TELL = """
import json, pynvml
from strata.coord.worker.telemetry import Telemetry
telemetry = Telemetry()
usage = telemetry.usage()
telemetry.close()
print(json.dumps([len(usage.gpu_metrics), usage.memory_used_bytes]))
"""


NVML = """
import os
from types import SimpleNamespace as Row
class NVMLError(Exception): pass
NVML_TEMPERATURE_GPU = 0
BUSY = set(map(int, filter(None, os.environ.get("BUSY", "").split(","))))
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 4
def nvmlDeviceGetHandleByIndex(index):
    if index == 2:
        raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetUUID(device): return f"GPU-{device}{device}"
def nvmlDeviceGetName(device): return b"card"
def nvmlDeviceGetMemoryInfo(device): return Row(used=1, total=2)
def nvmlDeviceGetUtilizationRates(device): return Row(gpu=50)
def nvmlDeviceGetComputeRunningProcesses(device): return [Row(pid=os.getpid() if device in BUSY else 1)]
def nvmlDeviceGetTemperature(device, kind): raise NVMLError("Not Supported")
"""
GPUS = TELL.replace(
    "[len(usage.gpu_metrics), usage.memory_used_bytes]", "[[g.index, g.error] for g in usage.gpu_metrics]"
)
LOST = [2, "GPU is lost"]


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, [[0, ""], [1, ""], LOST, [3, ""]]),
        ({"BUSY": "3"}, [LOST, [3, ""]]),
        ({"CUDA_VISIBLE_DEVICES": "1,3"}, [[1, ""], [3, ""]]),
        ({"CUDA_VISIBLE_DEVICES": "1,2", "BUSY": "1"}, [[1, ""], LOST]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-33,-1,0"}, [[3, ""]]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
async def test_a_worker_reports_its_own_devices_and_which_of_them_failed(
    tmp_path: Path, variables: dict[str, str], gpus: list[list[object]]
) -> None:
    """By a library that answers as NVML's documentation says: there is no card to ask."""
    (tmp_path / "pynvml.py").write_text(NVML, encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", GPUS),
        env={"PATH": os.defpath, "PYTHONPATH": str(tmp_path), **variables},
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(told) == gpus


@pytest.mark.parametrize("kind", ["absent", "no library at all", "an empty library"])
async def test_without_a_working_nvml_there_is_telemetry_without_gpus(tmp_path: Path, kind: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TELL),
        env={"PATH": os.defpath, **library(tmp_path, kind)},
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    gpus, memory = json.loads(told)
    assert gpus == 0
    assert memory > 1 << 20
