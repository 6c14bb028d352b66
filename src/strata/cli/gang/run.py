"""`strata gang run`: its options, and what it prints."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.coordinator import OWN_COMMAND
from strata.cli.exit_codes import ExitCode
from strata.cli.gang.format import GangChanges
from strata.cli.output import print_error

if TYPE_CHECKING:
    from strata.coord.view import JobView

ONE_HOST: Final = ("1", "1:1")
_HOSTS: Final = re.compile(r"[1-9]\d*(:[1-9]\d*)?")


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc", "workers", type=click.IntRange(min=1), required=True, metavar="N", help="Start N workers on this host."
)
@click.option(
    "--nnodes",
    "hosts",
    default="1",
    metavar="MIN:MAX",
    help="Train on MIN to MAX hosts, on each with this command (default 1).",
)
@click.option(
    "--coordinator", metavar="HOST:PORT", help="Address of the coordinator (default: start one for this run)."
)
@click.option("--job", metavar="NAME", help="Name of the job (default: that of the program).")
@click.option(
    "--data",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep the coordinator's journal and the stacks of hung workers here (default: gang-NAME).",
)
@click.option(
    "--local-addr", "local_address", metavar="IP", help="Address of this host for other hosts (default: detected)."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Give up when workers have failed more than N times.",
)
@click.option(
    "--hang-after",
    "hang_after_s",
    type=click.FloatRange(min=10),
    metavar="SECONDS",
    help="Kill workers that train and finish no step for SECONDS; they start again (default: never).",
)
@click.option("--reset", is_flag=True, help="Run the job again from the beginning.")
@click.option("--finished-ok", is_flag=True, help="End well, and not with an error, if the job is finished already.")
@click.option(
    "--join-timeout",
    "join_timeout_s",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Give up when fewer than MIN hosts are there for SECONDS.",
)
@click.option(
    "--check-hosts",
    type=click.FloatRange(min=1.2),
    metavar="FACTOR",
    help="Exclude hosts that compute wrongly or FACTOR times slower than others.",
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="PROGRAM [ARGUMENT]...")
@click.pass_context
def run(ctx: click.Context, /, program: tuple[str, ...], **given: Any) -> None:
    """Train with PROGRAM, a Python file, on N workers of this host.

    PROGRAM runs under torchrun and calls strata.join(); without torch only on one host. Failed workers start again from
    the last committed checkpoint; a second run of the same job does too. With --nnodes, run the same command with the
    same --coordinator on each host.
    Token and TLS are those of workers (STRATA_WORKER_TOKEN_FILE, STRATA_WORKER_TLS_CA). Ctrl-C ends it.
    """
    hosts = given["hosts"]
    if not _HOSTS.fullmatch(hosts):
        raise click.UsageError(f"--nnodes {hosts} is neither a number nor MIN:MAX")
    if hosts != "1" and given["coordinator"] is None:
        raise click.UsageError("several hosts need one coordinator: name its address with --coordinator")
    import asyncio

    from strata.base.clock import SystemClock
    from strata.cli.extras import require

    require("grpc", extra="coordinator")
    require("psutil", extra="worker")
    with_torch = find_spec("torch") is not None
    if not with_torch and (hosts not in ONE_HOST or given["check_hosts"] is not None):
        # torchrun starts the workers of several hosts together, and the check of hosts computes with torch.
        require("torch", extra="train")
    from strata.coord.gang import INTERRUPTED, GangLauncher, GangOptions

    job = given.pop("job") or PurePath(program[0]).stem
    folder = (given.pop("folder") or Path(f"gang-{job}")).absolute()
    options = GangOptions(job=job, folder=folder, program=program, torchrun=with_torch, **given)
    changes = GangChanges()

    def show(job: JobView) -> None:
        for line in changes.lines(job):
            _say(line)

    status = asyncio.run(GangLauncher(options, SystemClock(), _say, show).run(OWN_COMMAND))
    if status == INTERRUPTED:
        _say("interrupted; the same command goes on from the last checkpoint")
        ctx.exit(ExitCode.INTERRUPTED)
    if status:
        _say(f"the training failed: torchrun ended with status {status}")
        ctx.exit(ExitCode.FAILED)


def _say(line: str) -> None:
    print_error(f"strata gang: {line}")
