"""What a worker says about itself: when it registers, and with every heartbeat."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import strata
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.settings import WorkerSettings


def info(settings: WorkerSettings, job: str, incarnation: str, held: Iterable[int]) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=settings.worker_id,
        ip=settings.ip,
        port=settings.port,
        gpu_count=settings.gpus,
        job_id=job,
        incarnation=incarnation,
        weight=settings.weight,
        held_leases=held,
        elastic=settings.elastic,
        hostname=socket.gethostname(),
        sdk_version=f"strata-python/{strata.__version__}",
    )
