"""Quotas of owners and their defaults (10,000 jobs, priorities -100 to 0, GPU hours in 30 days, bytes), and the errors
when jobs, hours or bytes exceed them.

A quota is checked when jobs are queued, in the transaction that queues them: all jobs of a request fit, or none is
queued. Operators have no quota. A job that runs is never ended by a quota of jobs or hours. What it makes is stored
beyond the quota of bytes as well, up to twice of it: one job must not fill the disk of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import MAX_PRIORITY, JobSpec, Priority

EVERYBODY: Final = "*"
"""The owner under whose name the quota of those is kept who have none of their own."""
HOUR_S: Final = 3600.0
MAX_SPEC_BYTES: Final = 64 * 1024
"""The largest job of an owner with a quota, as it is stored: a list of jobs has a thousand of them."""

Jobs = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Hours = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Window = Annotated[float, msgspec.Meta(gt=0, le=3650 * 86_400)]


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    jobs: Jobs | None = 10_000
    """Jobs that wait or run; None: any number."""
    min_priority: Priority = -100
    max_priority: Priority = 0
    """0 is the priority of a job that names none: fair share decides among those, and no owner goes before all others
    unless an operator allows it."""
    gpu_hours: Hours | None = None
    """Card hours within the window; None: any number."""
    window_s: Window = 30 * 86_400.0
    bytes: Bytes | None = None
    """Bytes of sources, data, results and checkpoints; None: any number."""

    @property
    def attempt_bytes(self) -> int | None:
        """Returns the bytes up to which attempts may store results and checkpoints."""
        return None if self.bytes is None else 2 * self.bytes

    @property
    def problem(self) -> str:
        """Says why this is no quota; empty if it is one."""
        if self.min_priority > self.max_priority:
            return f"the range of priorities {self.min_priority}:{self.max_priority} is empty"
        return ""


DEFAULT: Final = Quota()
UNLIMITED: Final = Quota(jobs=None, min_priority=-MAX_PRIORITY, max_priority=MAX_PRIORITY)


class OwnerUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    jobs: int = 0
    """Jobs that wait or run."""
    gpu_hours: float = 0.0
    """GPU hours within the window of the owner's quota."""
    bytes: int = 0
    """Bytes that the hub stores."""


def quota_of(owner: str, quotas: Mapping[str, Quota]) -> Quota:
    """The quota of this owner, else the one of everybody."""
    return quotas.get(owner) or quotas.get(EVERYBODY) or DEFAULT


def check_specs(owner: str, quota: Quota, specs: Iterable[JobSpec]) -> None:
    """FORBIDDEN if a job has a priority outside the range; INVALID if it is too long."""
    for spec in specs:
        if not quota.min_priority <= spec.priority <= quota.max_priority:
            raise StrataError(
                Code.FORBIDDEN,
                f"{spec.label}: priority {spec.priority} is not in the range"
                f" {quota.min_priority}:{quota.max_priority} of {owner}",
                hint="choose another priority, or ask an operator for another quota: strata quota set",
                quota="priority",
            )
        if len(msgspec.json.encode(spec)) > MAX_SPEC_BYTES:
            raise StrataError(
                Code.INVALID,
                f"{spec.label} has more than {MAX_SPEC_BYTES} bytes",
                hint="put large parameters into a file of the source",
            )


def check_usage(owner: str, quota: Quota, usage: OwnerUsage, added: int) -> None:
    """EXHAUSTED unless the owner may queue `added` more jobs."""
    if not added:
        return
    if quota.jobs is not None and usage.jobs + added > quota.jobs:
        raise StrataError(
            Code.EXHAUSTED,
            f"the quota of {owner} is full: {usage.jobs} jobs wait or run, {added} more are too many for {quota.jobs}",
            hint="strata list --mine shows them; strata cancel ends them",
            quota="jobs",
        )
    if quota.gpu_hours is not None and usage.gpu_hours >= quota.gpu_hours:
        raise StrataError(
            Code.EXHAUSTED,
            f"the quota of {owner} is used up: {usage.gpu_hours:.1f} of {quota.gpu_hours:g} GPU hours"
            f" in {quota.window_s / 86_400:g} days",
            hint="wait, or ask an operator for another quota: strata quota set",
            quota="gpu_hours",
        )


def check_bytes(owner: str, limit: int | None, used: int, added: int, *, refusal: Code = Code.EXHAUSTED) -> None:
    """EXHAUSTED, or another refusal, unless `added` more bytes may be stored for the owner."""
    if limit is not None and used + added > limit:
        raise StrataError(
            refusal,
            f"the quota of {owner} is full: {used} bytes are stored, {added} more are too many for {limit}",
            hint="strata artifacts remove, or ask an operator for another quota: strata quota set",
            quota="bytes",
        )
