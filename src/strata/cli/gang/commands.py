"""`strata gang`: the workers of one job, at a glance or live, and commands for them. Starting them is in `run`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from strata.base.errors import Code, StrataError
from strata.cli.exit_codes import ExitCode
from strata.cli.gang.run import run
from strata.cli.gang.screen import screen
from strata.cli.gang.watch import follow
from strata.cli.groups import DefaultGroup
from strata.cli.layout import print_once
from strata.cli.output import Column, Format, Rows, output_option, print_error

if TYPE_CHECKING:
    from strata.coord.operator import CommandReceipt, Operator, OperatorSettings
    from strata.coord.view import JobSummaryView, WorkerView

T = TypeVar("T")
_Function = TypeVar("_Function", bound=Callable[..., object])

ANSWER_S: Final = 20.0
"""How long a command may take to be acknowledged: a worker that is not attached hears of it with its next heartbeat."""
_ACKNOWLEDGED: Final = (Column("worker"), Column("command", number=True), Column("kind"), Column("answer"))
_SETTINGS: Final = {
    "address": "address",
    "token_file": "token",
    "tls_ca": "tls.ca",
    "tls_certificate": "tls.certificate",
    "tls_key": "tls.key",
    "job": "job",
}


class Gang(DefaultGroup):
    """A first word that is no command is a job to show."""

    default = "show"


def connection_options(function: _Function) -> _Function:
    """Where the coordinator is and who we are; passed to the command together, as `given`."""
    file = click.Path(path_type=Path, dir_okay=False)
    options = (
        click.option("--config", type=file, metavar="FILE", help="Read settings from [gang] in this TOML file."),
        click.option("--address", metavar="HOST:PORT", help="Address of the coordinator (default 127.0.0.1:7070)."),
        click.option(
            "--token-file",
            type=file,
            metavar="FILE",
            help="Read the token of the job from FILE, which only you can read.",
        ),
        click.option("--tls-ca", metavar="FILE", help="Certificate authority of the coordinator, PEM."),
        click.option(
            "--tls-certificate", metavar="FILE", help="Client certificate, PEM, if the coordinator requires one."
        ),
        click.option("--tls-key", metavar="FILE", help="Private key of the client certificate, PEM."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@click.group(cls=Gang, name="gang")
def gang() -> None:
    """Show the workers of a job, once or live, and send them commands.

    'strata gang [JOB]' is 'strata gang show [JOB]'; see 'strata gang show --help'. Without JOB it is the job of the
    token, else 'default'. Every option can also be set in FILE or in the environment (STRATA_GANG_ADDRESS,
    STRATA_GANG_TOKEN_FILE, …).
    """


gang.add_command(run)


@gang.command()
@click.argument("job", required=False)
@click.option("-w", "--watch", is_flag=True, help="Keep watching: a live screen, or a line for each change if piped.")
@connection_options
@output_option
def show(job: str | None, watch: bool, output: Format, **given: Any) -> None:  # noqa: FBT001 (click's signature)
    """Show the workers of JOB and what they wait for.

    Also shows its checkpoints, data, commands and incidents; alerts come first. --watch continues across restarts of
    the coordinator; Ctrl-C ends it. With -o jsonl it prints the whole state after each change.
    """
    if watch and output is Format.JSON:
        raise click.UsageError("-o json cannot be combined with --watch: use -o jsonl")
    history = 0 if output is Format.TABLE else _ALL

    async def show_job(operator: Operator) -> None:
        if not watch:
            state = await operator.job(history)
            print_once(state, screen(state, wide=output is Format.WIDE), output)
            return
        from contextlib import aclosing

        async with aclosing(operator.watch(history)) as states:
            await follow(states, output)

    _ask(job, given, show_job)


_ALL: Final = 1_000
"""Of checkpoints and incidents; more than a coordinator keeps."""


_LISTED: Final = (
    Column("job_id"),
    Column("status"),
    Column("run", number=True),
    Column("workers", number=True),
    Column("min_workers", number=True),
    Column("max_workers", number=True),
    Column("generation", number=True),
    Column("checkpoint_step", number=True),
)


def _show_jobs(jobs: Iterable[JobSummaryView], output: Format) -> None:
    from msgspec import structs

    with Rows(output, _LISTED) as rows:
        for each in jobs:
            rows.add(structs.asdict(each))


@gang.command("list")
@connection_options
@output_option
def list_jobs(output: Format, **given: Any) -> None:
    """List the jobs of the coordinator; with a token, only the job of that token.

    STATUS is CREATED (no worker has joined), RUNNING, STOPPED (all workers have left and data remains; workers that
    join next recover first) or FINISHED (all data is consumed; no worker can join before a reset).
    """
    _show_jobs(_ask(None, given, lambda operator: operator.jobs()), output)


@gang.command()
@click.argument("job")
@click.option(
    "--min", "least", type=click.IntRange(min=1), default=None, metavar="N", help="Start when N workers have joined."
)
@click.option("--max", "most", type=click.IntRange(min=1), default=None, metavar="N", help="Accept at most N workers.")
@click.option(
    "--param", "parameters", multiple=True, metavar="NAME=VALUE", help="Set a training parameter; repeatable."
)
@connection_options
@output_option
def create(
    job: str, least: int | None, most: int | None, parameters: tuple[str, ...], output: Format, **given: Any
) -> None:
    """Create JOB before its first worker joins, with its own settings.

    Other settings have the coordinator's defaults. If JOB exists with the same settings, nothing changes.
    """
    wrong = [each for each in parameters if "=" not in each]
    if wrong:
        raise click.UsageError(f"--param {wrong[0]} is not NAME=VALUE")
    named = dict(each.split("=", 1) for each in parameters)
    _show_jobs([_ask(job, given, lambda operator: operator.create(least or 0, most or 0, named))], output)


@gang.command()
@click.argument("job")
@connection_options
@output_option
def reset(job: str, output: Format, **given: Any) -> None:
    """Start the next run of JOB from the beginning.

    The new run has consumed no data and has no checkpoint; files of earlier checkpoints are kept. Stop the workers of
    JOB first.
    """
    _show_jobs([_ask(job, given, lambda operator: operator.reset())], output)


@gang.command()
@click.argument("job")
@connection_options
def delete(job: str, **given: Any) -> None:
    """Delete JOB, which must have no workers. Files of its checkpoints are kept."""
    _ask(job, given, lambda operator: operator.delete())
    print_error(f"strata gang: job {job} is deleted")


def _order(name: str, kind: str, text: str, *, ends_work: bool) -> None:
    """Add a subcommand that sends `kind` to workers. One that ends work needs names or --all."""

    @gang.command(name, help=text)
    @click.argument("job")
    @click.argument("workers", nargs=-1, metavar="[WORKER]...")
    @click.option("--all", "all_workers", is_flag=True, help="Send the command to all workers of the job.")
    @click.option("--reason", default="", metavar="TEXT", help="Reason for the workers' logs.")
    @click.option(
        "--wait",
        "wait_s",
        type=click.FloatRange(min=0),
        default=ANSWER_S,
        show_default=True,
        metavar="SECONDS",
        help="Give up after SECONDS without all acknowledgements (exit status 101).",
    )
    @connection_options
    @output_option
    def order(
        job: str,
        workers: tuple[str, ...],
        all_workers: bool,  # noqa: FBT001 (click's signature)
        reason: str,
        wait_s: float,
        output: Format,
        **given: Any,
    ) -> None:
        if workers and all_workers:
            raise click.UsageError("name workers or use --all, not both")
        if ends_work and not (workers or all_workers):
            raise click.UsageError(f"name the workers to {name}, or use --all")

        async def issue_command(operator: Operator) -> bool:
            from strata.coord.core.facts import CommandKind

            issued = await operator.issue(CommandKind[kind], workers, reason)
            return await _acknowledged(operator, issued, kind, wait_s, output)

        if not _ask(job, given, issue_command):
            click.get_current_context().exit(ExitCode.UNFINISHED)


_order("stop", "STOP", "Stop workers.", ends_work=True)
_order("drain", "DRAIN", "Let workers finish their shards and leave.", ends_work=True)
_order("checkpoint", "CHECKPOINT_NOW", "Make workers write a checkpoint now.", ends_work=False)
_order("rebalance", "REBALANCE", "Make workers register again.", ends_work=False)


async def _acknowledged(operator: Operator, issued: CommandReceipt, kind: str, wait_s: float, output: Format) -> bool:
    """Wait for the answers and print them. Whether all have answered."""
    import asyncio
    from contextlib import aclosing

    answers = dict.fromkeys(issued.worker_ids, "waiting")
    print_error(f"strata gang: {kind} is command {issued.command_id}, for {len(answers)} workers")
    try:
        async with asyncio.timeout(wait_s), aclosing(operator.watch()) as states:
            async for state in states:
                answers = _answers(state, issued) or answers
                if "waiting" not in answers.values():
                    break
    except TimeoutError:
        pass
    with Rows(output, _ACKNOWLEDGED) as rows:
        for worker, answer in answers.items():
            rows.add({"worker": worker, "command": issued.command_id, "kind": kind, "answer": answer})
    return "waiting" not in answers.values()


def _answers(state: object, issued: CommandReceipt) -> dict[str, str]:
    from strata.coord.view import JobView

    if not isinstance(state, JobView):
        return {}
    waiting = {
        worker for each in state.commands if each.command.command_id == issued.command_id for worker in each.waiting_for
    }
    return {
        worker_id: "waiting" if worker_id in waiting else _answer(state.worker(worker_id))
        for worker_id in issued.worker_ids
    }


def _answer(worker: WorkerView | None) -> str:
    """Of a worker that the command does not wait for."""
    if worker is None:
        return "lost"
    return (worker.liveness or "LOST").lower() if worker.is_gone else "acknowledged"


def _ask(job: str | None, given: dict[str, Any], use: Callable[[Operator], Awaitable[T]]) -> T:
    import asyncio

    settings = _settings(job, given)

    async def connect() -> T:
        from strata.base.clock import SystemClock
        from strata.coord.operator import Operator

        async with Operator(settings, SystemClock()) as operator:
            return await use(operator)

    return asyncio.run(connect())


def _settings(job: str | None, given: dict[str, Any]) -> OperatorSettings:
    from strata.base.settings import load
    from strata.cli.extras import require

    require("grpc", extra="worker")
    require("psutil", extra="worker")
    from strata.coord.operator import SECTION, OperatorSettings

    file = given.pop("config")
    flags: dict[str, Any] = {_SETTINGS[name]: value for name, value in (given | {"job": job}).items()}
    if flags["token"] is not None:
        flags["token"] = {"file": str(flags["token"])}
    if job == "":
        raise StrataError(Code.INVALID, "the name of the job is empty")
    return load(OperatorSettings, section=SECTION, file=file, flags=flags)
