"""What applying a manifest would change, before it is applied.

The manifest is compared with what is there; nothing is ever taken away by it. A job that is no longer written stays
until somebody cancels it, and a job that ended stays ended. Applying a plan and planning again gives an empty plan.

A change of a job that a host holds does not reach that host: it counts from the next attempt on (`deferred`). The
requirement class is one of these: a pending job moves to its new class at once, a held one when it is pending again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import HELD, TERMINAL, Status
from strata.fleet.core.jobspec import HostSpec, JobSpec, TrainerSpec
from strata.fleet.core.manifest import Manifest
from strata.fleet.core.order import cycle

KINDS: Final = {
    "priority": ("priority",),
    "constraints": ("needs",),
    "order": ("after",),
    "limits": ("max_attempts", "max_lost", "timeout_s"),
    "trainer": ("trainer",),
    "retrain_on": ("retrain_on",),
    "name": ("name", "sweep"),
}
"""The kinds of change, as the summary counts them. What is not here is part of the id, so it cannot change."""

_Named = TypeVar("_Named", TrainerSpec, HostSpec)


class Present(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that is there."""

    spec: JobSpec
    status: Status
    declared: bool = True
    """It came from a manifest. Others were submitted one by one, and no manifest misses them."""


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job_id: str
    spec: JobSpec
    """As it is to be."""
    kinds: tuple[str, ...]
    reclassed: bool
    """Its requirement class is another one."""
    deferred: bool
    """A host holds it: the change counts from the next attempt on."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    new: dict[str, JobSpec] = {}
    changed: tuple[Change, ...] = ()
    unchanged: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()
    """Unfinished jobs of an earlier manifest that this one does not have; kept."""
    trainers: dict[str, TrainerSpec] = {}
    """New or changed. Those the manifest does not have stay, for the jobs that name them."""
    hosts: dict[str, HostSpec] = {}
    """New or changed policies."""
    released_hosts: tuple[str, ...] = ()
    """Hosts whose policy is no longer written: they fall back to the default one."""

    @property
    def empty(self) -> bool:
        return not (self.new or self.changed or self.trainers or self.hosts or self.released_hosts)

    def summary(self) -> str:
        """One line for a person, as in `+3 new  ~1 priority  =10 unchanged`, with what is orphaned at the end."""
        parts = [f"+{len(self.new)} new"] if self.new else []
        counted = Counter(kind for change in self.changed for kind in change.kinds)
        parts += [f"~{counted[kind]} {kind}" for kind in KINDS if counted[kind]]
        parts += [f"~{_count(len(self.trainers), 'trainer')}"] if self.trainers else []
        policies = len(self.hosts) + len(self.released_hosts)
        parts += [f"~{_count(policies, 'host')}"] if policies else []
        parts += [f"={len(self.unchanged)} unchanged"] if self.unchanged else []
        # U+2212: it is as wide as the plus above it.
        parts += [f"\N{MINUS SIGN}{len(self.orphaned)} orphaned, kept"] if self.orphaned else []
        return "  ".join(parts) or "nothing declared, nothing there"


def plan(
    manifest: Manifest,
    jobs: Mapping[str, Present],
    *,
    trainers: Mapping[str, TrainerSpec],
    hosts: Mapping[str, HostSpec],
) -> Plan:
    """The difference between `manifest` and the jobs, trainers and policies that are there."""
    _check_order(manifest, jobs)
    changed, unchanged = [], []
    for job_id, spec in manifest.jobs.items():
        here = jobs.get(job_id)
        if here is not None:
            change = _change(job_id, here, spec)
            if change is None:
                unchanged.append(job_id)
            else:
                changed.append(change)
    orphaned = [
        job_id
        for job_id, here in jobs.items()
        if here.declared and here.status not in TERMINAL and job_id not in manifest.jobs
    ]
    return Plan(
        new={job_id: spec for job_id, spec in manifest.jobs.items() if job_id not in jobs},
        changed=tuple(changed),
        unchanged=tuple(unchanged),
        orphaned=tuple(sorted(orphaned)),
        trainers=_differing(manifest.trainers, trainers),
        hosts=_differing(manifest.hosts, hosts),
        released_hosts=tuple(sorted(name for name in hosts if name not in manifest.hosts)),
    )


def _change(job_id: str, here: Present, wanted: JobSpec) -> Change | None:
    old = here.spec
    kinds = tuple(
        kind for kind, fields in KINDS.items() if any(getattr(old, field) != getattr(wanted, field) for field in fields)
    )
    if not kinds:
        return None
    return Change(
        job_id=job_id,
        spec=wanted,
        kinds=kinds,
        reclassed=old.requirement != wanted.requirement,
        deferred=here.status in HELD,
    )


def _check_order(manifest: Manifest, jobs: Mapping[str, Present]) -> None:
    """`after` may name jobs of other manifests: only here is known whether they exist, and whether it is a circle."""
    problems = [
        f"{manifest.source}: {spec.label}: it comes after {other}, and there is no such job"
        for spec in manifest.jobs.values()
        for other in spec.after
        if other not in manifest.jobs and other not in jobs
    ]
    specs = {job_id: here.spec for job_id, here in jobs.items()} | manifest.jobs
    ring = cycle({job_id: spec.after for job_id, spec in specs.items() if spec.after})
    if ring:
        problems.append(f"{manifest.source}: the order goes in a circle: {' after '.join(ring)}")
    if problems:
        raise StrataError(Code.INVALID, "\n".join(problems), problems=tuple(problems))


def _differing(wanted: Mapping[str, _Named], there: Mapping[str, _Named]) -> dict[str, _Named]:
    return {name: spec for name, spec in wanted.items() if there.get(name) != spec}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
