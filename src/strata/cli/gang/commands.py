"""`strata gang`: show, events, goodput, list, create, update, reset, delete, checkpoint, and the orders to workers
(stop, drain, rebalance, reload); options, timeouts (20 s, checkpoint 60 s), and replies. `run` is in `run`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from strata.base.errors import Code, StrataError
from strata.cli.exit_codes import ExitCode
from strata.cli.extras import require
from strata.cli.gang.history import print_events, print_goodput
from strata.cli.gang.run import run
from strata.cli.gang.screen import screen
from strata.cli.gang.watch import follow
from strata.cli.groups import DefaultGroup
from strata.cli.layout import print_once
from strata.cli.options import FILE, combine, config_option, read_pair
from strata.cli.output import Format, output_option, print_error
from strata.cli.rows import Column, Rows
from strata.cli.watch import check_watched, view_options, watch_flag

if TYPE_CHECKING:
    from strata.coord.operator import CommandReceipt, Operator, OperatorSettings
    from strata.coord.view import JobSummaryView, JobView, WorkerView

T = TypeVar("T")

ANSWER_S: Final = 20.0
"""How long a command may take to be acknowledged: a worker that is not attached hears of it with its next heartbeat."""
_ACKNOWLEDGED: Final = (Column("worker"), Column("command", number=True), Column("kind"), Column("answer"))
CHECKPOINT_S: Final = 60.0
"""How long a checkpoint may take: until all ranks have finished the step that it is of, and have written it."""
_COMMITTED: Final = (
    Column("step", number=True),
    Column("checkpoint_id"),
    Column("generation", number=True),
    Column("ranks", number=True),
    Column("bytes", number=True),
)
_SETTINGS: Final = {
    "address": "address",
    "token_file": "token",
    "tls_ca": "tls.ca",
    "tls_certificate": "tls.certificate",
    "tls_key": "tls.key",
    "job": "job",
}


connection_options: Final = combine(
    config_option("gang"),
    click.option("--address", metavar="HOST:PORT", help="Address of the coordinator (default 127.0.0.1:7070)."),
    click.option(
        "--token-file", type=FILE, metavar="FILE", help="Read the token of the job from FILE, which only you can read."
    ),
    click.option("--tls-ca", metavar="FILE", help="Certificate authority of the coordinator, PEM."),
    click.option("--tls-certificate", metavar="FILE", help="Client certificate, PEM, if the coordinator requires one."),
    click.option("--tls-key", metavar="FILE", help="Private key of the client certificate, PEM."),
)
"""Where the coordinator is and who we are; passed to the command together, as `given`."""


@click.group(cls=DefaultGroup, default="show", name="gang")
def gang() -> None:
    """Show the workers of a job, once or live, and send them commands.

    'strata gang [JOB]' is 'strata gang show [JOB]'; see 'strata gang show --help'. Without JOB it is the job of the
    token, else 'default'. Every option can also be set in FILE or in the environment (STRATA_GANG_ADDRESS,
    STRATA_GANG_TOKEN_FILE, …).
    """


gang.add_command(run)


@gang.command()
@click.argument("job", required=False)
@watch_flag
@connection_options
@output_option
def show(job: str | None, watch: bool, output: Format, **given: Any) -> None:  # noqa: FBT001 (click's signature)
    """Show the workers of JOB and what they wait for.

    Also shows its checkpoints, data, commands and incidents; alerts come first. --watch continues across restarts of
    the coordinator; Ctrl-C ends it. With -o jsonl it prints the whole state after each change.
    """
    if watch:
        check_watched(output)
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
"""More checkpoints and incidents than a coordinator keeps."""


_LISTED: Final = (
    Column("job_id"),
    Column("status"),
    Column("run", number=True),
    Column("workers", number=True),
    Column("min_workers", number=True),
    Column("max_workers", number=True),
    Column("generation", number=True),
    Column("checkpoint_step", number=True),
    Column("partition", number=True, wide=True),
    Column("leader", wide=True),
)


def _show_jobs(jobs: Iterable[JobSummaryView], output: Format) -> None:
    from msgspec import structs

    with Rows(output, _LISTED) as rows:
        for each in jobs:
            rows.add(structs.asdict(each))


@gang.command()
@click.argument("job", required=False)
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND", help="Show only this kind, such as worker_lost; repeatable."
)
@click.option("--search", default="", metavar="TEXT", help="Show only events whose message or workers contain TEXT.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, metavar="N", help="Show N events at most."
)
@click.option("--before", type=click.IntRange(min=1), default=None, metavar="NUMBER", help="Show events before NUMBER.")
@connection_options
@view_options
def events(
    job: str | None, kinds: tuple[str, ...], search: str, limit: int, before: int | None, output: Format, **given: Any
) -> None:
    """Show what happened to JOB, the latest first.

    Joins, losses, generations, recoveries, checkpoints, commands, slow barriers and incidents, each with its time and
    what it cost the job. The coordinator keeps up to 2,000 events of a job, also over restarts and failovers.
    """
    from strata.base.clock import SystemClock

    found = _ask(job, given, lambda operator: operator.events(kinds, search, before or 0, limit))
    print_events(found, round(SystemClock().wall_s() * 1000), output)
    if found.next_before and output is Format.TABLE:
        print_error(f"strata gang: more with --before {found.next_before}")


@gang.command("goodput")
@click.argument("job", required=False)
@connection_options
@view_options
def show_goodput(job: str | None, output: Format, **given: Any) -> None:
    """Show how JOB spent the time of its run.

    Useful training, waiting for workers, checkpoints, detecting losses, restarts, and training that a recovery threw
    away. The parts add up to the time since the run began.
    """
    found = _ask(job, given, lambda operator: operator.goodput())
    if found is None:
        raise StrataError(Code.UNSUPPORTED, "this coordinator does not record goodput", hint="update the coordinator")
    print_goodput(found, output)


@gang.command("list")
@connection_options
@view_options
def list_jobs(output: Format, **given: Any) -> None:
    """List the jobs of the coordinator; with a token, only the job of that token.

    STATUS is CREATED (no worker has joined), RUNNING, STOPPED (all workers have left and data remains; workers that
    join next recover first) or FINISHED (all data is consumed; no worker can join before a reset).
    """
    _show_jobs(_ask(None, given, lambda operator: operator.jobs()), output)


def _to_ms(_ctx: click.Context, _param: click.Parameter, seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


_JOB_FIELDS: Final = (
    "min_workers",
    "max_workers",
    "heartbeat_interval_ms",
    "missed_heartbeats",
    "reconnect_grace_ms",
)
"""Options that are fields of the contract."""
settings_options: Final = combine(
    click.option("--min", "min_workers", type=click.IntRange(min=1), metavar="N", help="Start with N workers."),
    click.option("--max", "max_workers", type=click.IntRange(min=1), metavar="N", help="Accept at most N workers."),
    click.option(
        "--heartbeat",
        "heartbeat_interval_ms",
        type=click.FloatRange(min=0.001),
        callback=_to_ms,
        metavar="SECONDS",
        help="Interval of heartbeats.",
    ),
    click.option(
        "--missed",
        "missed_heartbeats",
        type=click.IntRange(min=1),
        metavar="N",
        help="Evict a worker after N intervals of silence.",
    ),
    click.option(
        "--reconnect-grace",
        "reconnect_grace_ms",
        type=click.FloatRange(min=0),
        callback=_to_ms,
        metavar="SECONDS",
        help="Evict a worker whose connection is broken for SECONDS.",
    ),
    click.option(
        "--param",
        "training_parameters",
        type=read_pair,
        multiple=True,
        metavar="NAME=VALUE",
        help="Set a training parameter; repeatable.",
    ),
)
"""Settings of one job; passed to the command together with the options of the connection."""


def _take_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the settings of a job that are given out of the options, which keep those of the connection."""
    settings = {name: value for name in _JOB_FIELDS if (value := given.pop(name)) is not None}
    return {**settings, "training_parameters": dict(given.pop("training_parameters"))}


