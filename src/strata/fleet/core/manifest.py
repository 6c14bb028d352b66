"""The job manifest as a whole: its top-level tables, its limits (16 MiB, 1,000 schedules), `parse_manifest` of a
person's TOML, and the validation of a manifest that a client sends as JSON.

A person writes it as TOML: `project` says whose it is, `[trainers.NAME]` how jobs are run, `[hosts.NAME]` who may run
them, `[[jobs]]`, `[[sweeps]]` and `[[schedules]]` what there is to do. `parse_manifest` reads the text once, where it
is written. The caller then resolves the trainers (uploads their folders, fetches the schemas of their
hyper-parameters), and `ManifestDraft.resolve` makes the `JobManifest`, or raises one error with every problem, each
with file, line and path.

A manifest travels to the hub as that value. The hub trusts no client, so `validate_manifest` applies the same rules to
the value. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.base import toml
from strata.base.errors import Code, StrataError
from strata.fleet.core.hyper import HyperSchema
from strata.fleet.core.jobspec import (
    DEFAULT_PROJECT,
    HostSpec,
    JobId,
    JobSpec,
    TrainerSpec,
    check_trainer,
    gang_ids,
    member_name,
)
from strata.fleet.core.manifest_jobs import (
    MAX_JOBS,
    ManifestContext,
    check_free_values,
    check_hyper,
    gang_problem,
    read_jobs,
)
from strata.fleet.core.manifest_tables import env_problem, read_hosts, read_trainers
from strata.fleet.core.problems import Problems, fits, read_fields
from strata.fleet.core.requirement import NAME_RULE, Name
from strata.fleet.core.schedule import JobSchedule, schedule_problem
from strata.fleet.core.search import SearchSweep, corner_points, search_problems
from strata.fleet.core.sweep_points import with_point

MAX_BYTES: Final = 16 * 1024 * 1024
MAX_SOURCE: Final = 1024
"""Characters of a path: of a longer one its end."""
MAX_SCHEDULES: Final = 1000
_TABLES: Final = ("trainers", "hosts", "jobs", "sweep", "sweeps", "schedules")
_JobName = Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[0-9]{1,9})?)?\Z")]


class JobManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Resolved: sweeps are jobs, `after` has ids, and a trainer names an uploaded source instead of a local folder."""

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SOURCE)] = "manifest"
    """The file it was read from: its sweeps belong to it."""
    project: Name = DEFAULT_PROJECT
    """The project of these trainers and jobs. It is written in the file and never follows from the name of a folder."""
    trainers: dict[Name, TrainerSpec] = {}
    hosts: dict[Name, HostSpec] = {}
    jobs: dict[JobId, JobSpec] = {}
    """The jobs by id, in the order of the file, sweeps last."""
    searches: dict[Name, SearchSweep] = {}
    """Sweeps whose jobs the hub makes one by one, by name."""
    schedules: dict[Name, JobSchedule] = {}
    """Jobs that the hub queues again and again, by name."""


@dataclass(frozen=True, kw_only=True)
class ManifestDraft:
    """A parsed manifest whose trainers are not resolved yet, and whose jobs are not read: they depend on trainers."""

    document: toml.TomlDocument
    project: str
    retrain_on: tuple[str, ...]
    trainers: dict[str, TrainerSpec]
    """The trainers that could be read, whatever is wrong elsewhere."""
    hosts: dict[str, HostSpec]
    problems: Problems

    def resolve(
        self, *, trainers: Mapping[str, TrainerSpec] | None = None, schemas: Mapping[str, HyperSchema] | None = None
    ) -> JobManifest:
        """The manifest with these trainers in the place of those written; or INVALID with all that is wrong."""
        problems, data = self.problems.copy(), self.document.data
        resolved = self.trainers | dict(trainers or {})
        context = ManifestContext(
            problems=problems,
            project=self.project,
            trainers=resolved,
            trainer_names=tuple(data["trainers"]) if isinstance(data.get("trainers"), dict) else (),
            retrain_on=self.retrain_on,
            schemas=schemas or {},
        )
        read = read_jobs(context, data)
        problems.raise_any()
        return JobManifest(
            source=self.document.source,
            project=self.project,
            trainers=resolved,
            hosts=self.hosts,
            jobs=read.jobs,
            searches=read.searches,
            schedules=read.schedules,
        )


