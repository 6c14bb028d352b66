"""Who may change whose jobs and projects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import HostSpec, JobSpec
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.ownership import Submitter, check_owners, check_project, check_submission
from strata.fleet.core.plan import ExistingJob, plan

OWNERS = st.sampled_from(["anna", "bert", "operator", "key:1", ""])
SUBMITTERS = st.builds(Submitter, owner=st.sampled_from(["anna", "bert"]), operator=st.booleans())


def forbidden(check: Callable[..., None], *arguments: Any) -> bool:
    codes = []
    try:
        check(*arguments)
    except StrataError as error:
        codes.append(error.code)
    assert codes in ([], [Code.FORBIDDEN])
    return bool(codes)


@given(SUBMITTERS, st.lists(OWNERS, max_size=4))
def test_a_submitter_changes_her_own_jobs_and_an_operator_all(submitter: Submitter, owners: list[str]) -> None:
    others = any(owner != submitter.owner for owner in owners)
    assert forbidden(check_owners, submitter, [("job", owner) for owner in owners]) == (
        others and not submitter.operator
    )


@given(SUBMITTERS, OWNERS, st.sampled_from(["default", "p"]))
def test_a_project_is_its_owners_and_the_default_one_is_for_single_jobs(
    submitter: Submitter, owner: str, project: str
) -> None:
    own = submitter.operator or owner in ("", submitter.owner)
    assert forbidden(check_project, submitter, "p", owner) == (not own)
    assert forbidden(check_project, submitter, "default", "") == (not submitter.operator)
    assert forbidden(check_submission, submitter, project, owner) == (project == "p" and not own)


def manifest(*specs: JobSpec, **fields: object) -> JobManifest:
    jobs = {spec.id: spec for spec in specs}
    return JobManifest(source="m.toml", project="p", jobs=jobs, trainers={}, **{"hosts": {}, **fields})  # type: ignore[arg-type]


@given(SUBMITTERS, OWNERS)
def test_a_plan_holds_no_job_of_another_owner(submitter: Submitter, owner: str) -> None:
    spec = JobSpec(model="m", project="p")
    there = {spec.id: ExistingJob(spec=spec, status=JobStatus.PENDING, owner=owner)}

    def planned() -> None:
        plan(manifest(spec), there, trainers={}, hosts={}, submitter=submitter)

    assert forbidden(planned) == (not submitter.may_change(owner))


def test_policies_of_hosts_are_for_operators() -> None:
    wanted = manifest(hosts={"desk": HostSpec(name="desk")})
    with pytest.raises(StrataError, match="only an operator"):
        plan(wanted, {}, trainers={}, hosts={}, submitter=Submitter(owner="anna"))
    assert plan(wanted, {}, trainers={}, hosts={}).hosts


def test_a_job_that_left_the_manifest_is_superseded_by_a_new_one_of_its_name() -> None:
    old, kept, other = (JobSpec(model="m", project="p", seed=seed) for seed in range(3))
    away = JobSpec(model="away", project="p")
    there = {each.id: ExistingJob(spec=each, status=JobStatus.FAILED) for each in (old, kept, away)}
    assert plan(manifest(kept, other), there, trainers={}, hosts={}).superseded == (old.id,)
    assert plan(manifest(kept), there, trainers={}, hosts={}).superseded == ()
