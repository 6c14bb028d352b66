"""`strata cancel`, `requeue`, `archive`, `exec`, `drain`, `pause`, `resume`, `revoke`: options, and what
each prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.completion import complete_hosts, complete_jobs
from strata.cli.fleet.client import all_hosts, find_job, host_path, hub_client, hub_option, print_rows, short_id
from strata.cli.fleet.hosts import host_row
from strata.cli.fleet.jobs import job_row
from strata.cli.output import Format, output_option, print_error, printable
from strata.cli.rows import Column

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.wire.hosts import Host
    from strata.fleet.wire.jobs import CancelRequest, Job

_CHANGED: Final = (Column("id"), Column("job", cut=40), Column("status"))
_HOST: Final = (Column("host"), Column("state"), Column("reason"))
_WAIT_S: Final = 20.0
_SHOWN: Final = 3
"""Jobs of a host that drains, by name."""


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_jobs)
@click.option("--reason", default="", metavar="TEXT", help="Reason to record with the job.")
@hub_option
@output_option
def cancel(jobs: tuple[str, ...], reason: str, context: str | None, output: Format) -> None:
    """Cancel each JOB. Of a gang all members are. A host that runs one stops it after its next heartbeat."""
    _each_job(jobs, "cancel", context, output, reason=reason)


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_jobs)
@hub_option
@output_option
def requeue(jobs: tuple[str, ...], context: str | None, output: Format) -> None:
    """Run each ended JOB again, or let excluded hosts try a pending one.

    Of a gang all members that have ended run again: from its last checkpoint, or from the beginning if it was
    completed.
    """
    _each_job(jobs, "requeue", context, output)


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_jobs)
@hub_option
@output_option
def archive(jobs: tuple[str, ...], context: str | None, output: Format) -> None:
    """Hide each ended JOB from lists and counts.

    'strata list --all' shows it, and 'strata requeue' brings it back.
    """
    _each_job(jobs, "archive", context, output)


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("job", shell_complete=complete_jobs)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=60.0,
    metavar="SECONDS",
    help="Stop COMMAND after SECONDS (default 60).",
)
@hub_option
@click.pass_context
def exec_command(
    ctx: click.Context, /, *, job: str, command: tuple[str, ...], timeout_s: float, context: str | None
) -> None:
    """Run COMMAND inside a running JOB. It has the sandbox, user and variables of JOB, but no secrets.

    Prints what COMMAND writes to its output and its errors, and ends with its exit status. COMMAND starts with the next
    heartbeat of the host, within 10 seconds, and gets no input. It ends with the job. Ctrl-C ends it.
    """
    with hub_client(context) as client:
        from strata.fleet.wire.execs import ExecReply, ExecRequest

        target = find_job(client, job, newest=False).job
        body = ExecRequest(command=command, timeout_s=timeout_s)
        path = f"/v1/job/{target.id}/exec"
        # Not repeated: a command must not run twice.
        path += f"/{client.call_once('POST', path, ExecReply, body=body).id}"
        try:
            status = _follow_exec(client, path)
        except (KeyboardInterrupt, click.exceptions.Exit):
            # Nobody reads on.
            client.call("POST", f"{path}/cancel", type(None))
            raise
    ctx.exit(status)


def _follow_exec(client: HubClient, path: str) -> int:
    """Print the output of a command until it has ended; its exit status."""
    import time

    from strata.cli.fleet.logs import LogPrinter
    from strata.fleet.wire.execs import ExecQuery

    out, offset, away = LogPrinter(), 0, False
    while True:
        try:
            query = ExecQuery(offset=offset, wait_s=_WAIT_S)
            reply = client.fetch(path, query=query, timeout_s=_WAIT_S + 15.0)
        except StrataError as error:
            if error.code is not Code.UNAVAILABLE:
                raise
            if not away:
                print_error(f"strata: {error.message}; trying again")
            away = True
            time.sleep(1.0)
            continue
        away = False
        out.write(reply.content)
        offset += len(reply.content)
        if reply.headers.get("x-strata-ended") == "true":
            out.close()
            if "x-strata-status" in reply.headers:
                return int(reply.headers["x-strata-status"])
            raise StrataError(Code.PRECONDITION, f"the command did not end: {reply.headers['x-strata-reason']}")


def _each_job(
    jobs: tuple[str, ...], verb: str, context: str | None, output: Format, *, reason: str | None = None
) -> None:
    with hub_client(context) as client:
        from strata.fleet.core.jobspec import gang_ids
        from strata.fleet.wire.jobs import CancelRequest, JobReply

        names = {each.id: each.name for each in all_hosts(client)}
        # All names are resolved before anything changes: a misspelt one changes nothing.
        targets = [find_job(client, text, newest=False).job for text in jobs]
        body = None if reason is None else CancelRequest(reason=reason)
        changed: dict[str, Job] = {}
        for job in targets:
            # A gang changes as a whole: another of its members may have been named before.
            if job.id not in changed:
                changed[job.id] = _change_job(client, job, verb, body)
                for member in gang_ids(job.id, job.spec):
                    if member not in changed:
                        changed[member] = client.call("GET", f"/v1/job/{member}", JobReply).job
    print_rows(output, _CHANGED, ((job_row(job, names), {"id": short_id(job.id)}) for job in changed.values()))


def _change_job(client: HubClient, job: Job, verb: str, body: CancelRequest | None) -> Job:
    from strata.fleet.core.job import TERMINAL
    from strata.fleet.wire.jobs import Job, JobReply

    try:
        return client.call("POST", f"/v1/job/{job.id}/{verb}", Job, body=body)
    except StrataError as error:
        if verb != "requeue" or error.code is not Code.PRECONDITION or job.status not in TERMINAL:
            raise
        # The request was repeated after a broken connection, and the one before it has queued the job.
        now = client.call("GET", f"/v1/job/{job.id}", JobReply).job
        if now.status in TERMINAL:
            raise
        return now


@click.command()
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_hosts)
@click.option("--reason", default="", metavar="TEXT", help="Reason to record with the host.")
@hub_option
@output_option
def drain(hosts: tuple[str, ...], reason: str, context: str | None, output: Format) -> None:
    """Let each HOST finish its jobs, and assign it no new ones."""
    changed = _each_host(hosts, "drain", reason, context, output)
    with hub_client(context) as client:
        from strata.fleet.wire.hosts import HostRoom

        for host in changed:
            left = client.call("GET", f"{host_path(host.id)}/room", HostRoom).jobs
            names = ", ".join(printable(job.label) for job in left[:_SHOWN])
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            said = f"ends with {names}{more}; follow it with 'strata wait' or 'strata workers --watch'"
            print_error(f"strata: {host.name} {said if left else 'is empty'}")


@click.command()
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_hosts)
@click.option("--reason", default="", metavar="TEXT", help="Reason to record with the host.")
@hub_option
@output_option
def pause(hosts: tuple[str, ...], reason: str, context: str | None, output: Format) -> None:
    """Assign no new jobs to each HOST until it is resumed."""
    _each_host(hosts, "pause", reason, context, output)


@click.command()
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_hosts)
@hub_option
@output_option
def resume(hosts: tuple[str, ...], context: str | None, output: Format) -> None:
    """Assign jobs to each HOST again, also after a quarantine."""
    _each_host(hosts, "resume", "", context, output)


@click.command()
@click.argument("host", shell_complete=complete_hosts)
@click.option("--reason", default="", metavar="TEXT", help="Reason to record and to report to the host.")
@hub_option
def revoke(host: str, reason: str, context: str | None) -> None:
    """Revoke the credentials of HOST, for example because it is lost.

    The hub rejects the host from now on, and its jobs move to other hosts when their leases expire. The host can come
    back with a new invite.
    """
    with hub_client(context) as client:
        from strata.fleet.wire.hosts import HostStateRequest

        client.call("POST", f"{host_path(host)}/revoke", type(None), body=HostStateRequest(reason=reason))
    print_error(f"strata: {host} is revoked")


def _each_host(hosts: tuple[str, ...], verb: str, reason: str, context: str | None, output: Format) -> list[Host]:
    with hub_client(context) as client:
        from strata.fleet.wire.hosts import Host, HostStateRequest

        targets = [client.call("GET", host_path(text), Host) for text in hosts]
        body = HostStateRequest(reason=reason)
        changed = [client.call("POST", f"{host_path(host.id)}/{verb}", Host, body=body) for host in targets]
    rows = ({name: value for name, value in host_row(host, 0).items() if name != "jobs"} for host in changed)
    print_rows(output, _HOST, ((row, {}) for row in rows))
    return changed
