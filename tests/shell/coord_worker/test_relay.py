"""The relay of a host: one call for the heartbeats of all its workers, and no difference to any of them otherwise."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import StrataError
from strata.coord.core.job_config import JobConfig
from strata.coord.core.liveness import interval_s
from strata.coord.core.state import StepProgress
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from strata.coord.server.heartbeat import HeartbeatHandler
from strata.coord.server.tokens import Claims, TokenRole
from strata.coord.worker import relay as relay_module
from strata.coord.worker.relay import HeartbeatRelay, ms_to_next_turn
from strata.coord.worker.settings import WorkerSettings
from tests.shell.coord.running import Running, in_process, patiently, refused, register
from tests.shell.coord.test_access import SECRET, bearer, token
from tests.shell.coord_worker.test_calls import worker
from tests.support.manual_clock import ManualClock

WITHIN_S: Final = 30.0
QUICK: Final = JobConfig(settle_s=0.05, heartbeat_interval_s=0.5, missed_beats=20)


class Traffic:
    """What reached the coordinator: the workers of each call, and which kind of call it was."""

    def __init__(self) -> None:
        self.single: list[str] = []
        self.batches: list[list[str]] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                while not condition():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"single {self.single}, batches {self.batches}") from None


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    seen = Traffic()
    one, batch = HeartbeatHandler.one, HeartbeatHandler.batch

    async def count_one(handler: HeartbeatHandler, request: pb.HeartbeatRequest, *rest: Any) -> Any:
        seen.single.append(request.worker_id)
        return await one(handler, request, *rest)

    async def count_batch(handler: HeartbeatHandler, request: pb.HeartbeatBatchRequest, *rest: Any) -> Any:
        seen.batches.append(sorted(each.worker_id for each in request.heartbeats))
        return await batch(handler, request, *rest)

    # A machine that stands still for a second is no relay that failed.
    monkeypatch.setattr(relay_module, "SHORTEST_WAIT_S", 4.0)
    monkeypatch.setattr(HeartbeatHandler, "one", count_one)
    monkeypatch.setattr(HeartbeatHandler, "batch", count_batch)
    return seen


@pytest.fixture
def path() -> Iterator[Path]:
    """Short: the folders of tests have names that are too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="relay-") as folder:
        yield Path(folder, "relay")


def relay_to(running: Running, path: Path) -> HeartbeatRelay:
    return HeartbeatRelay(WorkerSettings(address=running.address), path, SystemClock(), phase_s=0.0)


@asynccontextmanager
async def caller(path: Path) -> AsyncIterator[pb_grpc.CoordinatorAsyncStub]:
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
        yield pb_grpc.CoordinatorStub(channel)


@pytest.mark.parametrize(
    ("now_s", "phase_s", "expected"),
    [(10.0, 0.0, 5_000), (12.0, 0.0, 3_000), (12.0, 1.0, 2_000), (14.9995, 0.0, 1), (14.0, 1.0, 5_000)],
)
def test_workers_of_a_host_send_at_the_same_time_once_in_an_interval(
    now_s: float, phase_s: float, expected: int
) -> None:
    assert ms_to_next_turn(5_000, now_s, phase_s) == expected


async def test_workers_that_joined_at_different_times_send_their_heartbeats_in_one_call(
    traffic: Traffic, path: Path
) -> None:
    async with (
        in_process(QUICK) as running,
        relay_to(running, path),
        worker(running, "a", relay=str(path), elastic=True) as first,
    ):
        await traffic.until(lambda: ["a"] in traffic.batches)
        async with worker(running, "b", relay=str(path), elastic=True):
            first.step(7)
            await traffic.until(lambda: traffic.batches[-3:] == [["a", "b"]] * 3)
            shown = (await running.stub.GetJob(pb.GetJobRequest())).job
            steps = {each.worker_id: each.step for each in shown.workers}
            assert (steps["a"], traffic.single) == (7, [])


async def test_the_turn_of_a_relay_does_not_shorten_how_long_a_worker_waits_for_a_coordinator(
    traffic: Traffic, path: Path
) -> None:
    async with (
        in_process(QUICK) as running,
        relay_to(running, path),
        worker(running, "a", relay=str(path), elastic=True) as found,
    ):
        await traffic.until(lambda: traffic.batches.count(["a"]) >= 3)
        state = running.service.state
        assert found._session.liveness.interval_s == interval_s(state, state.jobs["default"])


async def test_hangs_and_stragglers_are_judged_by_the_same_progress_with_a_relay_and_without(path: Path) -> None:
    async with in_process(QUICK) as running, relay_to(running, path), caller(path) as relayed:
        await register(running.stub, "w")
        judged = []
        for number, stub in enumerate((running.stub, relayed)):
            message = pb.HeartbeatRequest(
                worker_id="w", status=pb.WORKER_STATUS_TRAINING, generation=1, step=7, step_time_ms=40 + number
            )
            began_s = running.service.clock.monotonic_s()
            await stub.Heartbeat(message)
            soft = running.service.state.soft_of("default")
            assert began_s <= soft.seen_s["w"] <= running.service.clock.monotonic_s()
            judged.append(soft.progress["w"])
    assert judged == [StepProgress(7, 0.04, busy=False, generation=1), StepProgress(7, 0.041, busy=False, generation=1)]


