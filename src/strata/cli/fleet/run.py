"""`strata run`: run one command in a copy of the current folder on a host of the fleet."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import error_line, find_job, format_bytes, format_count, hub_client, hub_option, short_id
from strata.cli.output import print_error, printable, write

if TYPE_CHECKING:
    from strata.cli.fleet.bundle import Bundle
    from strata.fleet import wire
    from strata.fleet.core.requirement import Needs

_ENDS = {"completed": ExitCode.OK, "failed": ExitCode.FAILED, "cancelled": ExitCode.CANCELLED}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--name", metavar="NAME", help="Name of the job (default: the name of the folder).")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Seed of the job (default 0); another seed is another job."
)
@click.option("--cuda", is_flag=True, help="Require a host with CUDA.")
@click.option(
    "--vram", type=click.FloatRange(min=0), default=0.0, metavar="GIB", help="Require a GPU with this much memory."
)
@click.option(
    "--ram", type=click.FloatRange(min=0), default=0.0, metavar="GIB", help="Require a host with this much memory."
)
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="Run only on HOST; repeatable.")
@click.option("-d", "--detach", is_flag=True, help="Print the id of the job and exit; do not follow its log.")
@hub_option
def run(  # noqa: PLR0913 (the options of the command)
    *,
    command: tuple[str, ...],
    name: str | None,
    seed: int,
    cuda: bool,
    vram: float,
    ram: float,
    hosts: tuple[str, ...],
    detach: bool,
    context: str | None,
) -> None:
    """Run COMMAND in a copy of the current folder on a host of the fleet.

    The folder is uploaded as by 'strata apply'. The same command in the same folder is the same job, which runs once:
    to run it again, use 'strata requeue' or another --seed. Exit status: 0 completed, 100 failed, 103 cancelled. Ctrl-C
    (130) leaves the job running; 'strata cancel' ends it.
    """
    from strata.cli.fleet.bundle import make_bundle

    bundle = make_bundle(Path.cwd())
    label = _name(name or Path.cwd().name)
    with hub_client(context, timeout_s=120.0) as client:
        from strata.fleet import wire
        from strata.fleet.core.requirement import Needs

        needs = Needs(require_cuda=cuda, min_vram_gib=vram, min_ram_gib=ram, allowed_hosts=hosts)
        client.send("PUT", f"/v1/source/{bundle.sha256}", bundle.content, wire.CommitReply)
        submitted = client.call(
            "POST", "/v1/jobs", wire.SubmitReply, body=_request(command, label, seed, needs, bundle)
        )
        job = submitted.job
        sent = f"{format_count(bundle.files, 'file')}, {format_bytes(len(bundle.content))}"
        if submitted.new:
            print_error(f"strata: {label} is job {short_id(job.id)} ({sent} sent)")
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


def _request(command: tuple[str, ...], label: str, seed: int, needs: Needs, bundle: Bundle) -> wire.SubmitRequest:
    from strata.base.digest import canonical_json
    from strata.fleet import wire
    from strata.fleet.core.jobspec import JobSpec, TrainerSpec

    # The command is part of what the trainer is, so it names the trainer, and the trainer's name is the job's mode.
    how = hashlib.sha256(canonical_json([list(command), bundle.sha256])).hexdigest()[:12]
    trainer = TrainerSpec(name=f"run-{how}", command=command, bundle=bundle.sha256)
    spec = JobSpec(model=label, mode=trainer.name, trainer=trainer.name, name=label, seed=seed, needs=needs)
    return wire.SubmitRequest(spec=spec, trainer=trainer)


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64] or "run"
