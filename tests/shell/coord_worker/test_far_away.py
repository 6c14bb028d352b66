"""A worker whose coordinator is far away, or too busy to shake hands at once."""

from __future__ import annotations

from strata.base.clock import SystemClock
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.link import OPTIONS, CoordinatorLink, Deadline
from strata.coord.worker.settings import WorkerSettings
from tests.shell.coord.running import in_process
from tests.support.proxy import ChaosProxy

PAUSE_S = dict(OPTIONS)["grpc.max_reconnect_backoff_ms"] / 1000


async def test_a_connection_may_take_longer_than_the_pause_between_two_attempts() -> None:
    async with in_process() as running:
        host, _, port = running.address.rpartition(":")
        async with ChaosProxy(host, int(port), delay_s=1.3 * PAUSE_S) as proxy:
            link = CoordinatorLink(WorkerSettings(address=f"127.0.0.1:{proxy.port}"), "a", SystemClock())
            try:
                config = await link.call(lambda stub: stub.RegisterWorker, pb.WorkerInfo(), Deadline(20.0, 10.0))
            finally:
                await link.close()
        assert config.generation == 1