async def test_a_worker_whose_relay_ends_or_is_frozen_sends_its_heartbeats_itself(traffic: Traffic, path: Path) -> None:
    async with (
        in_process(JobConfig(settle_s=0.05, heartbeat_interval_s=1.0, missed_beats=8)) as running,
        AsyncExitStack() as relaying,
    ):
        await relaying.enter_async_context(relay_to(running, path))
        async with worker(running, "a", relay=str(path), elastic=True):
            await traffic.until(lambda: ["a"] in traffic.batches)
            assert traffic.single == []
            await relaying.aclose()
            await traffic.until(lambda: traffic.single.count("a") >= 2)
            # It takes connections and never says a word, as a process that was stopped.
            deaf = relaying.enter_context(socket.socket(socket.AF_UNIX))
            deaf.bind(str(path.with_name("deaf")))
            deaf.listen()
            async with worker(running, "b", relay=str(path.with_name("deaf")), elastic=True):
                await traffic.until(lambda: traffic.single.count("b") >= 3)
                job = (await running.stub.GetJob(pb.GetJobRequest())).job
                assert [each.worker_id for each in job.workers if each.liveness == pb.LIVENESS_ALIVE] == ["a", "b"]
                assert not job.incidents


DYING: Final = """
import asyncio, sys, grpc
from strata.coord.pb import coordinator_pb2 as pb, coordinator_pb2_grpc as pb_grpc
async def main():
    async with grpc.aio.insecure_channel(f"unix:{sys.argv[1]}") as channel:
        await pb_grpc.CoordinatorStub(channel).Heartbeat(pb.HeartbeatRequest(worker_id="dying"))
asyncio.run(main())
"""


async def test_a_worker_that_dies_while_its_heartbeat_is_collected_does_not_count_as_connected(
    traffic: Traffic, path: Path
) -> None:
    clock = ManualClock()
    async with in_process(QUICK) as running:
        await register(running.stub, "dying", "alive")
        relay = HeartbeatRelay(WorkerSettings(address=running.address), path, clock, phase_s=0.0)
        async with relay, caller(path) as alive:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", DYING, str(path))
            await traffic.until(lambda: bool(relay._collected))
            (waiting,) = relay._collected[""]
            process.kill()
            await process.wait()
            await traffic.until(waiting.reply.cancelled)
            call = alive.Heartbeat(pb.HeartbeatRequest(worker_id="alive"))
            await traffic.until(lambda: len(relay._collected[""]) == 2)
            await clock.advance(1.0)
            await call
    assert (traffic.batches, traffic.single) == ([["alive"]], [])


async def test_each_heartbeat_is_forwarded_under_the_token_of_its_worker(traffic: Traffic, path: Path) -> None:
    async with in_process(QUICK, tokens=SECRET) as running:
        for each in ("one", "other"):
            await running.stub.RegisterWorker(pb.WorkerInfo(worker_id=f"w-{each}"), metadata=bearer(token(each)))
        async with relay_to(running, path), caller(path) as stub:
            calls = [
                stub.Heartbeat(pb.HeartbeatRequest(worker_id=worker_id, job_id=job), metadata=metadata)
                for worker_id, job, metadata in (
                    ("w-one", "one", bearer(token("one"))),
                    ("w-other", "other", bearer(token("other"))),
                    # Neither a token of another job nor none at all gets anywhere by the side of those that are good.
                    ("w-one", "one", bearer(token("other"))),
                    ("w-one", "one", ()),
                )
            ]
            assert (await calls[0]).generation > 0
            assert (await calls[1]).generation > 0
            for call in calls[2:]:
                assert (await refused(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert sorted(map(len, traffic.batches)) == [1, 2], "a call without a token is refused before it is read"


async def test_a_worker_behind_a_relay_gets_the_successor_of_its_token(path: Path) -> None:
    now_s = round(SystemClock().wall_s())
    old = SECRET.issue(Claims("j", TokenRole.WORKER, now_s + 60, "", "t", now_s - 3_600, now_s + 9_000))
    async with (
        in_process(QUICK, tokens=SECRET) as running,
        relay_to(running, path),
        worker(running, "a", relay=str(path), token=old) as found,
        asyncio.timeout(WITHIN_S),
    ):
        while dict(found._session.link.metadata)["authorization"] == f"Bearer {old}":
            await asyncio.sleep(0.01)


async def test_a_worker_behind_a_relay_learns_from_the_coordinator_that_it_was_replaced(
    traffic: Traffic, path: Path
) -> None:
    async with (
        in_process(QUICK) as running,
        relay_to(running, path),
        worker(running, "a", relay=str(path)) as found,
    ):
        await traffic.until(lambda: ["a"] in traffic.batches)
        await patiently(running.stub.RegisterWorker, pb.WorkerInfo(worker_id="a", incarnation="another"))
        await traffic.until(lambda: found._session.failure is not None)
        with pytest.raises(StrataError, match="another one has registered"):
            await found.flush()
    assert traffic.single != []
