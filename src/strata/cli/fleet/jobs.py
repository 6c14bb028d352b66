"""`strata status`, `list`, `show`: columns, filters, counts, the 10 last failures, attempts of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.completion import complete_hosts, complete_jobs
from strata.cli.fleet.client import (
    all_hosts,
    all_jobs,
    error_line,
    find_members,
    format_count,
    format_duration,
    hub_client,
    hub_view_options,
    is_hidden,
    names_gang,
    print_rows,
    short_id,
)
from strata.cli.output import Format, print_data, print_error, printable, write
from strata.cli.rows import Column

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.core.jobspec import JobSpec
    from strata.fleet.records import JobAttempt
    from strata.fleet.wire.hosts import Host
    from strata.fleet.wire.jobs import Job

STATUSES: Final = ("pending", "claimed", "running", "completed", "failed", "cancelled")
FAILURES: Final = 10
"""How many failed jobs `status` shows, the latest first."""
_LIST: Final = (
    Column("id"),
    Column("job", cut=28),
    Column("project", cut=16),
    Column("owner", cut=16),
    Column("status"),
    Column("attempt", number=True),
    Column("host", cut=16),
    Column("age", number=True),
    Column("priority", wide=True, number=True),
    Column("model", wide=True),
    Column("mode", wide=True),
    Column("sweep", wide=True),
    Column("reason", wide=True),
)
_FAILED: Final = (Column("id"), Column("failed", cut=18), Column("attempt", number=True), Column("error", cut=38))
_RETRIED: Final = (Column("id"), Column("waits", cut=18), Column("attempt", number=True), Column("error", cut=38))


@click.command()
@hub_view_options
def status(context: str | None, output: Format) -> None:
    """Show how many jobs and hosts there are, and the latest failures."""
    with hub_client(context) as client:
        from strata.fleet.wire.overview import StatusReply

        counts = client.call("GET", "/v1/status", StatusReply)
        hosts = all_hosts(client)
        by_status = {name: counts.by_status.get(name, 0) for name in STATUSES}
        failed = _failures(client, "failed", by_status)
        retried = _failures(client, "pending", by_status)
    if output.for_programs:
        shown = [{"id": host.id, "name": host.name, "state": host.state, "presence": host.presence} for host in hosts]
        value = {"jobs": by_status, "ready": counts.ready, "hosts": shown, "failed": failed, "retried": retried}
        value["version"] = counts.version
        print_data(value, output)
        return
    write(_count_jobs(by_status))
    write(_count_hosts(hosts))
    if failed:
        _print_failures(output, _FAILED, failed)
        if by_status["failed"] > len(failed):
            write(f"and {by_status['failed'] - len(failed)} more: strata list --status failed")
    if retried:
        _print_failures(output, _RETRIED, retried)
    if by_status["pending"] and not by_status["running"] + by_status["claimed"]:
        print_error("strata: no job is running; 'strata why JOB' explains what a pending job waits for")


def _count_jobs(by_status: Mapping[str, int]) -> str:
    parts = [f"{number} {name}" for name, number in by_status.items() if number]
    if not parts:
        return "no jobs yet: strata apply MANIFEST"
    return f"{format_count(sum(by_status.values()), 'job')}: {', '.join(parts)}"


def _count_hosts(hosts: Iterable[Host]) -> str:
    here = [_describe_host(host) for host in hosts if host.state != "left"]
    return f"{format_count(len(here), 'host')}: {', '.join(here)}" if here else "no hosts yet: strata invite"


def _print_failures(output: Format, columns: tuple[Column, ...], failures: Iterable[dict[str, Any]]) -> None:
    """Print failures after an empty line. The second column is the job."""
    write("")
    job = columns[1].key
    print_rows(output, columns, [(row, {"id": short_id(row["id"]), job: _qualified(row)}) for row in failures])


def _describe_host(host: Host) -> str:
    state = host.presence if host.state == "active" else f"{host.presence}, {host.state}"
    return f"{printable(host.name)} ({state})"


def _qualified(row: Mapping[str, Any]) -> str:
    from strata.fleet.core.jobspec import DEFAULT_PROJECT

    return row["job"] if row["project"] == DEFAULT_PROJECT else f"{row['project']}/{row['job']}"


def _failures(client: HubClient, status: str, by_status: Mapping[str, int]) -> list[dict[str, Any]]:
    """The last errors of jobs that failed, or that wait for another attempt."""
    if not by_status[status]:
        return []
    from strata.fleet.core.job import JobStatus
    from strata.fleet.wire.jobs import JobReply, JobsQuery

    tried = [
        job for job in all_jobs(client, JobsQuery(status=(JobStatus(status),), hidden=False), pages=1) if job.attempt
    ]
    jobs = sorted(tried, key=lambda job: -job.changed_at_s)
    failures = []
    for job in jobs[:FAILURES]:
        attempts = client.call("GET", f"/v1/job/{job.id}", JobReply).attempts
        error = error_line(attempts[-1].error) if attempts else ""
        cause = attempts[-1].cause if attempts else None
        failures.append(
            {
                "id": job.id,
                "job": job.spec.label,
                "project": job.spec.project,
                "attempt": job.attempt,
                "cause": cause,
                "error": error or job.reason,
                "reason": job.reason,
            }
        )
    return failures


@click.command("list")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(STATUSES),
    help="Show only jobs with this status; repeatable.",
)
@click.option("--model", default="", metavar="NAME", help="Show only jobs of this model.")
@click.option("--sweep", default="", metavar="NAME", help="Show only jobs of this sweep.")
@click.option("--host", default="", metavar="HOST", shell_complete=complete_hosts, help="Show only jobs on this host.")
@click.option("--project", default="", metavar="NAME", help="Show only jobs of this project.")
@click.option("--owner", default="", metavar="NAME", help="Show only jobs of this owner.")
@click.option("--mine", is_flag=True, help="Show only your own jobs.")
@click.option("-a", "--all", "hidden", is_flag=True, help="Show archived and superseded jobs as well.")
@hub_view_options
def list_jobs(  # noqa: PLR0913 (the options of the command)
    *,
    statuses: tuple[str, ...],
    model: str,
    sweep: str,
    host: str,
    project: str,
    owner: str,
    mine: bool,
    hidden: bool,
    context: str | None,
    output: Format,
) -> None:
    """List jobs with their status and host. Of several jobs with one name, NAME@2 is the newest but one.

    Jobs that were archived are left out, and so are ended jobs whose name a later job has.
    """
    with hub_client(context) as client:
        from strata.fleet.core.job import JobStatus
        from strata.fleet.wire.identities import CallerReply
        from strata.fleet.wire.jobs import JobsQuery
        from strata.fleet.wire.overview import StatusReply

        names = {each.id: each.name for each in all_hosts(client)}
        ids = {name: host_id for host_id, name in names.items()}
        now_s = client.call("GET", "/v1/status", StatusReply).now_s
        if mine:
            owner = client.call("GET", "/v1/caller", CallerReply).owner
        query = JobsQuery(
            status=tuple(map(JobStatus, statuses)),
            model=model,
            sweep=sweep,
            host=ids.get(host, host),
            project=project,
            owner=owner,
            hidden=hidden,
        )
        jobs: Iterable[Job] = all_jobs(client, query)
        left_out: set[str] = set()
        if output is not Format.JSONL:
            jobs = _in_order(jobs)
            # A column is useless when all jobs belong to the default project, or to one owner.
            left_out |= set() if any(map(_project, jobs)) else {"project"}
            left_out |= set() if len({job.owner for job in jobs}) > 1 else {"owner"}
        columns = [column for column in _LIST if column.key not in left_out]
        print_rows(output, columns, ((job_row(job, names), _job_shown(job, now_s)) for job in jobs))


def _in_order(jobs: Iterable[Job]) -> list[Job]:
    """Sorts jobs by status, priority and name; the members of a gang stay together, by index, where its first one
    is."""
    order = {name: number for number, name in enumerate(STATUSES)}
    jobs = sorted(jobs, key=lambda job: (order[job.status], -job.spec.priority, job.spec.declared_name))
    places: dict[str, int] = {}
    for number, job in enumerate(jobs):
        places.setdefault(_gang(job) or job.id, number)
    return sorted(jobs, key=lambda job: (places[_gang(job) or job.id], job.spec.gang.index if job.spec.gang else 0))


def _gang(job: Job) -> str:
    """Returns what the members of one gang, and of one run of it, have in common; empty for a job that trains alone."""
    from strata.fleet.core.jobspec import coordinator_job

    return "" if job.spec.gang is None else coordinator_job(job.spec)


def _project(job: Job) -> str:
    """Empty for the default project, which is not shown."""
    from strata.fleet.core.jobspec import DEFAULT_PROJECT

    return "" if job.spec.project == DEFAULT_PROJECT else job.spec.project


def job_row(job: Job, hosts: Mapping[str, str]) -> dict[str, Any]:
    """A job as a JSON row."""
    return {
        "id": job.id,
        "job": job.spec.label,
        "status": job.status,
        "serving": job.serving or None,
        "attempt": job.attempt,
        "host": hosts.get(job.host_id, job.host_id) or None,
        "host_id": job.host_id or None,
        "model": job.spec.model,
        "mode": job.spec.mode,
        "hyper": job.spec.hyper,
        "seed": job.spec.seed,
        "priority": job.spec.priority,
        "not_before_s": (job.not_before_s or None) if job.status == "pending" else None,
        "sweep": job.spec.sweep or None,
        "gang": None if job.spec.gang is None else job.spec.gang.name,
        "project": job.spec.project,
        "trainer": job.spec.trainer,
        "trainer_digest": job.trainer_digest or None,
        "submitted_by": job.submitted_by or None,
        "owner": job.owner or None,
        "archived": job.archived,
        "superseded": job.superseded,
        "reason": job.reason or None,
        "artifact": job.artifact or None,
        "orphaned": job.orphaned,
        "created_at_s": job.created_at_s,
        "changed_at_s": job.changed_at_s,
    }


def _job_shown(job: Job, now_s: float) -> dict[str, Any]:
    label = f"{job.spec.label}@{job.newer + 1}" if job.newer else job.spec.label
    return {
        "id": short_id(job.id),
        "job": label,
        "status": job.serving or _status(job, now_s),
        "age": format_duration(now_s - job.changed_at_s),
        "attempt": job.attempt or None,
    }


def _status(job: Job, now_s: float) -> str:
    wait_s = _start_wait_s(job, now_s)
    return f"{job.status}, in {format_duration(wait_s)}" if wait_s > 0 else job.status


def _start_wait_s(job: Job, now_s: float) -> float:
    """Returns how long a job waits for the start time that its owner chose; nothing if it waits for something else."""
    starts_at_s = job.spec.starts_at_s(job.created_at_s)
    return starts_at_s - now_s if job.status == "pending" and job.not_before_s <= starts_at_s else 0.0


@click.command()
@click.argument("job", shell_complete=complete_jobs)
@hub_view_options
def show(job: str, context: str | None, output: Format) -> None:
    """Show JOB and its attempts. JOB is an id, a prefix of an id, or a name: of several jobs the newest.

    Of a gang all members are shown; as JSON, in `members`.
    """
    with hub_client(context) as client:
        from strata.fleet.wire.overview import StatusReply

        members = find_members(client, job)
        names = {each.id: each.name for each in all_hosts(client)}
        now_s = client.call("GET", "/v1/status", StatusReply).now_s
    if output.for_programs:
        rows = [
            job_row(reply.job, names) | {"attempts": [_attempt_row(each, names) for each in reply.attempts]}
            for reply in members
        ]
        print_data({"gang": rows[0]["gang"], "members": rows} if names_gang(members[0].job, job) else rows[0], output)
        return
    for number, reply in enumerate(members):
        if number:
            write("")
        _show_job(reply.job, now_s)
        for attempt in reply.attempts:
            _show_attempt(attempt, names, now_s)


def _show_job(job: Job, now_s: float) -> None:
    import json

    from strata.fleet.core.schedule import format_moment

    spec = job.spec
    lines = [
        ("job", spec.label),
        ("id", job.id),
        ("status", _since(job, now_s)),
        ("serving", "at the hub's URL, under /api/v1" if job.serving == "serving" else ""),
        ("why", job.reason),
        ("model", f"{spec.model}, mode {spec.mode}, seed {spec.seed}"),
        ("hyper", json.dumps(spec.hyper) if spec.hyper else ""),
        ("project", _project(job)),
        ("trainer", f"{spec.trainer} ({short_id(job.trainer_digest)})" if job.trainer_digest else spec.trainer),
        ("sweep", spec.sweep),
        ("gang", _describe_gang(spec)),
        ("priority", str(spec.priority) if spec.priority else ""),
        ("start", format_moment(job.not_before_s) if _start_wait_s(job, now_s) > 0 else ""),
        ("after", ", ".join(map(short_id, spec.after))),
        ("artifact", job.artifact),
        ("owner", job.owner),
        ("by", job.submitted_by),
        ("kept", "it is in no manifest any more" if job.orphaned else ""),
        ("hidden", "archived" if job.archived else "a later job has its name" if is_hidden(job) else ""),
    ]
    for name, value in lines:
        if value:
            write(f"{name:10}{printable(value)}")


def _describe_gang(spec: JobSpec) -> str:
    from strata.fleet.core.jobspec import coordinator_job

    gang = spec.gang
    if gang is None:
        return ""
    workers = format_count(gang.workers_per_host, "worker")
    return f"member {gang.index + 1} of {gang.size}, with {workers}; {coordinator_job(spec)} at the coordinator"


def _since(job: Job, now_s: float) -> str:
    from strata.fleet.core.job import TERMINAL

    passed = format_duration(now_s - job.changed_at_s)
    return f"{job.status} {passed} ago" if job.status in TERMINAL else f"{job.status} for {passed}"


def _attempt_row(attempt: JobAttempt, hosts: Mapping[str, str]) -> dict[str, Any]:
    from msgspec.structs import asdict

    row = {name: None if value == "" else value for name, value in asdict(attempt).items()}
    return row | {"host": hosts.get(attempt.host_id, attempt.host_id)}


def _show_attempt(attempt: JobAttempt, hosts: Mapping[str, str], now_s: float) -> None:
    begun_s = attempt.started_at_s or attempt.claimed_at_s
    outcome = attempt.outcome or "running"
    cause = f" ({attempt.cause})" if attempt.cause else ""
    took = format_duration((attempt.ended_at_s or now_s) - begun_s)
    write("")
    host = printable(hosts.get(attempt.host_id, attempt.host_id))
    write(f"attempt {attempt.attempt} on {host}: {outcome}{cause} after {took}")
    for line in attempt.error.rstrip().splitlines():
        write(f"  {printable(line)}")
