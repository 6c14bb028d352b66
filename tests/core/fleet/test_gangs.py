"""A job with several workers becomes a gang: jobs that are declared, superseded and run again together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import GangPlace, JobSpec, coordinator_job, gang_ids
from strata.fleet.core.manifest import JobManifest, parse_manifest, validate_manifest
from strata.fleet.core.plan import ApplyOptions, ExistingJob, plan, requeued_members
from tests.core.fleet.jobs import TRAINER

GANG: Final = '[[jobs]]\nname = "sft"\nmodel = "m"\nworkers = 4\nworkers_per_host = 2\nmin_workers = 2\n'


def read(text: str) -> JobManifest:
    return parse_manifest(TRAINER + text, "m.toml").resolve()


def members(text: str = GANG) -> list[JobSpec]:
    return list(read(text).jobs.values())


def place(spec: JobSpec) -> GangPlace:
    assert spec.gang is not None
    return spec.gang


def problems(manifest: JobManifest) -> list[str]:
    with pytest.raises(StrataError) as refused:
        validate_manifest(manifest, {})
    assert refused.value.code is Code.INVALID
    return list(refused.value.detail["problems"])


def test_workers_become_one_member_for_each_host() -> None:
    first, second = members()
    assert [first.label, second.label] == ["sft/0", "sft/1"]
    assert place(first) == GangPlace(name="sft", size=2, index=0, min_size=1, workers_per_host=2)
    assert place(second).index == 1
    assert first.id != second.id
    assert gang_ids(second.id, second) == (first.id, second.id)


def test_without_min_workers_a_gang_is_whole_or_waits() -> None:
    (first, *_) = members('[[jobs]]\nname = "sft"\nmodel = "m"\nworkers = 3\nworkers_per_host = 1\n')
    assert (place(first).size, place(first).min_size, place(first).workers_per_host) == (3, 3, 1)


def test_one_worker_is_no_gang_and_keeps_its_id() -> None:
    (alone,) = members('[[jobs]]\nmodel = "m"\nworkers = 1\n')
    assert alone.gang is None
    assert alone.id == JobSpec(model="m").id
    assert b"gang" not in msgspec.json.encode(alone)


def test_workers_of_one_host_are_a_gang_of_one_member() -> None:
    (only,) = members('[[jobs]]\nname = "sft"\nmodel = "m"\nworkers = 4\n')
    assert (only.label, place(only).size, place(only).workers_per_host) == ("sft/0", 1, 4)
    assert members('[[jobs]]\nname = "sft"\nmodel = "m"\nworkers = 4\nworkers_per_host = 4\n') == [only]


def test_a_job_comes_after_all_members_of_a_gang() -> None:
    *gang, later = members(GANG + '[[jobs]]\nmodel = "n"\nafter = ["sft"]\n')
    assert set(later.after) == {spec.id for spec in gang}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GANG.replace('name = "sft"\n', ""), "jobs[0]: name is required for a job with several workers"),
        (GANG.replace("min_workers = 2", "min_workers = 3"), "jobs[0].min_workers: expected a multiple of workers_per"),
        (GANG.replace("min_workers = 2", "min_workers = 6"), "jobs[0].min_workers: expected a multiple of workers_per"),
        (GANG.replace("workers = 4", "workers = 0"), "jobs[0].workers: expected an integer >= 1, found 0"),
        (
            GANG.replace("workers_per_host = 2\n", ""),
            "jobs[0].min_workers: expected a multiple of workers_per_host = 4",
        ),
        (
            '[[jobs]]\nname = "sft"\nmodel = "m"\nworkers = 2000\n',
            "jobs[0].workers: 2000 on one host: set workers_per_host, to at most 1024",
        ),
        (GANG + 'kind = "server"\n', "jobs[0].workers: a server is no gang"),
        (GANG + '[[jobs]]\nname = "sft"\nmodel = "n"\n', 'jobs[1].name: "sft" is the name of jobs[0]'),
        (
            '[sweep]\nname = "s"\nmodel = "m"\nworkers = 2\ngrid = { a = [1] }\n',
            "sweep.workers: the jobs of a sweep or of a schedule are no gangs",
        ),
    ],
)
def test_a_mistake_in_a_gang_is_one_problem_at_its_place(text: str, message: str) -> None:
    with pytest.raises(StrataError) as refused:
        read(text)
    (only,) = refused.value.detail["problems"]
    assert only.partition(": ")[2].startswith(message)


def test_a_gang_needs_a_program_that_torchrun_can_start() -> None:
    with pytest.raises(StrataError, match="the workers run under torchrun"):
        parse_manifest(TRAINER.replace('["python", "run.py"]', '["./run.sh"]') + GANG, "m.toml").resolve()


def changed(change: Callable[[list[Any]], object]) -> JobManifest:
    """The manifest with a gang as the hub decodes it, after a client changed the value of its jobs."""
    value = msgspec.to_builtins(read(GANG + '[[jobs]]\nname = "other"\nmodel = "n"\n'))
    jobs = list(value["jobs"].values())
    change(jobs)
    found = [msgspec.convert(each, JobSpec) for each in jobs]
    return msgspec.structs.replace(msgspec.convert(value, JobManifest), jobs={spec.id: spec for spec in found})


def test_a_gang_is_valid_as_a_value() -> None:
    validate_manifest(changed(lambda jobs: None), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda jobs: jobs.pop(0), "its 2 members are not all there"),
        (lambda jobs: jobs.reverse(), "its 2 members are not all there"),
        (lambda jobs: [jobs[each]["gang"].update(size=1024) for each in (0, 1)], "its 1024 members are not all there"),
        (lambda jobs: jobs[1]["gang"].update(min_size=2), "sft/1 is not equal to sft/0"),
        (lambda jobs: jobs[1].update(priority=9), "sft/1 is not equal to sft/0"),
        (lambda jobs: [jobs[each]["gang"].update(min_size=3) for each in (0, 1)], "min_workers is more than workers"),
        (lambda jobs: [jobs[each]["gang"].update(run=3) for each in (0, 1)], "min_workers is more than workers"),
        (lambda jobs: jobs[2].update(name="sft"), "it is the name of another job"),
        (lambda jobs: [jobs[each].update(kind="server") for each in (0, 1)], "a server is no gang"),
    ],
)
def test_a_gang_that_no_client_may_send_is_refused(change: Callable[[list[Any]], object], message: str) -> None:
    assert any(message in problem for problem in problems(changed(change)))


def existing(*specs: JobSpec, status: JobStatus = JobStatus.COMPLETED) -> dict[str, ExistingJob]:
    return {spec.id: ExistingJob(spec=spec, status=status, trainer="old") for spec in specs}


def planned(manifest: JobManifest, jobs: dict[str, ExistingJob], **options: bool) -> Any:
    return plan(manifest, jobs, trainers={}, hosts={}, options=ApplyOptions(**options))


def test_a_gang_of_another_size_is_another_job_and_supersedes_all_members() -> None:
    there = existing(*members())
    wanted = read(GANG.replace("workers = 4", "workers = 2"))
    made = planned(wanted, there)
    assert set(made.new) == set(wanted.jobs)
    assert set(made.superseded) == set(there)


def test_the_least_size_of_a_gang_changes_without_making_it_another() -> None:
    made = planned(read(GANG.replace("min_workers = 2", "min_workers = 4")), existing(*members()))
    assert [change.kinds for change in made.changed] == [("limits",), ("limits",)]


def test_a_completed_gang_is_retrained_as_a_whole_and_in_a_new_run() -> None:
    again = planned(read(GANG), existing(*members()), retrain=True)
    assert [place(spec).run for spec in again.requeued.values()] == [1, 1]
    first, second = members()
    half = existing(first) | existing(second, status=JobStatus.FAILED)
    assert planned(read(GANG), half, retrain=True).requeued == {}


def test_a_gang_in_a_later_run_is_unchanged_for_its_manifest() -> None:
    later = [msgspec.structs.replace(spec, gang=msgspec.structs.replace(place(spec), run=3)) for spec in members()]
    there = {spec.id: ExistingJob(spec=spec, status=JobStatus.COMPLETED) for spec in later}
    made = plan(read(GANG), there, trainers={}, hosts={})
    assert (set(made.unchanged), made.changed) == (set(there), ())


def requeued(*statuses: JobStatus) -> list[tuple[str, int]]:
    specs = members()
    states = {spec.id: (status, spec) for spec, status in zip(specs, statuses, strict=True)}
    return [(spec.label, place(spec).run) for spec in requeued_members(specs[0].id, states).values()]


def test_members_that_have_ended_run_again_and_a_completed_gang_begins_anew() -> None:
    done, failed, running = JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.RUNNING
    assert requeued(done, done) == [("sft/0", 1), ("sft/1", 1)]
    assert requeued(done, failed) == [("sft/0", 0), ("sft/1", 0)]
    assert requeued(running, failed) == [("sft/1", 0)]
    assert requeued(running, running) == [("sft/0", 0)]


def test_members_of_one_run_share_a_name_at_the_coordinator_and_runs_do_not() -> None:
    first, second = members()
    later = msgspec.structs.replace(first, gang=msgspec.structs.replace(place(first), run=1))
    renamed = msgspec.structs.replace(first, name="x/0", gang=msgspec.structs.replace(place(first), name="x"))
    assert coordinator_job(first) == coordinator_job(second) == coordinator_job(renamed)
    assert coordinator_job(later) == f"{coordinator_job(first)}-2"
