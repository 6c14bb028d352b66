"""`strata`: the table of commands and the outermost handler. Nothing imported here imports a layer, rich or asyncio."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import click

from strata import __version__
from strata.base.errors import Code, StrataError
from strata.cli.exits import EXIT_OF, Exit
from strata.cli.lazy import Entry, LazyGroup
from strata.cli.output import complain

COMMANDS: Final[Mapping[str, Entry]] = {
    "agent": Entry("strata.cli.agent:agent", "Run the agent of this host: claim jobs, run them, report."),
    "coordinator": Entry(
        "strata.cli.coordinator:coordinator", "Run the coordinator that keeps the workers of a job together."
    ),
    "gang": Entry("strata.cli.gang:gang", "Show the workers of a job, live if you like, and give them commands."),
    "hub": Entry("strata.cli.hub:hub", "Run the hub that hands out jobs and keeps what comes of them."),
    "journal": Entry("strata.cli.journal:journal", "Look into a journal: streams, records, integrity."),
}
ALIASES: Final[Mapping[str, str]] = {}


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
        return Exit.BROKEN_PIPE
    return status


def _guarded(group: click.Group, args: Sequence[str]) -> int:
    invocation = Invocation()
    try:
        returned = group.main(list(args), prog_name="strata", standalone_mode=False, obj=invocation)
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except SystemExit as stop:
        # Shell completion ends this way.
        return stop.code if isinstance(stop.code, int) else Exit.FAILED
    except Exception as error:  # noqa: BLE001 (the outermost handler)
        return _report(error, debug=invocation.debug)
    return returned if isinstance(returned, int) else Exit.OK


def _report(error: Exception, *, debug: bool) -> int:
    if isinstance(error, click.ClickException):
        return _report_usage(error)
    if debug:
        import traceback

        complain("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, ModuleNotFoundError):
        from strata.cli.extras import explain

        error = explain(error) or error
    if isinstance(error, StrataError):
        complain(f"strata: {error.message}", hint=error.hint)
        return EXIT_OF[error.code]
    hint = None if debug else "run it again as 'strata --debug …' for the traceback"
    complain(f"strata: internal error: {type(error).__name__}: {error}", hint=hint)
    return Exit.INTERNAL


def _report_usage(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return Exit.USAGE
    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "strata"
    complain(f"strata: {error.format_message()}", hint=f"{path} --help")
    return Exit.USAGE
