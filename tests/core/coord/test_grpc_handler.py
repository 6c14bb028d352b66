"""How gRPC finds what answers a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.authenticator import TokenAuthenticator
from strata.coord.server.grpc_handler import MAX_BATCH, CoordinatorHandler, GenericOnly
from strata.coord.server.service import CoordinatorService
from strata.coord.server.servicer import Servicer
from strata.coord.settings import CoordinatorSettings
from tests.support.manual_clock import ManualClock
from tests.support.memory_journal import MemoryJournal

SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]


@dataclass
class Details:
    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


def handler_of(name: str) -> Any:
    clock = ManualClock()
    service = CoordinatorService(MemoryJournal(clock), clock, CoordinatorSettings())
    servicer = Servicer(service, TokenAuthenticator(None, clock))
    return CoordinatorHandler(servicer.calls, servicer.check_access).service(Details(f"/{SERVICE.full_name}/{name}"))  # type: ignore[arg-type]


def test_every_call_of_the_contract_is_answered_as_the_contract_says() -> None:
    for method in SERVICE.methods:
        handler = handler_of(method.name)
        assert handler.response_streaming == method.server_streaming
        assert handler.request_deserializer(b"").DESCRIPTOR is method.input_type
    assert handler_of("NoSuchCall") is None


def test_a_reply_that_is_bytes_already_goes_out_as_it_is() -> None:
    to_bytes = handler_of("Heartbeat").response_serializer
    reply = pb.HeartbeatResponse(generation=7)
    assert to_bytes(reply.SerializeToString()) == to_bytes(reply) == reply.SerializeToString()


def test_generated_code_registers_no_methods_by_name() -> None:
    taken = GenericOnly()
    handler = grpc.method_handlers_generic_handler("a.Service", {})
    taken.add_generic_rpc_handlers((handler,))
    taken.add_registered_method_handlers("a.Service", {"Call": handler})
    assert taken.handlers == [handler]


def test_a_batch_takes_as_many_full_heartbeats_as_it_may_have() -> None:
    gpu = pb.GpuMetrics(name="NVIDIA H100 80GB HBM3", utilization_percent=98.5, memory_used_bytes=70 << 30)
    gpu.MergeFrom(pb.GpuMetrics(memory_total_bytes=80 << 30, temperature_celsius=64.0, power_watts=650.0))
    large = 1 << 41
    usage = pb.ResourceUsage(cpu_percent=412.5, memory_used_bytes=large, disk_read_bytes=large, disk_write_bytes=large)
    usage.MergeFrom(pb.ResourceUsage(network_rx_bytes=large, network_tx_bytes=large, gpu_metrics=[gpu]))
    beat = pb.HeartbeatRequest(worker_id="worker-00001", job_id="a-job-of-thirty-two-letters-long", resources=usage)
    beat.MergeFrom(pb.HeartbeatRequest(incarnation="worker-00001-1", generation=1000, step=1 << 30, step_time_ms=0.5))
    body = pb.HeartbeatBatchRequest(heartbeats=[beat] * MAX_BATCH).SerializeToString()
    assert len(handler_of("HeartbeatBatch").request_deserializer(body).heartbeats) == MAX_BATCH
