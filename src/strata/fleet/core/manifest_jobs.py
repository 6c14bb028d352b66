"""Reads `[[jobs]]`, `[[sweeps]]` and `[[schedules]]` of a manifest: their keys, the checks and wording of problems
(also of `grid` and `random`), at most 200,000 jobs, gangs, and the order by `after`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.suggest import did_you_mean
from strata.fleet.core.hyper import HyperFinding, HyperSchema
from strata.fleet.core.jobspec import (
    MAX_MEMBERS,
    MAX_WORKERS_PER_HOST,
    MIN_IDLE_S,
    GangPlace,
    JobId,
    JobSpec,
    TrainerSpec,
    find_cycle,
    gang_members,
)
from strata.fleet.core.problems import (
    KeyPath,
    Problems,
    describe_value,
    fits,
    json_problems,
    kinds_of,
    read_fields,
    table_at,
    tables_at,
)
from strata.fleet.core.requirement import Name, Needs
from strata.fleet.core.schedule import JobSchedule, parse_start, schedule_problem, start_fields
from strata.fleet.core.search import SearchPlan, SearchSweep, corner_points, search_problems
from strata.fleet.core.sweep_points import (
    MAX_SWEEP_JOBS,
    SEED_AXIS,
    Point,
    RandomSweep,
    axis_problem,
    grid_points,
    grid_size,
    random_points,
    range_problem,
    with_point,
)

MAX_JOBS: Final = 200_000
SERVER_BUDGET: Final = {"max_attempts": 1000, "max_lost": 1000, "max_infra": 1000}
"""Unless the manifest says otherwise: a server runs for months, and every restart of it counts."""

_NEEDS: Final = kinds_of(Needs)
_START: Final = ("not_before_s", "delay_s")
_OWN: Final = kinds_of(JobSpec, without=("needs", "after", "code", "data", "sweep", "due", "project", "gang", *_START))
_Workers = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
_GANG: Final[dict[str, Any]] = dict.fromkeys(("workers", "workers_per_host", "min_workers"), _Workers)
_JOB: Final[dict[str, Any]] = (
    _OWN
    | {"name": Name, "after": tuple[str, ...], "split_recipe": str | dict[str, Any], "not_before": Any}
    | _GANG
    | _NEEDS
)
_SWEEP: Final[dict[str, Any]] = _JOB | {"grid": dict[str, list[Any]], "random": RandomSweep, "search": SearchPlan}
_SCHEDULE: Final[dict[str, Any]] = _JOB | kinds_of(JobSchedule, without=("base",))
_UNSCHEDULED: Final = ("after", "not_before")


@dataclass(frozen=True, kw_only=True)
class ManifestContext:
    """What jobs are read against."""

    problems: Problems
    project: str
    trainers: Mapping[str, TrainerSpec]
    trainer_names: tuple[str, ...]
    """All that are declared, also those that could not be read: their jobs are read all the same."""
    retrain_on: tuple[str, ...]
    schemas: Mapping[str, HyperSchema]


@dataclass(slots=True)
class _JobTable:
    """The jobs so far, by id, with the places they came from and the names they answer to."""

    jobs: dict[str, JobSpec] = field(default_factory=dict)
    searches: dict[str, SearchSweep] = field(default_factory=dict)
    """The searches by the name of the sweep: the hub makes their jobs one by one."""
    schedules: dict[str, JobSchedule] = field(default_factory=dict)
    places: dict[str, KeyPath] = field(default_factory=dict)
    named: dict[str, list[str]] = field(default_factory=dict)
    """Ids by the name of the job or of its sweep."""
    labelled: dict[str, list[str]] = field(default_factory=dict)
    """Ids by `model-mode`, which counts where nothing is named so."""
    unread: set[str] = field(default_factory=set)
    """What jobs that could not be read are called: one mistake is reported once."""
    after: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The references as they are written."""
    references: list[tuple[KeyPath, tuple[str, ...]]] = field(default_factory=list)
    """Every `after` of the file, also of jobs that could not be read."""
    taken: dict[str, KeyPath] = field(default_factory=dict)
    """The `name`s given by the file."""


