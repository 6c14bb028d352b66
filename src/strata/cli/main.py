"""`strata`: the table of commands and the outermost handler. Nothing imported here imports a layer, rich or asyncio."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import click

from strata import __version__
from strata.base.errors import Code, StrataError
from strata.cli.exit_codes import EXIT_CODE_OF, ExitCode
from strata.cli.groups import CommandEntry, LazyGroup
from strata.cli.output import print_error

COMMANDS: Final[Mapping[str, CommandEntry]] = {
    "agent": CommandEntry("strata.cli.agent:agent", "Run the agent of this host: claim jobs, run them, report."),
    "apply": CommandEntry("strata.cli.fleet.apply:apply", "Queue the jobs of MANIFEST, and update those that differ."),
    "archive": CommandEntry("strata.cli.fleet.control:archive", "Hide each ended JOB from lists and counts."),
    "artifacts": CommandEntry(
        "strata.cli.fleet.artifacts:artifacts", "List, download and remove the results and checkpoints of jobs."
    ),
    "backup": CommandEntry("strata.cli.backup:backup", "Back up the data of a hub to the folder TARGET."),
    "cancel": CommandEntry("strata.cli.fleet.control:cancel", "Cancel each JOB."),
    "completion": CommandEntry(
        "strata.cli.completion:completion", "Print the script with which SHELL completes 'strata'."
    ),
    "contexts": CommandEntry(
        "strata.cli.contexts:contexts", "List the servers you logged in to, or switch to the one called NAME."
    ),
    "coordinator": CommandEntry(
        "strata.cli.coordinator:coordinator", "Run the coordinator that keeps the workers of a job together."
    ),
    "data": CommandEntry("strata.cli.fleet.data:data", "Upload, download and list the data of jobs."),
    "doctor": CommandEntry("strata.cli.doctor.command:doctor", "Diagnose this machine, the agent and the hub."),
    "drain": CommandEntry(
        "strata.cli.fleet.control:drain", "Let each HOST finish its jobs, and assign it no new ones."
    ),
    "events": CommandEntry("strata.cli.fleet.events:events", "Show who changed what in the fleet, and when."),
    "exec": CommandEntry("strata.cli.fleet.control:exec_command", "Run COMMAND inside a running JOB."),
    "gang": CommandEntry(
        "strata.cli.gang.commands:gang", "Show the workers of a job, once or live, and send them commands."
    ),
    "hub": CommandEntry("strata.cli.hub:hub", "Run the hub: schedule jobs on hosts, and store their logs and results."),
    "invite": CommandEntry(
        "strata.cli.fleet.enrol:invite", "Create a join token for one host, and print what to run there."
    ),
    "join": CommandEntry("strata.cli.fleet.enrol:join", "Make this machine a host of the hub at URL."),
    "journal": CommandEntry("strata.cli.journal:journal", "Inspect a journal: streams, facts, integrity."),
    "keys": CommandEntry("strata.cli.fleet.keys:keys", "Create, list and revoke API keys of people and programs."),
    "leave": CommandEntry("strata.cli.fleet.enrol:leave", "Undo 'strata join' on this machine."),
    "list": CommandEntry("strata.cli.fleet.jobs:list_jobs", "List jobs with their status and host."),
    "login": CommandEntry(
        "strata.cli.contexts:login", "Log in to the server at URL and use it for all other commands."
    ),
    "logs": CommandEntry("strata.cli.fleet.logs:logs", "Print the log of JOB."),
    "metrics": CommandEntry("strata.cli.fleet.metrics:metrics", "Show the metrics of jobs, side by side or over time."),
    "move": CommandEntry("strata.cli.backup:move", "Move the database of a hub to TARGET."),
    "models": CommandEntry(
        "strata.cli.models:models", "Create models for the training server, or fetch its tokenizer."
    ),
    "notify": CommandEntry(
        "strata.cli.fleet.notify:notify", "Send yourself messages about jobs: Slack, ntfy, e-mail and others."
    ),
    "pause": CommandEntry("strata.cli.fleet.control:pause", "Assign no new jobs to each HOST until it is resumed."),
    "quota": CommandEntry("strata.cli.fleet.quota:quota", "Show what each owner may use of the fleet, or change it."),
    "reload": CommandEntry(
        "strata.cli.fleet.apply:reload", "Apply the manifest in the hub's settings, as the file is now."
    ),
    "requeue": CommandEntry(
        "strata.cli.fleet.control:requeue", "Run each ended JOB again, or let excluded hosts try a pending one."
    ),
    "restore": CommandEntry("strata.cli.backup:restore", "Restore the data of a hub from BACKUP."),
    "resume": CommandEntry(
        "strata.cli.fleet.control:resume", "Assign jobs to each HOST again, also after a quarantine."
    ),
    "revoke": CommandEntry(
        "strata.cli.fleet.control:revoke", "Revoke the credentials of HOST, for example because it is lost."
    ),
    "run": CommandEntry(
        "strata.cli.fleet.run:run", "Run COMMAND in a copy of the current folder on a host of the fleet."
    ),
    "schedules": CommandEntry(
        "strata.cli.fleet.schedules:schedules", "List the schedules of manifests, or pause, resume and remove them."
    ),
    "secrets": CommandEntry("strata.cli.fleet.secrets:secrets", "Set, list and remove secrets of jobs."),
    "serve": CommandEntry(
        "strata.cli.serve.commands:serve", "Run a training server, which trains a model through an API."
    ),
    "show": CommandEntry("strata.cli.fleet.jobs:show", "Show JOB and its attempts."),
    "status": CommandEntry(
        "strata.cli.fleet.jobs:status", "Show how many jobs and hosts there are, and the latest failures."
    ),
    "up": CommandEntry("strata.cli.fleet.up:up", "Run a hub and an agent on this machine, in one process."),
    "wait": CommandEntry("strata.cli.fleet.wait:wait", "Wait until every JOB has ended."),
    "weights": CommandEntry(
        "strata.cli.weights:weights", "Export checkpoints of a training server, or import a LoRA adapter."
    ),
    "why": CommandEntry("strata.cli.fleet.why:why", "Explain why JOB is not running, and what would help."),
    "workers": CommandEntry("strata.cli.fleet.hosts:workers", "List hosts with their state and hardware, or show one."),
}
ALIASES: Final[Mapping[str, str]] = {"hosts": "workers", "jobs": "list"}


class Invocation:
    """What one call of `strata` was asked for; commands reach it as `ctx.obj`."""

    def __init__(self) -> None:
        self.debug = False


class Root(LazyGroup):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # Not our stdout (`output.write` sees to that) but a connection; click would end with status 1 and no word.
            raise StrataError(Code.UNAVAILABLE, "the other side closed the connection") from error


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: FBT001 (click's signature)
    del param
    ctx.ensure_object(Invocation).debug = value


strata: Final = Root(
    name="strata",
    table=COMMANDS,
    aliases=ALIASES,
    help="Strata turns the machines you own into one training service.",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        click.Option(
            ["--debug"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_set_debug,
            help="Show the traceback of an error.",
        ),
    ],
)
click.version_option(__version__, prog_name="strata", message="%(prog)s %(version)s")(strata)


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str], group: click.Group = strata) -> int:
    """One call of the command line; returns the exit status and never raises."""
    status = _guarded(group, args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader left (`| head`). Without this the interpreter would complain about the same flush when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    return status


def _guarded(group: click.Group, args: Sequence[str]) -> int:
    invocation = Invocation()
    try:
        returned = group.main(list(args), prog_name="strata", standalone_mode=False, obj=invocation)
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except SystemExit as stop:
        # Shell completion ends this way.
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILED
    except Exception as error:  # noqa: BLE001 (the outermost handler)
        return _report(error, debug=invocation.debug)
    return returned if isinstance(returned, int) else ExitCode.OK


def _report(error: Exception, *, debug: bool) -> int:
    if isinstance(error, click.ClickException):
        return _report_usage(error)
    if debug:
        import traceback

        print_error("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, ModuleNotFoundError):
        from strata.cli.extras import explain_missing_module

        error = explain_missing_module(error) or error
    if isinstance(error, StrataError):
        print_error(f"strata: {error.message}", hint=error.hint)
        return EXIT_CODE_OF[error.code]
    hint = None if debug else "run it again as 'strata --debug …' for the traceback"
    print_error(f"strata: internal error: {type(error).__name__}: {error}", hint=hint)
    return ExitCode.INTERNAL


def _report_usage(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return ExitCode.USAGE
    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "strata"
    print_error(f"strata: {error.format_message()}", hint=f"{path} --help")
    return ExitCode.USAGE
