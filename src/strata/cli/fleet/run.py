"""`strata run`: run one command in a copy of the current folder on a host of the fleet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata.cli.completion import complete_hosts, complete_jobs
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import error_line, find_job, format_bytes, format_count, hub_client, hub_option, short_id
from strata.cli.output import print_error, printable, write

if TYPE_CHECKING:
    from strata.fleet.core.jobspec import EnvironmentSpec
    from strata.fleet.core.schedule import StartTime

_ENDS = {"completed": ExitCode.OK, "failed": ExitCode.FAILED, "cancelled": ExitCode.CANCELLED}


class DurationOption(click.ParamType[float]):
    """`90s`, `30m`, `2h`, `7d`, as seconds."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from strata.fleet.core.schedule import parse_duration

        duration = parse_duration(str(value))
        if duration is None:
            self.fail(f"{value!r} is not a time: write 90s, 30m, 2h or 7d", param, ctx)
        return duration.total_seconds()


class StartOption(click.ParamType["StartTime"]):
    """A time, of this machine's time zone unless it has an offset, or a delay such as `+2h`."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> StartTime:
        import datetime

        from strata.base.errors import StrataError
        from strata.fleet.core.schedule import parse_start

        text: str | datetime.datetime = str(value)
        try:
            written = datetime.datetime.fromisoformat(str(value))
        except ValueError:
            pass
        else:
            text = written.astimezone()
        try:
            return parse_start(text)
        except StrataError as error:
            self.fail(error.message, param, ctx)


class EnvVariableOption(click.ParamType[tuple[str, str]]):
    """`NAME=VALUE`."""

    name = "variable"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name:
            self.fail(f"{name!r} is not NAME=VALUE", param, ctx)
        return name, text


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--name", default="", metavar="NAME", help="Name of the job (default: the name of the folder).")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Seed of the job (default 0); another seed is another job."
)
@click.option(
    "--environment",
    default="auto",
    metavar="FILE",
    help="Install the packages of FILE: uv.lock, pyproject.toml or requirements. 'auto' (default) takes the one in the"
    " folder, 'none' uses the host's Python.",
)
@click.option("--image", default="", metavar="IMAGE", help="Run in this OCI image, on a host with podman or apptainer.")
@click.option("--python", default="", metavar="VERSION", help="Python of the environment, such as 3.12.")
@click.option(
    "--env", "env", type=EnvVariableOption(), multiple=True, metavar="NAME=VALUE", help="Set a variable; repeatable."
)
@click.option(
    "--secret", "secrets", multiple=True, metavar="NAME", help="Pass the secret NAME of 'strata secrets'; repeatable."
)
@click.option(
    "--data", "data", multiple=True, metavar="NAME", help="Give the job the data NAME of 'strata data'; repeatable."
)
@click.option("--project", default="default", metavar="NAME", help="Project of the job (default: default).")
@click.option("--cores", type=click.IntRange(min=0), default=0, metavar="N", help="Require and take N cores.")
@click.option("--gpus", type=click.IntRange(min=0), default=0, metavar="N", help="Require a host with N GPUs.")
@click.option(
    "--share",
    type=click.FloatRange(min=0, max=1),
    default=0.0,
    metavar="SHARE",
    help="Take this share of each GPU, such as 0.5, and leave the rest to others.",
)
@click.option("--cuda", is_flag=True, help="Require a host with CUDA.")
@click.option(
    "--vram", type=click.FloatRange(min=0), default=0.0, metavar="GIB", help="Require a GPU with this much memory."
)
@click.option(
    "--ram", type=click.FloatRange(min=0), default=0.0, metavar="GIB", help="Require a host with this much memory."
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    shell_complete=complete_hosts,
    help="Run only on HOST; repeatable.",
)
@click.option("--pool", default="", metavar="POOL", help="Run on the hosts of POOL (default: on those in no pool).")
@click.option(
    "--label",
    "labels",
    type=EnvVariableOption(),
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
    "--timeout", type=DurationOption(), default="0", metavar="TIME", help="End an attempt after TIME: 90s, 30m, 2h."
)
@click.option("--priority", type=int, default=0, help="Jobs with a higher priority run first (default 0).")
@click.option(
    "--at",
    "start",
    type=StartOption(),
    metavar="TIME|+DELAY",
    help="Start no earlier than TIME (2026-11-17T03:00) or after a delay (+2h).",
)
@click.option("-d", "--detach", is_flag=True, help="Print the id of the job and exit; do not follow its log.")
@hub_option
def run(  # noqa: PLR0913 (the options of the command)
    *,
    command: tuple[str, ...],
    name: str,
    seed: int,
    environment: str,
    image: str,
    python: str,
    env: tuple[tuple[str, str], ...],
    secrets: tuple[str, ...],
    data: tuple[str, ...],
    project: str,
    cores: int,
    gpus: int,
    share: float,
    cuda: bool,
    vram: float,
    ram: float,
    hosts: tuple[str, ...],
    pool: str,
    labels: tuple[tuple[str, str], ...],
    after: tuple[str, ...],
    retries: int | None,
    timeout: float,
    priority: int,
    start: StartTime | None,
    detach: bool,
    context: str | None,
) -> None:
    """Run COMMAND in a copy of the current folder on a host of the fleet.

    The folder is uploaded as by 'strata apply'. The host installs the packages that the folder lists in uv.lock,
    requirements.txt or pyproject.toml. The same command in the same folder is the same job, which runs once: to run it
    again, use 'strata requeue' or another --seed. Without --cores, --ram, --gpus, --vram and --share it takes a whole
    host, or one slot of a host that is divided into slots; with one of them it takes that much, and other jobs run
    beside it. An error of COMMAND ends the job, unless you --retries or --detach. Exit status: 0 completed, 100 failed,
    103 cancelled. Ctrl-C (130) leaves the job running; 'strata cancel' ends it.
    """
    from dataclasses import replace

    from strata.cli.fleet.data import print_data
    from strata.fleet.core.lease import MAX_ATTEMPTS
    from strata.fleet.core.requirement import Needs
    from strata.fleet.core.schedule import format_moment
    from strata.sdk.bundle import make_bundle
    from strata.sdk.submit import RunOptions, choose_environment, run_request, send_job

    needs = Needs(
        require_cuda=cuda,
        min_vram_gib=vram,
        min_ram_gib=ram,
        min_cores=cores,
        min_gpus=gpus,
        gpu_share=share,
        allowed_hosts=hosts,
        pool=pool,
        require_labels=dict(labels),
    )
    options = RunOptions(
        name=name,
        project=project,
        seed=seed,
        needs=needs,
        environment=environment,
        python=python,
        image=image,
        env=dict(env),
        secrets=secrets,
        data=data,
        # A person who looks on sees the error at once, and runs it again when it is mended.
        retries=retries if retries is not None else (MAX_ATTEMPTS - 1) * detach,
        timeout_s=timeout,
        priority=priority,
        start=start,
    )
    bundle = make_bundle(Path.cwd())
    environment_of = choose_environment(Path.cwd(), options)
    with hub_client(context, timeout_s=120.0) as client:
        options = replace(options, after=[find_job(client, text).job.id for text in after])
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
