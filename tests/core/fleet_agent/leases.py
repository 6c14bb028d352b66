"""Leases to try things with."""

from __future__ import annotations

from typing import Any

from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.wire.leases import LeaseGiven


def lease(trainer: TrainerSpec | None = None, *, epoch: int = 1, checkpoint: str = "", **spec: Any) -> LeaseGiven:
    job = JobSpec(model="mlp", **spec)
    return LeaseGiven(
        job_id=job.id, epoch=epoch, expires_in_s=45.0, spec=job, trainer=trainer or a_trainer(), checkpoint=checkpoint
    )


def a_trainer(*command: str, **more: Any) -> TrainerSpec:
    return TrainerSpec(name="t", command=command or ("python", "train.py"), **more)
