"""`strata`: the table of all commands with their one-line help, aliases and synonyms, and the outermost
error handler.
"""

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

_TABLE: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "Run and follow jobs": {
        "init": ("init:init", "Write a first manifest or recipe from what FOLDER has."),
        "run": ("fleet.run:run", "Run COMMAND in a copy of the current folder on a host of the fleet."),
        "apply": ("fleet.apply:apply", "Queue the jobs of MANIFEST, and update those that differ."),
        "list": ("fleet.jobs:list_jobs", "List jobs with their status and host."),
        "show": ("fleet.jobs:show", "Show JOB and its attempts."),
        "top": ("fleet.top:top", "Show live what needs attention, what runs, what waits, and the hosts."),
        "status": ("fleet.jobs:status", "Show how many jobs and hosts there are, and the latest failures."),
        "why": ("fleet.why:why", "Explain why JOB is not running, and what would help."),
        "logs": ("fleet.logs:logs", "Print the log of JOB."),
        "metrics": ("fleet.metrics:metrics", "Show the metrics of jobs, side by side, over time or as plots."),
        "goodput": ("fleet.goodput:goodput", "Show where the time of JOB went, and what its interruptions cost."),
        "wait": ("fleet.wait:wait", "Wait until every JOB has ended."),
        "cancel": ("fleet.control:cancel", "Cancel each JOB."),
        "requeue": ("fleet.control:requeue", "Run each ended JOB again, or let excluded hosts try a pending one."),
        "archive": ("fleet.control:archive", "Hide each ended JOB from lists and counts."),
        "exec": ("fleet.control:exec_command", "Run COMMAND inside a running JOB."),
        "events": ("fleet.events:events", "Show who changed what in the fleet, and when."),
        "schedules": (
            "fleet.schedules:schedules",
            "List the schedules of manifests, or pause, resume and remove them.",
        ),
        "sweeps": ("fleet.sweeps:sweeps", "List the sweeps of manifests, or stop and resume them."),
    },
    "Results and data": {
        "artifacts": ("fleet.artifacts:artifacts", "List, download and remove the results and checkpoints of jobs."),
        "data": ("fleet.data:data", "Upload, download and list the data of jobs."),
        "mirror": ("mirror:mirror", "Copy metrics to TensorBoard, W&B or another tracker, as they come."),
    },
    "Hosts": {
        "workers": ("fleet.hosts:workers", "List hosts with their state and hardware, or show one."),
        "drain": ("fleet.control:drain", "Let each HOST finish its jobs, and assign it no new ones."),
        "pause": ("fleet.control:pause", "Assign no new jobs to each HOST until it is resumed."),
        "resume": ("fleet.control:resume", "Assign jobs to each HOST again, also after a quarantine."),
        "revoke": ("fleet.control:revoke", "Revoke the credentials of HOST, for example because it is lost."),
        "invite": ("fleet.enrol:invite", "Create a join token for one host, and print what to run there."),
        "join": ("fleet.enrol:join", "Make this machine a host of the hub at URL."),
        "leave": ("fleet.enrol:leave", "Undo 'strata join' on this machine."),
        "agent": ("agent:agent", "Run the agent of this host: claim jobs, run them, report."),
    },
    "Hub": {
        "demo": ("demo:demo", "Fill a dashboard with real work of this machine, then remove it all."),
        "up": ("fleet.up:up", "Run a hub and an agent on this machine, in one process."),
        "hub": ("hub:hub", "Run the hub: schedule jobs on hosts, and store their logs and results."),
        "dashboard": ("fleet.dashboard:dashboard", "Print a link that logs your browser in to the dashboard."),
        "mcp": ("mcp.command:mcp", "Let AI agents use the hub by Model Context Protocol (experimental)."),
        "keys": ("fleet.keys:keys", "Create, list and revoke API keys of people and programs."),
        "quota": ("fleet.quota:quota", "Show what each owner may use of the fleet, or change it."),
        "secrets": ("fleet.secrets:secrets", "Set, list and remove secrets of jobs."),
        "notify": ("fleet.notify:notify", "Send yourself messages about jobs: Slack, ntfy, e-mail and others."),
        "reload": ("fleet.apply:reload", "Apply the manifest in the hub's settings, as the file is now."),
        "backup": ("backup:backup", "Back up the data of a hub to the folder TARGET."),
        "restore": ("backup:restore", "Restore the data of a hub from BACKUP."),
        "move": ("backup:move", "Move the database of a hub to TARGET."),
    },
    "Gangs": {
        "coordinator": ("coordinator:coordinator", "Run the coordinator that keeps the workers of a job together."),
        "gang": ("gang.commands:gang", "Show the workers of a job, once or live, and send them commands."),
        "journal": ("journal:journal", "Inspect a journal: streams, facts, integrity."),
    },
    "Training server": {
        "train": ("train:train", "Train a model as RECIPE says, and export its adapter."),
        "recipes": ("recipes:recipes", "List the kinds of recipes for 'strata train', or print one."),
        "serve": ("serve.commands:serve", "Run a training server, which trains a model through an API."),
        "models": ("models:models", "Create, fetch, check and publish models for the training server."),
        "plan": ("plan:plan", "Plan the memory of each device for training MODEL."),
        "weights": ("weights:weights", "List or export checkpoints of a server, or import a LoRA adapter."),
    },
    "This machine": {
        "login": ("contexts:login", "Log in to the server at URL and use it for all other commands."),
        "contexts": ("contexts:contexts", "List the servers you logged in to, or switch to the one called NAME."),
        "doctor": ("doctor.command:doctor", "Diagnose this machine, the agent and the hub."),
        "completion": ("completion:completion", "Print the script with which SHELL completes 'strata'."),
    },
}
"""The target and the short help of each command, by the section of the list of commands."""
COMMANDS: Final[Mapping[str, CommandEntry]] = {
    name: CommandEntry(target, help, section)
    for section, commands in _TABLE.items()
    for name, (target, help) in commands.items()
}
ALIASES: Final[Mapping[str, str]] = {"hosts": "workers", "jobs": "list"}
SYNONYMS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ps", "ls", "queue", "squeue", "qstat"), "list"),
    **dict.fromkeys(("kill", "stop", "abort", "terminate", "scancel", "qdel"), "cancel"),
    **dict.fromkeys(("delete", "rm", "remove", "hide"), "archive"),
    **dict.fromkeys(("retry", "rerun", "restart", "again"), "requeue"),
    **dict.fromkeys(("describe", "inspect", "info", "get"), "show"),
    **dict.fromkeys(("log", "output", "stdout"), "logs"),
    **dict.fromkeys(("tail", "follow", "attach"), "logs -f"),
    **dict.fromkeys(("submit", "launch", "start", "sbatch", "srun", "qsub"), "run"),
    **dict.fromkeys(("new", "scaffold"), "init"),
    "deploy": "apply",
    **dict.fromkeys(("node", "nodes", "host", "machine", "machines", "agents", "sinfo"), "hosts"),
    **dict.fromkeys(("explain", "reason", "diagnosis"), "why"),
    **dict.fromkeys(("htop", "monitor", "watch", "nvidia-smi"), "top"),
    **dict.fromkeys(("plot", "graph", "curves", "loss"), "metrics --plot"),
    **dict.fromkeys(("tensorboard", "wandb", "mlflow", "tracker", "trackers"), "mirror"),
    **dict.fromkeys(("download", "fetch", "pull"), "artifacts get"),
    **dict.fromkeys(("results", "checkpoints", "outputs"), "artifacts list"),
    **dict.fromkeys(("upload", "push", "cp", "rsync"), "data push"),
    **dict.fromkeys(("dataset", "datasets", "volumes"), "data list"),
    **dict.fromkeys(("ssh", "shell"), "exec"),
    **dict.fromkeys(("cron", "crontab", "schedule"), "schedules"),
    **dict.fromkeys(("sweep", "study", "search", "tune"), "sweeps"),
    **dict.fromkeys(("history", "audit"), "events"),
    "cordon": "pause",
    "uncordon": "resume",
    **dict.fromkeys(("token", "tokens", "users", "apikey"), "keys"),
    **dict.fromkeys(("secret", "env"), "secrets"),
    **dict.fromkeys(("quotas", "limits"), "quota"),
    **dict.fromkeys(("alert", "alerts", "webhook", "slack"), "notify"),
    **dict.fromkeys(("server", "daemon"), "hub"),
    "migrate": "move",
    **dict.fromkeys(("try", "tour", "playground"), "demo"),
    **dict.fromkeys(("dump", "snapshot"), "backup"),
    **dict.fromkeys(("finetune", "sft", "dpo", "grpo", "distill"), "train"),
    "tinker": "serve",
    **dict.fromkeys(("context", "use", "switch"), "contexts"),
    **dict.fromkeys(("check", "diagnose", "debug"), "doctor"),
    "version": "--version",
    "help": "--help",
}
"""What people type who know other programs, and what has that meaning here."""


class Invocation:
    """What one call of `strata` was asked for; commands reach it as `ctx.obj`."""

    def __init__(self) -> None:
        self.debug = False


FIRST: Final = ("demo", "init", "up", "run", "apply", "status", "logs", "metrics", "artifacts", "dashboard")
"""What `strata` alone lists."""


class Root(LazyGroup):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(self._first_screen(ctx))
            ctx.exit(ExitCode.OK)
        return super().parse_args(ctx, args)

    def _first_screen(self, ctx: click.Context) -> str:
        formatter = ctx.make_formatter()
        formatter.write_text(self.help or "")
        with formatter.section("Start here"):
            formatter.write_dl([(f"strata {name}", self.table[name].help) for name in FIRST])
        formatter.write_paragraph()
        formatter.write_text("All commands: strata --help. One command: strata COMMAND --help.")
        return formatter.getvalue().rstrip()

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
    synonyms=SYNONYMS,
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