@gang.command()
@click.argument("job")
@settings_options
@connection_options
@output_option
def create(job: str, output: Format, **given: Any) -> None:
    """Create JOB before its first worker joins, with its own settings.

    Other settings have the coordinator's defaults. If JOB exists with the same settings, nothing changes.
    """
    require("grpc", extra="worker")
    settings = _take_settings(given)
    _show_jobs([_ask(job, given, lambda operator: operator.create(**settings))], output)


@gang.command()
@click.argument("job")
@settings_options
@connection_options
@output_option
def update(job: str, output: Format, **given: Any) -> None:
    """Change settings of JOB, also while it runs.

    What is not named stays. Workers get new parameters with their next registration, other settings count at once.
    """
    require("grpc", extra="worker")
    settings = _take_settings(given)
    _show_jobs([_ask(job, given, lambda operator: operator.update(**settings))], output)


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


_arguments_option: Final = click.option(
    "--argument",
    "arguments",
    type=read_pair,
    multiple=True,
    metavar="NAME=VALUE",
    help="Give the program an argument; repeatable.",
)


def _order(name: str, kind: str, text: str, *, ends_work: bool, until_gone: bool = False) -> None:
    """Add a subcommand that sends `kind` to workers. One that ends work needs names or --all."""
    awaited = "all workers gone" if until_gone else "all acknowledgements"
    arguments_option = combine(*([_arguments_option] if kind == "RELOAD" else ()))

    @gang.command(name, help=text)
    @click.argument("job")
    @click.argument("workers", nargs=-1, metavar="[WORKER]...")
    @click.option("--all", "all_workers", is_flag=True, help="Send the command to all workers of the job.")
    @click.option("--reason", default="", metavar="TEXT", help="Reason for the workers' logs.")
    @arguments_option
    @click.option(
        "--wait",
        "wait_s",
        type=click.FloatRange(min=0),
        default=CHECKPOINT_S if until_gone else ANSWER_S,
        show_default=True,
        metavar="SECONDS",
        help=f"Give up after SECONDS without {awaited} (exit status 101).",
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
        pairs = dict(given.pop("arguments", ()))
        if workers and all_workers:
            raise click.UsageError("name workers or use --all, not both")
        if ends_work and not (workers or all_workers):
            raise click.UsageError(f"name the workers to {name}, or use --all")

        async def issue_command(operator: Operator) -> bool:
            from strata.coord.core.facts import CommandKind

            issued = await operator.issue(CommandKind[kind], workers, reason, pairs)
            return await _acknowledged(operator, issued, kind, wait_s, output, until_gone=until_gone)

        if not _ask(job, given, issue_command):
            click.get_current_context().exit(ExitCode.UNFINISHED)


_order("stop", "STOP", "Stop workers.", ends_work=True)
_order(
    "drain",
    "DRAIN",
    "Let workers leave without loss: with a checkpoint from which the others go on, or after their shards.",
    ends_work=True,
    until_gone=True,
)
_order(
    "rebalance",
    "REBALANCE",
    "Let workers give the shards that they have not begun to those that request next.",
    ends_work=False,
)
_order(
    "reload",
    "RELOAD",
    "Make the programs of workers read their configuration again (worker.commands).",
    ends_work=False,
)


@gang.command()
@click.argument("job")
@click.option("--reason", default="", metavar="TEXT", help="Reason for the workers' logs.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=CHECKPOINT_S,
    show_default=True,
    metavar="SECONDS",
    help="Give up after SECONDS without a committed checkpoint (exit status 101).",
)
@connection_options
@output_option
def checkpoint(job: str, reason: str, wait_s: float, output: Format, **given: Any) -> None:
    """Make all workers of JOB write a checkpoint, and show it when it is committed.

    It is of a step that no worker has finished yet. Programs that do not agree on steps (worker.checkpoint_due) write
    it where they are. A request that this command gave up waiting for stays.
    """

    async def request(operator: Operator) -> bool:
        from strata.coord.core.facts import CommandKind

        return await _committed(operator, await operator.issue(CommandKind.CHECKPOINT_NOW, (), reason), wait_s, output)

    if not _ask(job, given, request):
        click.get_current_context().exit(ExitCode.UNFINISHED)


async def _committed(operator: Operator, issued: CommandReceipt, wait_s: float, output: Format) -> bool:
    """Wait for the checkpoint that the command asks for and print it. Whether it is committed."""
    import asyncio
    from contextlib import aclosing

    from strata.coord.view import CheckpointView, JobView

    if not issued.worker_ids:
        raise StrataError(Code.PRECONDITION, "the job has no workers: nobody can write a checkpoint")
    found: CheckpointView | None = None
    try:
        async with asyncio.timeout(wait_s), aclosing(operator.watch(_ALL)) as states:
            async for state in states:
                if not isinstance(state, JobView):
                    continue
                _check_refusal(state, issued)
                found = next((each for each in state.checkpoints if each.command_id == issued.command_id), None)
                if found is not None:
                    break
    except TimeoutError:
        pass
    if found is None:
        print_error(f"strata gang: no checkpoint was committed in {wait_s:g} s; the request stays")
        return False
    manifest = found.manifest
    with Rows(output, _COMMITTED) as rows:
        rows.add(
            {
                "step": manifest.step,
                "checkpoint_id": manifest.checkpoint_id,
                "generation": manifest.generation,
                "ranks": len(manifest.parts),
                "bytes": sum(part.size_bytes for part in manifest.parts),
            }
        )
    return True


async def _acknowledged(
    operator: Operator, issued: CommandReceipt, kind: str, wait_s: float, output: Format, *, until_gone: bool
) -> bool:
    """Wait for the answers and print them. Whether all have answered, and are gone if that is what it takes."""
    import asyncio
    from contextlib import aclosing

    answers = dict.fromkeys(issued.worker_ids, "waiting")
    print_error(f"strata gang: {kind} is command {issued.command_id}, for {len(answers)} workers")
    try:
        async with asyncio.timeout(wait_s), aclosing(operator.watch()) as states:
            async for state in states:
                answers = _answers(state, issued, until_gone=until_gone) or answers
                if not _OPEN & set(answers.values()):
                    break
    except TimeoutError:
        pass
    with Rows(output, _ACKNOWLEDGED) as rows:
        for worker, answer in answers.items():
            rows.add({"worker": worker, "command": issued.command_id, "kind": kind, "answer": answer})
    return not _OPEN & set(answers.values())


_OPEN: Final = frozenset({"waiting", "leaving"})
"""Answers that others follow."""


def _check_refusal(state: JobView, issued: CommandReceipt) -> None:
    reason = state.refusal(issued.command_id)
    if reason is not None:
        raise StrataError(
            Code.PRECONDITION,
            f"command {issued.command_id} was refused: {reason}",
            hint="let the programs of all ranks call checkpoint_due after the same steps",
        )


def _answers(state: object, issued: CommandReceipt, *, until_gone: bool) -> dict[str, str]:
    from strata.coord.view import JobView

    if not isinstance(state, JobView):
        return {}
    _check_refusal(state, issued)
    waiting = {
        worker for each in state.commands if each.command.command_id == issued.command_id for worker in each.waiting_for
    }
    return {
        worker_id: "waiting" if worker_id in waiting else _answer(state.worker(worker_id), until_gone=until_gone)
        for worker_id in issued.worker_ids
    }


def _answer(worker: WorkerView | None, *, until_gone: bool) -> str:
    """Words the answer of a worker that the command does not wait for."""
    if worker is None:
        return "lost"
    if worker.is_gone:
        return (worker.liveness or "LOST").lower()
    return "leaving" if until_gone else "acknowledged"


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