def parse_manifest(text: str, source: str) -> ManifestDraft:
    """INVALID if the text is no TOML; every other problem is kept for `resolve`, which reports all of them at once."""
    if len(text) > MAX_BYTES:
        raise StrataError(
            Code.INVALID, f"{source}: a manifest has at most {MAX_BYTES} characters, this one {len(text)}"
        )
    document = toml.parse(text, source)
    problems = Problems(document)
    kinds: dict[str, Any] = dict.fromkeys(_TABLES, Any)
    kinds["retrain_on"] = tuple[Literal["code", "data"], ...]
    kinds["project"] = Name
    fields = read_fields(problems, (), document.data, kinds)
    return ManifestDraft(
        document=document,
        project=fields.get("project", DEFAULT_PROJECT),
        retrain_on=fields.get("retrain_on", ()),
        trainers=read_trainers(problems, document.data.get("trainers", {})),
        hosts=read_hosts(problems, document.data.get("hosts", {})),
        problems=problems,
    )


def validate_manifest(manifest: JobManifest, schemas: Mapping[str, HyperSchema]) -> None:
    """INVALID with all that is wrong with a manifest that arrived as a value. Its types are checked by the decoder."""
    problems = Problems(toml.TomlDocument({}, "", manifest.source))
    for name, trainer in manifest.trainers.items():
        _validate_trainer(problems, name, trainer)
    for name, host in manifest.hosts.items():
        _validate_host(problems, name, host)
    if len(manifest.jobs) > MAX_JOBS:
        problems.add((), f"it has {len(manifest.jobs)} jobs, and at most {MAX_JOBS} are allowed")
    named: dict[str, str] = {}
    for job_id, job in manifest.jobs.items():
        if job.name and named.setdefault(job.name, job_id) != job_id:
            problems.add(("jobs", job.label, "name"), f'"{job.name}" is the name of another job already')
        _validate_job(problems, manifest, job_id, job, schemas.get(job.trainer))
    if not len(problems):
        _validate_gangs(problems, manifest)
    for name, sweep in manifest.searches.items():
        _validate_search(problems, manifest, name, sweep, schemas.get(sweep.base.trainer))
    if len(manifest.schedules) > MAX_SCHEDULES:
        problems.add((), f"it has {len(manifest.schedules)} schedules, and at most {MAX_SCHEDULES} are allowed")
    for name, schedule in manifest.schedules.items():
        _validate_schedule(problems, manifest, name, schedule, schemas.get(schedule.base.trainer))
    problems.raise_any()


def _validate_schedule(
    problems: Problems, manifest: JobManifest, name: str, schedule: JobSchedule, schema: HyperSchema | None
) -> None:
    place = ("schedules", name)
    base = schedule.base
    if base.name != name:
        problems.add(place, f"its runs are called {base.name!r}")
    if problem := schedule_problem(schedule):
        problems.add(place, problem)
    _validate_spec(problems, place, manifest, base, schema)


def _validate_search(
    problems: Problems, manifest: JobManifest, name: str, sweep: SearchSweep, schema: HyperSchema | None
) -> None:
    place = ("searches", name)
    base = sweep.base
    if (base.project, base.sweep, base.name, base.after, base.gang) != (manifest.project, name, "", (), None):
        problems.add(place, "its jobs are of the manifest's project and of this sweep, and wait for no other job")
    if base.kind != "train":
        problems.add(place, f"its jobs train, and are no {base.kind}")
    trainer = manifest.trainers.get(base.trainer)
    if trainer is None or (base.code, base.data) != trainer.digests_for(base.retrain_on):
        problems.add(place, f'"{base.trainer}" is not its trainer')
    misfits = list(search_problems(sweep.search, base.hyper))
    problems.add_all(((*place, *where), message) for where, message in misfits)
    if check_free_values(problems, place, {"hyper": base.hyper, "split_recipe": base.split_recipe}) or misfits:
        return
    for point in corner_points(sweep.search):
        trial = msgspec.structs.replace(base, hyper=with_point(base.hyper, point))
        _validate_hyper(problems, place, trial, schema)


def _validate_trainer(problems: Problems, name: str, trainer: TrainerSpec) -> None:
    place = ("trainers", name)
    if trainer.name != name:
        problems.add(place, f"its name is {trainer.name!r}")
    try:
        check_trainer(trainer)
    except StrataError as error:
        problems.add(place, error.message)
    if trainer.interpreter and trainer.venv:
        problems.add((*place, "venv"), "interpreter is given too; only one of them can be meant")
    for variable in trainer.env:
        problem = env_problem(variable)
        if problem:
            problems.add((*place, "env", variable), problem)


