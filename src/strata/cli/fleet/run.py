"""`strata run`: options of one command as a job (needs, environment, start, timeout), and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.completion import complete_hosts, complete_jobs
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import error_line, find_job, format_bytes, format_count, hub_client, hub_option, short_id
from strata.cli.options import read_duration, read_pair
from strata.cli.output import print_error, printable, write

if TYPE_CHECKING:
    from strata.fleet.core.jobspec import EnvironmentSpec
    from strata.fleet.core.schedule import StartTime

_ENDS = {"completed": ExitCode.OK, "failed": ExitCode.FAILED, "cancelled": ExitCode.CANCELLED}


def _read_start(text: str) -> StartTime:
    """Reads a time, of this machine's time zone unless it has an offset, or a delay such as `+2h`."""
    import datetime
    from contextlib import suppress

    from strata.base.errors import StrataError
    from strata.fleet.core.schedule import parse_start

    start: str | datetime.datetime = text
    with suppress(ValueError):
        start = datetime.datetime.fromisoformat(text).astimezone()
    try:
        return parse_start(start)
    except StrataError as error:
        raise click.BadParameter(error.message) from None


_COUNT: Final = click.IntRange(min=0)
_AMOUNT: Final = click.FloatRange(min=0)
_NEEDS: Final = (
    *("min_cores", "min_gpus", "gpu_share", "require_cuda", "min_vram_gib", "min_ram_gib"),
    *("allowed_hosts", "pool", "require_labels"),
)
"""Options that are what the job needs of a host. Each is called as its field."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--name", metavar="NAME", help="Name of the job (default: the name of the folder).")
@click.option("--seed", type=_COUNT, help="Seed of the job (default 0); another seed is another job.")
@click.option(
    "--environment",
    metavar="FILE",
    help="Install the packages of FILE: uv.lock, pyproject.toml or requirements. 'auto' (default) takes the one in the"
    " folder, 'none' uses the host's Python.",
)
@click.option("--image", metavar="IMAGE", help="Run in this OCI image, on a host with podman or apptainer.")
@click.option("--python", metavar="VERSION", help="Python of the environment, such as 3.12.")
@click.option("--env", type=read_pair, multiple=True, metavar="NAME=VALUE", help="Set a variable; repeatable.")
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME", help="Pass the secret NAME of 'strata secrets'; repeatable."
)
@click.option("--data", multiple=True, metavar="NAME", help="Give the job the data NAME of 'strata data'; repeatable.")
@click.option("--project", metavar="NAME", help="Project of the job (default: default).")
@click.option("--cores", "min_cores", type=_COUNT, metavar="N", help="Require and take N cores.")
@click.option("--gpus", "min_gpus", type=_COUNT, metavar="N", help="Require a host with N GPUs.")
@click.option(
    "--share",
    "gpu_share",
    type=click.FloatRange(min=0, max=1),
    metavar="SHARE",
    help="Take this share of each GPU, such as 0.5, and leave the rest to others.",
)
@click.option("--cuda", "require_cuda", is_flag=True, help="Require a host with CUDA.")
@click.option("--vram", "min_vram_gib", type=_AMOUNT, metavar="GIB", help="Require a GPU with this much memory.")
@click.option("--ram", "min_ram_gib", type=_AMOUNT, metavar="GIB", help="Require a host with this much memory.")
@click.option(
    "--host",
    "allowed_hosts",
    multiple=True,
    metavar="HOST",
    shell_complete=complete_hosts,
    help="Run only on HOST; repeatable.",
)
@click.option("--pool", metavar="POOL", help="Run on the hosts of POOL (default: on those in no pool).")
@click.option(
    "--label",
    "require_labels",
    type=read_pair,
    multiple=True,
    metavar="NAME=VALUE",
    help="Require a host with this label; '*' is any value; repeatable.",
)
@click.option(
    "--after",
    multiple=True,
    metavar="JOB",
    shell_complete=complete_jobs,
    help="Start when JOB is completed; repeatable.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0, max=999),
    metavar="N",
    help="Run COMMAND again after an error of its own, up to N times (default: 0, with --detach 2).",
)
@click.option(
    "--timeout", "timeout_s", type=read_duration, metavar="TIME", help="End an attempt after TIME: 90s, 30m, 2h."
)
@click.option("--priority", type=int, help="Jobs with a higher priority run first (default 0).")
@click.option(
    "--at",
    "start",
    type=_read_start,
    metavar="TIME|+DELAY",
    help="Start no earlier than TIME (2026-11-17T03:00) or after a delay (+2h).",
)
@click.option("-d", "--detach", is_flag=True, help="Print the id of the job and exit; do not follow its log.")
@hub_option
def run(
    *,
    command: tuple[str, ...],
    after: tuple[str, ...],
    retries: int | None,
    detach: bool,
    context: str | None,
    **given: Any,
) -> None:
    """Run COMMAND in a copy of the current folder on a host of the fleet.

    The folder is uploaded as by 'strata apply'. The host installs the packages that the folder lists in uv.lock,
    requirements.txt or pyproject.toml. The same command in the same folder is the same job, which runs once: to run it
    again, use 'strata requeue' or another --seed. Without --cores, --ram, --gpus, --vram and --share it takes a whole
    host, or one slot of a host that is divided into slots; with one of them it takes that much, and other jobs run
    beside it. An error of COMMAND ends the job, unless you --retries or --detach. Exit status: 0 completed, 100 failed,
    103 cancelled. Ctrl-C (130) leaves the job running; 'strata cancel' ends it.
    """
    from strata.cli.fleet.data import print_data
    from strata.fleet.core.lease import MAX_ATTEMPTS
    from strata.fleet.core.requirement import Needs
    from strata.fleet.core.schedule import format_moment
    from strata.sdk.bundle import make_bundle
    from strata.sdk.submit import RunOptions, choose_environment, run_request, send_job

    given = {name: dict(value) if name in ("env", "require_labels") else value for name, value in given.items()}
    # What is not given is the default of the field.
    given = {name: value for name, value in given.items() if value is not None}
    needs = Needs(**{name: given.pop(name) for name in _NEEDS if name in given})
    # A person who looks on sees the error at once, and runs it again when it is mended.
    given["retries"] = retries if retries is not None else (MAX_ATTEMPTS - 1) * detach
    bundle = make_bundle(Path.cwd())
    environment_of = choose_environment(Path.cwd(), RunOptions(needs=needs, **given))
    with hub_client(context, timeout_s=120.0) as client:
        options = RunOptions(needs=needs, after=[find_job(client, text).job.id for text in after], **given)
        request = run_request(client, command, Path.cwd(), bundle, options, print_data)
        label = request.spec.name
        submitted = send_job(client, bundle, request)
        job = submitted.job
        sent = f"{format_count(bundle.files, 'file')}, {format_bytes(len(bundle.content))}"
        if submitted.new:
            print_error(f"strata: {label} is job {short_id(job.id)} ({sent} sent{_environment_note(environment_of)})")
            if job.not_before_s:
                print_error(f"strata: it starts at {format_moment(job.not_before_s)} at the earliest")
        else:
            print_error(
                f"strata: this is job {short_id(job.id)}, which is {job.status}", hint="strata requeue, or --seed N"
            )
        if detach:
            write(job.id)
            return
        from strata.cli.fleet.logs import LogFollower
        from strata.cli.fleet.wait import print_not_cancelled

        try:
            LogFollower(client, job.id, job.attempt).run(follow=True)
        except KeyboardInterrupt:
            print_not_cancelled(label, short_id(job.id))
            raise
        reply = find_job(client, job.id)
    ended = reply.job
    if ended.status != "completed":
        error = error_line(reply.attempts[-1].error) if reply.attempts and ended.status == "failed" else ""
        reason = f"{ended.reason}: {error}" if error else ended.reason
        print_error(f"strata: {label} is {ended.status}: {printable(reason)}", hint=f"strata show {short_id(ended.id)}")
    click.get_current_context().exit(_ENDS.get(ended.status, ExitCode.UNFINISHED))


def _environment_note(environment: EnvironmentSpec | None) -> str:
    if environment is None:
        return ""
    return f"; in image {environment.image}" if environment.image else f"; packages from {environment.file}"