class ManifestJobs(NamedTuple):
    jobs: dict[str, JobSpec]
    """The jobs by id, in the order of the file, sweeps last."""
    searches: dict[str, SearchSweep]
    schedules: dict[str, JobSchedule]


def read_jobs(context: ManifestContext, data: Mapping[str, Any]) -> ManifestJobs:
    problems, read = context.problems, _JobTable()
    for place, table in tables_at(problems, ("jobs",), data.get("jobs", [])):
        job = _job(context, place, table, _JOB)
        _note_references(read, place, table)
        if job is None:
            _note_unread(read, table)
        elif _register_name(problems, read, place, job.declared_name if job.gang else job.name):
            for member in gang_members(job):
                _add_job(context, read, place, member, table.get("after", ()))
    for place, table in _sweeps(problems, data):
        _read_sweep(context, read, place, table)
    for place, table in tables_at(problems, ("schedules",), data.get("schedules", [])):
        _read_schedule(context, read, place, table)
    if len(read.jobs) > MAX_JOBS:
        problems.add((), f"it has {len(read.jobs)} jobs, and at most {MAX_JOBS} are allowed")
    return ManifestJobs(_ordered(problems, read), read.searches, read.schedules)


def _sweeps(problems: Problems, data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    if "sweep" in data:
        table = table_at(problems, ("sweep",), data["sweep"])
        if table is not None:
            yield ("sweep",), table
    yield from tables_at(problems, ("sweeps",), data.get("sweeps", []))


def _job(context: ManifestContext, place: KeyPath, table: dict[str, Any], kinds: Mapping[str, Any]) -> JobSpec | None:
    """The job a table describes, without its order; None if something is wrong with it."""
    problems = context.problems
    before = len(problems)
    fields = read_fields(problems, place, table, kinds, required=("model",))
    readable = not {*_GANG, "name"} & (table.keys() - fields.keys())
    gang = _gang(problems, place, fields, alone=kinds is not _JOB) if readable else None
    if "idle_s" in fields and fields.get("kind") != "server":
        problems.add((*place, "idle_s"), 'only a server sleeps; set kind = "server"')
    if 0 < fields.get("idle_s", 0) < MIN_IDLE_S:
        problems.add((*place, "idle_s"), f"a server sleeps after {MIN_IDLE_S:g} s or more without a request; 0: never")
    start = _start(problems, place, fields)
    no_json = check_free_values(problems, place, table)
    trainer = _trainer(context, place, fields.get("trainer"), given="trainer" in table)
    if kinds is not _SWEEP and "hyper" not in no_json:
        findings = _hyper_findings(context, trainer, fields.get("hyper", {}))
        problems.add_all(((*place, "hyper", *finding.path), finding.message) for finding in findings)
    if len(problems) > before or trainer is None:
        return None
    spec = _job_spec(context, trainer, fields | start)
    if gang is not None:
        problem = gang_problem(spec, context.trainers.get(trainer))
        if problem:
            problems.add((*place, "workers"), problem)
            return None
    return spec if gang is None else msgspec.structs.replace(spec, gang=gang)


def _start(problems: Problems, place: KeyPath, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the spec for `not_before`."""
    written = fields.get("not_before")
    if written is None:
        return {}
    if not isinstance(written, str | datetime):
        problems.add((*place, "not_before"), f"expected a time or a delay such as +2h, found {describe_value(written)}")
        return {}
    try:
        return start_fields(parse_start(written))
    except StrataError as error:
        problems.add((*place, "not_before"), error.message)
        return {}


def _gang(problems: Problems, place: KeyPath, fields: Mapping[str, Any], *, alone: bool) -> GangPlace | None:
    """The place of the first member, if the job is a gang: it has more than one worker. `alone`: it may not be one."""
    workers = fields.get("workers", 1)
    per_host = fields.get("workers_per_host", workers)
    least = fields.get("min_workers", workers)
    before = len(problems)
    if alone and workers > 1:
        reason = "each run is followed as one job"
        problems.add(
            (*place, "workers"), f"the jobs of a sweep or of a schedule are no gangs, because {reason}; it has to be 1"
        )
    if workers % per_host:
        problems.add((*place, "workers"), f"it is not a multiple of workers_per_host = {per_host}")
    if per_host > MAX_WORKERS_PER_HOST:
        problems.add(
            (*place, "workers"), f"{per_host} on one host: set workers_per_host, to at most {MAX_WORKERS_PER_HOST}"
        )
    if workers // per_host > MAX_MEMBERS:
        problems.add(
            (*place, "workers"), f"they need {workers // per_host} hosts, and at most {MAX_MEMBERS} are allowed"
        )
    if "min_workers" in fields and (least % per_host or least > workers):
        problems.add(
            (*place, "min_workers"),
            f"expected a multiple of workers_per_host = {per_host}, at most workers = {workers}",
        )
    if workers > 1 and "name" not in fields:
        problems.add(place, "name is required for a job with several workers")
    if workers == 1 or len(problems) > before:
        return None
    return GangPlace(
        name=fields["name"],
        size=workers // per_host,
        index=0,
        min_size=least // per_host,
        workers_per_host=per_host,
    )


def gang_problem(spec: JobSpec, trainer: TrainerSpec | None) -> str:
    """Says why this job cannot be a gang; empty if it can."""
    if spec.kind == "server":
        return "a server is no gang; it has to be 1"
    command = () if trainer is None else trainer.command
    if trainer is not None and (len(command) < 2 or command[0] not in ("python", "python3") or command[1][:1] == "-"):
        return 'the workers run under torchrun: the trainer needs command = ["python", "FILE", …]'
    return ""


def check_free_values(problems: Problems, place: KeyPath, values: Mapping[str, Any]) -> frozenset[str]:
    """The names of those free values of a job that are no plain JSON, which is a problem then."""
    misfits = {key: [*json_problems(values.get(key), (*place, key))] for key in ("hyper", "split_recipe")}
    for each in misfits.values():
        problems.add_all(each)
    return frozenset(key for key, each in misfits.items() if each)


def _job_spec(context: ManifestContext, trainer: str, fields: Mapping[str, Any]) -> JobSpec:
    own = {key: value for key, value in fields.items() if key in _OWN or key in _START}
    if own.get("kind") == "server":
        own = SERVER_BUDGET | own
    own["needs"] = Needs(**{key: value for key, value in fields.items() if key in _NEEDS})
    own["project"], own["trainer"] = context.project, trainer
    own["retrain_on"] = fields.get("retrain_on", context.retrain_on)
    declared = context.trainers.get(trainer)
    if declared is not None:
        own["code"], own["data"] = declared.digests_for(own["retrain_on"])
    return JobSpec(**own)


def _trainer(context: ManifestContext, place: KeyPath, name: str | None, *, given: bool) -> str | None:
    """Returns the trainer that runs the job: the one it names, or the only one."""
    names = context.trainer_names
    if name is None:
        if not given and len(names) != 1 and "default" not in names:
            message = f"trainer is required: there are {len(names)}" if names else "there is no [trainers.…] to run it"
            context.problems.add(place, message)
        name = names[0] if len(names) == 1 else "default"
    elif name not in names:
        context.problems.add((*place, "trainer"), f'there is no trainer "{name}"{did_you_mean(name, names)}')
    return name if name in names else None


def _register_name(problems: Problems, read: _JobTable, place: KeyPath, name: str) -> bool:
    other = read.taken.get(name) if name else None
    if other is not None:
        problems.add((*place, "name"), f'"{name}" is the name of {_describe_place(problems, other)} already')
        return False
    if name:
        read.taken[name] = place
    return True


def _add_job(context: ManifestContext, read: _JobTable, place: KeyPath, job: JobSpec, after: Any) -> None:
    try:
        identity = job.id
    except StrataError as error:
        context.problems.add(place, error.message)
        return
    if identity in read.jobs:
        other = _describe_place(context.problems, read.places[identity])
        context.problems.add(place, f"it is the same job as {other}: model, mode, hyper, split_recipe, … are all equal")
        return
    read.jobs[identity] = job
    read.places[identity] = place
    read.after[identity] = tuple(after)
    for name in {job.name, job.sweep, job.gang.name if job.gang else ""} - {""}:
        read.named.setdefault(name, []).append(identity)
    read.labelled.setdefault(f"{job.model}-{job.mode}", []).append(identity)


def _note_references(read: _JobTable, place: KeyPath, table: Mapping[str, Any]) -> None:
    after = table.get("after", [])
    if isinstance(after, list) and all(isinstance(name, str) for name in after):
        read.references.append(((*place, "after"), tuple(after)))


def _note_unread(read: _JobTable, table: Mapping[str, Any]) -> None:
    label = f"{table.get('model')}-{table.get('mode', 'default')}"
    read.unread |= {name for name in (table.get("name"), label) if isinstance(name, str)}


def _hyper_findings(context: ManifestContext, trainer: str | None, hyper: Any) -> list[HyperFinding]:
    schema = context.schemas.get(trainer or "")
    return [] if schema is None or context.problems.many else check_hyper(schema, hyper)


def check_hyper(schema: HyperSchema, hyper: Any) -> list[HyperFinding]:
    try:
        return schema.check(hyper)
    except StrataError as error:
        if error.code is not Code.INVALID:
            raise
        return [HyperFinding((), error.message)]


def _read_sweep(context: ManifestContext, read: _JobTable, place: KeyPath, table: dict[str, Any]) -> None:
    problems = context.problems
    before = len(problems)
    base = _job(context, place, table, _SWEEP)
    if "name" not in table and place != ("sweep",):
        problems.add(place, "name is required")
    searches = "search" in table and not {"grid", "random"} & table.keys()
    points = [] if searches else list(_points(problems, place, table))
    _note_references(read, place, table)
    if base is None or len(problems) > before:
        _note_unread(read, table)
        return
    sweep = base.name or "sweep"
    if not _register_name(problems, read, place, sweep):
        return
    if searches:
        _add_search(context, read, place, table, msgspec.structs.replace(base, name="", sweep=sweep))
    else:
        _add_points(context, read, place, table, msgspec.structs.replace(base, sweep=sweep), points)


def _read_schedule(context: ManifestContext, read: _JobTable, place: KeyPath, table: dict[str, Any]) -> None:
    """A schedule is written like a job. Its name is what its runs are called."""
    problems = context.problems
    before = len(problems)
    problems.add_all((place, f"{key} is required") for key in ("name", "cron") if key not in table)
    problems.add_all(((*place, key), "a run starts when it is due") for key in _UNSCHEDULED if key in table)
    base = _job(context, place, table, _SCHEDULE)
    if base is None or len(problems) > before:
        return
    own = {key: table[key] for key in ("cron", "timezone", "overlap") if key in table}
    schedule = JobSchedule(base=base, **own)
    if problem := schedule_problem(schedule):
        problems.add((*place, "cron") if base.kind == "train" else place, problem)
    elif _register_name(problems, read, place, base.name):
        read.schedules[base.name] = schedule


def _add_search(
    context: ManifestContext, read: _JobTable, place: KeyPath, table: Mapping[str, Any], base: JobSpec
) -> None:
    problems = context.problems
    before = len(problems)
    search = msgspec.convert(table["search"], SearchPlan)
    problems.add_all(((*place, "search", *where), message) for where, message in search_problems(search, base.hyper))
    if "after" in table:
        problems.add((*place, "after"), "a sweep that searches waits for no other job")
    if base.delay_s:
        problems.add((*place, "not_before"), "the trials of a search are queued one by one: write a time, not a delay")
    if len(problems) > before:
        return
    for point in corner_points(search):
        findings = _hyper_findings(context, base.trainer, with_point(base.hyper, point))
        problems.add_all(((*place, *_point_place(table, point, each)), each.message) for each in findings)
    read.searches[base.sweep] = SearchSweep(base=base, search=search)


def _add_points(
    context: ManifestContext,
    read: _JobTable,
    place: KeyPath,
    table: Mapping[str, Any],
    base: JobSpec,
    points: Sequence[Point],
) -> None:
    problems = context.problems
    for number, point in enumerate(points):
        seed = point.get(SEED_AXIS, base.seed)
        if not _is_seed(seed):
            problems.add((*place, "grid" if "grid" in table else "random"), f"{seed!r} is no seed: it is at least 0")
            return
        hyper = with_point(base.hyper, point)
        findings = _hyper_findings(context, base.trainer, hyper)
        problems.add_all(((*place, *_point_place(table, point, each)), each.message) for each in findings)
        job = msgspec.structs.replace(base, name=f"{base.sweep}/{number}", hyper=hyper, seed=seed)
        _add_job(context, read, place, job, table.get("after", ()))


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _point_place(table: Mapping[str, Any], point: Point, finding: HyperFinding) -> KeyPath:
    """Returns where in the sweep the value stands that a finding is about: in an axis, or in its `hyper`."""
    for axis in point:
        steps = tuple(axis.split("."))
        if finding.path[: len(steps)] == steps:
            return _axis_place(table, axis)
    return ("hyper", *finding.path)


def _axis_place(table: Mapping[str, Any], axis: str) -> KeyPath:
    return ("grid", axis) if "grid" in table else ("random" if "random" in table else "search", "space", axis)


def _points(problems: Problems, place: KeyPath, table: dict[str, Any]) -> Iterator[Point]:
    """The points of a sweep; none if its description is wrong, which is a problem then."""
    given = [key for key in ("grid", "random", "search") if key in table]
    if len(given) != 1:
        problems.add(place, "expected exactly one of grid, random, search")
        return
    kind = given[0]
    misfit = next(json_problems(table[kind], (*place, kind)), None)
    if misfit:
        problems.add(*misfit)
        return
    if not fits(table[kind], _SWEEP[kind]):
        return  # reported with the other fields
    sweep = msgspec.convert(table[kind], _SWEEP[kind])
    if _has_misplaced_axis(problems, place, table, sweep if kind == "grid" else sweep.space):
        return
    yield from (_grid if kind == "grid" else _random)(problems, (*place, kind), sweep)


def _has_misplaced_axis(problems: Problems, place: KeyPath, table: Mapping[str, Any], axes: Collection[str]) -> bool:
    hyper = table.get("hyper")
    for axis in axes:
        misplaced = axis_problem(hyper if isinstance(hyper, dict) else {}, axis, axes)
        if misplaced:
            problems.add((*place, *_axis_place(table, axis)), misplaced)
            return True
    return False


def _grid(problems: Problems, place: KeyPath, axes: dict[str, list[Any]]) -> Iterator[Point]:
    for axis, values in axes.items():
        if not values:
            problems.add((*place, axis), "it has no values")
    if not axes:
        problems.add(place, "it has no axes")
    elif (size := grid_size(axes)) > MAX_SWEEP_JOBS:
        problems.add(place, f"it has {size} points, and at most {MAX_SWEEP_JOBS} are allowed")
    else:
        yield from grid_points(axes)


def _random(problems: Problems, place: KeyPath, sweep: RandomSweep) -> Iterator[Point]:
    before = len(problems)
    if not sweep.space:
        problems.add(place, "space is empty")
    for axis, space in sweep.space.items():
        empty = range_problem(space)
        if empty:
            problems.add((*place, "space", axis), empty)
    if len(problems) == before:
        yield from random_points(sweep)


def _ordered(problems: Problems, read: _JobTable) -> dict[str, JobSpec]:
    """The jobs with `after` as ids. A name stands for all jobs that answer to it; a full id may be of another file."""
    _check_references(problems, read)
    before = {
        job: tuple(each for name in written for each in _resolve_name(read, name))
        for job, written in read.after.items()
    }
    ring = find_cycle(before)
    if ring:
        names = " after ".join(read.jobs[each].label for each in ring)
        problems.add((*read.places[ring[0]], "after"), f"the order goes in a circle: {names}")
    return {identity: msgspec.structs.replace(job, after=before[identity]) for identity, job in read.jobs.items()}


def _check_references(problems: Problems, read: _JobTable) -> None:
    for place, written in read.references:
        for index, name in enumerate(written):
            if not _resolve_name(read, name) and name not in read.unread:
                known = sorted({*read.taken, *read.labelled, *read.unread})
                problems.add((*place, index), f'there is no job "{name}"{did_you_mean(name, known)}')


def _resolve_name(read: _JobTable, name: str) -> list[str]:
    return read.named.get(name) or read.labelled.get(name) or ([name] if fits(name, JobId) else [])


def _describe_place(problems: Problems, place: KeyPath) -> str:
    line = problems.line(place)
    name = "sweep" if place == ("sweep",) else f"{place[0]}[{place[1]}]"
    return name if line is None else f"{name} (line {line})"