def _validate_host(problems: Problems, name: str, host: HostSpec) -> None:
    if host.name != name:
        problems.add(("hosts", name), f"its name is {host.name!r}")
    problems.add_all((("hosts", name, "quiet_hours"), hours.problem) for hours in host.quiet_hours if hours.problem)


def _validate_job(
    problems: Problems, manifest: JobManifest, job_id: str, job: JobSpec, schema: HyperSchema | None
) -> None:
    place = ("jobs", job.label)
    if _validate_spec(problems, place, manifest, job, schema):
        _validate_id(problems, place, job_id, job)


def _validate_spec(
    problems: Problems, place: tuple[str, str], manifest: JobManifest, job: JobSpec, schema: HyperSchema | None
) -> bool:
    """Says whether its id can be computed."""
    if job.project != manifest.project:
        problems.add((*place, "project"), f"it is of project {job.project!r}, the manifest of {manifest.project!r}")
    if not fits(job.name, _JobName) or not fits(job.sweep or "sweep", Name):
        problems.add((*place, "name"), f"expected {NAME_RULE}")
    no_json = check_free_values(problems, place, {"hyper": job.hyper, "split_recipe": job.split_recipe})
    if not isinstance(job.split_recipe, str | dict | None):
        problems.add((*place, "split_recipe"), "expected a string or a table")
    trainer = manifest.trainers.get(job.trainer)
    if trainer is None:
        problems.add((*place, "trainer"), f'there is no trainer "{job.trainer}"')
    elif (job.code, job.data) != trainer.digests_for(job.retrain_on):
        problems.add((*place, "retrain_on"), "code and data are not the digests of its trainer")
    if not no_json:
        _validate_hyper(problems, place, job, schema)
    return not no_json and trainer is not None and (job.code, job.data) == trainer.digests_for(job.retrain_on)


def _validate_gangs(problems: Problems, manifest: JobManifest) -> None:
    """Each gang is whole, its members are equal but for their place in it, and no other job has its name."""
    gangs: dict[str, list[tuple[str, JobSpec]]] = {}
    for job_id, job in manifest.jobs.items():
        if job.gang is not None:
            gangs.setdefault(job.gang.name, []).append((job_id, job))
    names = {job.name for job in manifest.jobs.values()} | {job.sweep for job in manifest.jobs.values()}
    names |= manifest.searches.keys() | manifest.schedules.keys()
    for name, members in gangs.items():
        problem = _gang_misfit(members, manifest.trainers.get(members[0][1].trainer))
        if name in names:
            problem = "it is the name of another job already"
        if problem:
            problems.add(("jobs", name, "workers"), problem)


def _gang_misfit(members: list[tuple[str, JobSpec]], trainer: TrainerSpec | None) -> str:
    """Says why these are not the members of one gang; empty if they are."""
    first = members[0][1]
    gang = first.gang
    assert gang is not None
    if problem := gang_problem(first, trainer):
        return problem
    if gang.min_size > gang.size or gang.run or first.sweep:
        return "min_workers is more than workers, or the gang belongs to a sweep"
    if len(members) != gang.size or [job_id for job_id, _ in members] != list(gang_ids(members[0][0], first)):
        return f"its {gang.size} members are not all there, each once"
    for index, (_, member) in enumerate(members):
        place = msgspec.structs.replace(gang, index=index)
        if msgspec.structs.replace(first, name=member_name(gang.name, index), gang=place) != member:
            return f"{member.label} is not equal to {first.label} but for its place in the gang"
    return ""


def _validate_hyper(problems: Problems, place: tuple[str, str], job: JobSpec, schema: HyperSchema | None) -> None:
    if schema is not None and not problems.many:
        findings = check_hyper(schema, job.hyper)
        problems.add_all(((*place, "hyper", *finding.path), finding.message) for finding in findings)


def _validate_id(problems: Problems, place: tuple[str, str], job_id: str, job: JobSpec) -> None:
    try:
        computed = job.id
    except StrataError as error:
        problems.add(place, error.message)
    else:
        if computed != job_id:
            # A client with other rules of identity would see other jobs than the hub runs.
            problems.add(place, f"the hub computes the id {computed}, the client sent {job_id}")
