"""Compares a manifest with what is there: new, changed, orphaned, superseded and requeued jobs, changed trainers and
host policies, the rights that it needs, and the summary that people confirm.

The manifest is compared with what is there; nothing is ever taken away by it. A job that is no longer written stays
until somebody cancels it, and a job that ended stays ended. Applying a plan and planning again gives an empty plan.

A change of a job that a host holds does not reach that host: it counts from the next attempt on (`deferred`). The
requirement class is one of these: a pending job moves to its new class at once, a held one when it is pending again.
So is the trainer: a job carries the digest of the one it was queued with, and takes another only by a manifest of its
own project, as an entry of the plan.

A completed job keeps its result and the trainer that made it. A result of an earlier trainer of the project is counted
as such (`outdated`) and stays, unless `retrain` is asked for. A result from before a manifest had the job may be of any
submitter and trainer: the job runs again (`requeued`), unless the operator accepts it.

A gang is one job here: its members run again together or not at all, and a new gang supersedes all members of an
earlier one of its name.

A plan is of one project. It cannot name a job or a trainer of another one, and takes a host's policy from another one
only where the operator says so (`take_over`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import HELD, TERMINAL, JobStatus
from strata.fleet.core.jobspec import DEFAULT_PROJECT, HostSpec, JobSpec, TrainerSpec, find_cycle, gang_ids, in_run
from strata.fleet.core.lease_status import outdated_plan
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.ownership import OPERATOR, Submitter, check_owners

KINDS: Final = {
    "priority": ("priority",),
    "constraints": ("needs",),
    "order": ("after",),
    "limits": ("max_attempts", "max_lost", "max_infra", "timeout_s", "idle_s", "gang"),
    "start": ("not_before_s", "delay_s"),
    "trainer": ("trainer",),
    "retrain_on": ("retrain_on",),
    "name": ("name", "sweep"),
}
"""The kinds of change, as the summary counts them. What is not here is part of the id, so it cannot change."""


class RegisteredTrainer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer as the last manifest of its project declared it."""

    digest: str
    spec: TrainerSpec


class HostPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy of a host, and whose manifest wrote it."""

    spec: HostSpec
    project: str = DEFAULT_PROJECT


class ApplyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator allows beyond the manifest."""

    accept: bool = False
    """Results from before a manifest had the job count."""
    retrain: bool = False
    """Completed jobs whose result an earlier trainer made run again."""
    take_over: bool = False
    """Policies of hosts of another project, and sweeps of another file, become this one's."""


class ExistingJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that is there."""

    spec: JobSpec
    status: JobStatus
    declared: bool = True
    """It came from a manifest. Others were submitted one by one, and no manifest misses them."""
    trainer: str = ""
    """The digest of the trainer that its next attempt is run with; of a completed job, of the one that made it."""
    owner: str = ""


class JobChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job_id: str
    spec: JobSpec
    """The job as it is to be."""
    kinds: tuple[str, ...]
    reclassed: bool
    """Its requirement class is another one."""
    deferred: bool
    """A host holds it: the change counts from the next attempt on."""
    ended: bool = False
    """It counts when the job is requeued."""


class ApplyPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    project: str = DEFAULT_PROJECT
    new: dict[str, JobSpec] = {}
    changed: tuple[JobChange, ...] = ()
    unchanged: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()
    """Unfinished jobs of an earlier manifest that this one does not have; kept."""
    superseded: tuple[str, ...] = ()
    """Jobs that are not in the manifest any more and whose names new jobs have; lists hide them once they have ended.
    """
    trainers: dict[str, TrainerSpec] = {}
    """New or changed. Those the manifest does not have stay, for the jobs that name them."""
    seen: dict[str, str] = {}
    """The digests that names of trainers stood for when this was planned; empty for a name that nobody had."""
    requeued: dict[str, JobSpec] = {}
    """Completed jobs that run again, because their result does not count."""
    outdated: tuple[str, ...] = ()
    """Completed jobs whose result an earlier trainer made; they stay completed."""
    hosts: dict[str, HostSpec] = {}
    """New or changed policies. Hosts that the manifest does not name keep theirs."""
    take_over: bool = False
    """Some of these policies belong to another project."""
    pinned: str = ""
    """The digest of the trainer that new jobs get; empty: the one that its name stands for."""
    leaving: dict[str, str] = {}
    """Jobs that are trials of a sweep and are not in it any more afterwards, with that sweep."""

    @property
    def empty(self) -> bool:
        return not (self.new or self.changed or self.trainers or self.requeued or self.hosts)

    @property
    def takers(self) -> int:
        """Returns how many unfinished jobs take another trainer."""
        return sum("trainer" in change.kinds and not change.ended for change in self.changed)

    def check_trainers(self, registered: Mapping[str, str]) -> None:
        """CONFLICT when a name stands for another digest by now, unless it is the one that this plan gives it."""
        for name, seen in self.seen.items():
            digest = registered.get(name, "")
            if digest != seen and (name not in self.trainers or digest != self.trainers[name].digest):
                raise outdated_plan(f"the trainer {name!r}")

    def summary(self) -> str:
        """One line for a person, as in `+3 new  ~1 priority  =10 unchanged`, with what is orphaned at the end."""
        counted = Counter(kind for change in self.changed for kind in change.kinds)
        parts = [
            _part("+", len(self.new), "new"),
            *(_part("~", counted[kind], kind) for kind in KINDS if kind != "trainer"),
            self._trainer_part(),
            _part("~", len(self.requeued), "requeued"),
            _part("~", len(self.hosts), "host" if len(self.hosts) == 1 else "hosts"),
            _part("=", len(self.unchanged), "unchanged"),
            _part("=", len(self.outdated), "of an earlier trainer, kept"),
            # U+2212: it is as wide as the plus above it.
            _part("\N{MINUS SIGN}", len(self.orphaned), "orphaned, kept"),
        ]
        return "  ".join(filter(None, parts)) or "nothing declared, nothing there"

    def _trainer_part(self) -> str:
        if not self.trainers:
            return f"~{_count(self.takers, 'job')} of another trainer" if self.takers else ""
        take = "takes" if self.takers == 1 else "take"
        taken = f" ({_count(self.takers, 'queued job')} {take} it)" if self.takers else ""
        return f"~{_count(len(self.trainers), 'trainer')}{taken}"


def _part(sign: str, number: int, what: str) -> str:
    return f"{sign}{number} {what}" if number else ""


def plan(
    manifest: JobManifest,
    jobs: Mapping[str, ExistingJob],
    *,
    trainers: Mapping[str, RegisteredTrainer],
    hosts: Mapping[str, HostPolicy],
    options: ApplyOptions | None = None,
    submitter: Submitter = OPERATOR,
) -> ApplyPlan:
    """The difference between `manifest` and the jobs, policies and trainers (of its project) that are there.

    FORBIDDEN if it would change what the submitter may not change.
    """
    options = options or ApplyOptions()
    _check_order(manifest, jobs)
    _check_projects(manifest, jobs, hosts, options)
    _check_rights(manifest, jobs, submitter)
    digests = {name: _digest(spec, trainers.get(name)) for name, spec in manifest.trainers.items()}
    compared = _compare_jobs(manifest, jobs, digests, options)
    return ApplyPlan(
        project=manifest.project,
        new={job_id: spec for job_id, spec in manifest.jobs.items() if job_id not in jobs},
        changed=tuple(compared.changed),
        unchanged=tuple(compared.unchanged),
        orphaned=_orphaned(manifest, jobs),
        superseded=_superseded(manifest, jobs),
        trainers={name: spec for name, spec in manifest.trainers.items() if not _same(spec, trainers.get(name))},
        seen={name: trainers[name].digest if name in trainers else "" for name in manifest.trainers},
        requeued=compared.requeued,
        outdated=tuple(compared.outdated),
        hosts=_policies(manifest, hosts, options),
        take_over=options.take_over,
        leaving={
            job_id: jobs[job_id].spec.sweep
            for job_id, spec in manifest.jobs.items()
            if job_id in jobs and jobs[job_id].spec.sweep not in ("", spec.sweep)
        },
    )


@dataclass(slots=True)
class _Comparison:
    """The jobs of a manifest that are there already. The fields are those of the plan."""

    changed: list[JobChange] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    requeued: dict[str, JobSpec] = field(default_factory=dict)
    outdated: list[str] = field(default_factory=list)


def _compare_jobs(
    manifest: JobManifest, jobs: Mapping[str, ExistingJob], digests: Mapping[str, str], options: ApplyOptions
) -> _Comparison:
    compared = _Comparison()
    for job_id, spec in manifest.jobs.items():
        here = jobs.get(job_id)
        if here is None:
            continue
        digest = digests.get(spec.trainer, here.trainer)
        run = 0 if here.spec.gang is None else here.spec.gang.run
        # A manifest knows nothing of runs.
        wanted = in_run(spec, run)
        if here.status is JobStatus.COMPLETED:
            if _runs_again(here, digest, options) and _is_gang_completed(job_id, here, jobs):
                compared.requeued[job_id] = in_run(spec, run + 1)
                continue
            if here.trainer != digest:
                compared.outdated.append(job_id)
            change = _change(job_id, here, msgspec.structs.replace(wanted, trainer=here.spec.trainer), here.trainer)
        else:
            change = _change(job_id, here, wanted, digest)
        if change is None:
            compared.unchanged.append(job_id)
        else:
            compared.changed.append(change)
    return compared


def _runs_again(here: ExistingJob, digest: str, options: ApplyOptions) -> bool:
    if not here.declared:
        return not options.accept
    return options.retrain and here.trainer != digest


def _is_gang_completed(job_id: str, here: ExistingJob, jobs: Mapping[str, ExistingJob]) -> bool:
    members = gang_ids(job_id, here.spec)
    return all(member in jobs and jobs[member].status is JobStatus.COMPLETED for member in members)


def requeued_members(job_id: str, members: Mapping[str, tuple[JobStatus, JobSpec]]) -> dict[str, JobSpec]:
    """The members of a gang that run again when one of them is requeued, as they are to be.

    Those that have ended. A gang that is completed begins anew; otherwise it goes on from its last checkpoint.
    """
    run = max(0 if spec.gang is None else spec.gang.run for _, spec in members.values())
    if all(status is JobStatus.COMPLETED for status, _ in members.values()):
        run += 1
    ended = [member for member, (status, _) in members.items() if status in TERMINAL] or [job_id]
    return {member: in_run(members[member][1], run) for member in ended}


def _digest(spec: TrainerSpec, there: RegisteredTrainer | None) -> str:
    """Returns the digest of an equal trainer if there is one: one from before digests may be spelt in another order."""
    return there.digest if there is not None and there.spec == spec else spec.digest


def _same(spec: TrainerSpec, there: RegisteredTrainer | None) -> bool:
    return there is not None and there.spec == spec


def _orphaned(manifest: JobManifest, jobs: Mapping[str, ExistingJob]) -> tuple[str, ...]:
    return tuple(
        sorted(
            job_id
            for job_id, here in jobs.items()
            if here.spec.project == manifest.project
            and here.declared
            and here.status not in TERMINAL
            and job_id not in manifest.jobs
        )
    )


def _superseded(manifest: JobManifest, jobs: Mapping[str, ExistingJob]) -> tuple[str, ...]:
    names = {spec.declared_name for job_id, spec in manifest.jobs.items() if job_id not in jobs}
    return tuple(
        sorted(
            job_id
            for job_id, here in jobs.items()
            if here.spec.declared_name in names
            and here.spec.project == manifest.project
            and here.declared
            and job_id not in manifest.jobs
        )
    )


def _policies(manifest: JobManifest, hosts: Mapping[str, HostPolicy], options: ApplyOptions) -> dict[str, HostSpec]:
    changed = {}
    for name, spec in manifest.hosts.items():
        there = hosts.get(name)
        taken = there is not None and there.project != manifest.project and options.take_over
        if there is None or there.spec != spec or taken:
            changed[name] = spec
    return changed


def _check_rights(manifest: JobManifest, jobs: Mapping[str, ExistingJob], submitter: Submitter) -> None:
    if manifest.hosts and not submitter.operator:
        raise StrataError(
            Code.FORBIDDEN,
            f"{manifest.source}: only an operator may write policies of hosts",
            hint="leave [hosts.…] out of the manifest",
        )
    check_owners(submitter, ((jobs[id_].spec.label, jobs[id_].owner) for id_ in manifest.jobs if id_ in jobs))


def _check_projects(
    manifest: JobManifest, jobs: Mapping[str, ExistingJob], hosts: Mapping[str, HostPolicy], options: ApplyOptions
) -> None:
    """A manifest changes nothing that belongs to another project."""
    for job_id in manifest.jobs:
        here = jobs.get(job_id)
        if here is not None and here.spec.project != manifest.project:
            raise StrataError(Code.CONFLICT, f"{manifest.source}: {job_id} is a job of project {here.spec.project!r}")
    problems = [
        f"{manifest.source}: hosts.{name}: its policy belongs to project {there.project!r}"
        for name, there in hosts.items()
        if name in manifest.hosts and there.project != manifest.project and there.spec != manifest.hosts[name]
    ]
    if problems and not options.take_over:
        hint = "leave these [hosts.…] out, or take them over: strata apply --take-over"
        raise StrataError(Code.CONFLICT, "\n".join(problems), hint=hint, problems=tuple(problems))


def _change(job_id: str, here: ExistingJob, wanted: JobSpec, digest: str) -> JobChange | None:
    old = here.spec
    kinds = tuple(
        kind
        for kind, fields in KINDS.items()
        if any(getattr(old, field) != getattr(wanted, field) for field in fields)
        or (kind == "trainer" and here.trainer != digest)
    )
    if not kinds:
        return None
    return JobChange(
        job_id=job_id,
        spec=wanted,
        kinds=kinds,
        reclassed=old.requirement != wanted.requirement,
        deferred=here.status in HELD,
        ended=here.status in TERMINAL,
    )


def _check_order(manifest: JobManifest, jobs: Mapping[str, ExistingJob]) -> None:
    """`after` may name jobs of other manifests: only here is known whether they exist, and whether it is a circle."""
    problems = [
        f"{manifest.source}: {spec.label}: it comes after {other}, and there is no such job"
        for spec in manifest.jobs.values()
        for other in spec.after
        if other not in manifest.jobs and other not in jobs
    ]
    specs = {job_id: here.spec for job_id, here in jobs.items()} | manifest.jobs
    ring = find_cycle({job_id: spec.after for job_id, spec in specs.items() if spec.after})
    if ring:
        problems.append(f"{manifest.source}: the order goes in a circle: {' after '.join(ring)}")
    if problems:
        raise StrataError(Code.INVALID, "\n".join(problems), problems=tuple(problems))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
