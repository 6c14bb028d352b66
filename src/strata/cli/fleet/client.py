"""Shared by the fleet commands: the hub's connection, lookup of a job by id, name or gang with suggestions, formats of
durations, sizes and counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from strata.base.errors import Code, StrataError
from strata.cli.options import combine
from strata.cli.output import Format, print_error, printable
from strata.cli.rows import Column, Rows
from strata.cli.watch import view_options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.wire.hosts import Host
    from strata.fleet.wire.jobs import Job, JobReply, JobsQuery
    from strata.fleet.wire.manifests import ScheduleReply
    from strata.fleet.wire.sweeps import SweepSummary

_Function = TypeVar("_Function", bound=Callable[..., object])
_Declared = TypeVar("_Declared", bound="ScheduleReply | SweepSummary")
SHORT: Final = 10
"""Digits of an id that a table shows: enough for a unique prefix."""
_LABEL_PAGES: Final = 20
_SUGGESTED: Final = 3
_RAISED: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)(?::|$)")
_ID: Final = re.compile(r"[0-9a-z_]{1,80}")
_OLDER: Final = re.compile(r"(.+)@([1-9][0-9]{0,3})")


def complete_contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    del ctx, param
    from click.shell_completion import CompletionItem

    from strata.base.errors import StrataError
    from strata.sdk.fleet import client_settings, shown_contexts

    try:
        known = shown_contexts(client_settings())
    except StrataError:
        return []
    return [CompletionItem(each["name"], help=each["url"]) for each in known if each["name"].startswith(incomplete)]


def hub_option(function: _Function) -> _Function:
    """`--context`, passed to the command as `context`."""
    return click.option(
        "--context",
        metavar="NAME",
        shell_complete=complete_contexts,
        help="Use the hub that you logged in to as NAME (default: the current context).",
    )(function)


hub_view_options: Final = combine(hub_option, view_options)
"""`--context`, `-o` and `-w`."""


@contextmanager
def hub_client(context: str | None = None, *, timeout_s: float = 30.0) -> Iterator[HubClient]:
    from strata.sdk.fleet import client_settings, connect

    try:
        with connect(client_settings(context=context), timeout_s=timeout_s) as client:
            yield client
    except StrataError as error:
        if error.code is Code.UNAUTHENTICATED:
            # The server's own hint is for programs that send a header.
            hint = "strata login URL, with a key that is valid there; strata contexts shows the server that is used"
            raise StrataError(error.code, error.message, hint=hint, **error.detail) from error
        raise


def print_rows(
    output: Format, columns: Sequence[Column], rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> None:
    """Each row as JSON has it, and the values that tables show differently."""
    with Rows(output, columns) as printed:
        for row, display in rows:
            printed.add(row if output.for_programs else {**row, **display})


def find_job(client: HubClient, text: str, *, newest: bool = True) -> JobReply:
    """Find a job by id, by a prefix of an id, or by name, with or without its project before it.

    Of several jobs with that name it is the newest, with a note about the others; without `newest` that is an error,
    unless lists hide the others. `NAME@2` is the newest but one. The name of a gang finds its first member.
    """
    from strata.fleet.wire.jobs import JobReply

    if _ID.fullmatch(text):
        try:
            return client.call("GET", f"/v1/job/{text}", JobReply)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
    matches = _named_jobs(client, text)
    older = _OLDER.fullmatch(text)
    if not matches and older is not None:
        matches = _named_jobs(client, older[1])[int(older[2]) - 1 :][:1]
    if not matches:
        raise StrataError(
            Code.NOT_FOUND, f"there is no job {text[:100]!r}{_similar_job(client, text)}", hint="strata list"
        )
    if not newest:
        matches = [job for job in matches if not is_hidden(job)] or matches
    if len(matches) > 1:
        first, *others = (short_id(job.id) for job in matches[:5])
        several = f"{len(matches)} jobs are called {printable(text)}"
        if not newest:
            raise StrataError(Code.INVALID, several, hint=f"choose one by its id: {', '.join((first, *others))}")
        print_error(f"strata: {several}; this is the newest, {first}; before it: {', '.join(others)}")
    return client.call("GET", f"/v1/job/{matches[0].id}", JobReply)


def _similar_job(client: HubClient, text: str) -> str:
    """A suggestion: jobs whose names begin so, or else one whose name is spelt nearly so."""
    from strata.base.suggest import did_you_mean
    from strata.fleet.wire.jobs import JobsQuery

    begin = [job.spec.label for job in all_jobs(client, JobsQuery(search=text[:64]), pages=1)]
    begin = sorted({label for label in begin if label.startswith(text)})[:_SUGGESTED]
    if begin:
        return f", did you mean {' or '.join(begin)}?"
    return did_you_mean(text, [job.spec.label for job in all_jobs(client, pages=1)])


def find_declared(what: str, listed: Sequence[_Declared], text: str) -> _Declared:
    """The sweep or schedule, as `what` says, that is called so, with or without its project."""
    from strata.base.suggest import did_you_mean

    matches = [each for each in listed if text in (each.name, f"{each.project}/{each.name}")]
    if not matches:
        known = [each.name for each in listed]
        raise StrataError(Code.NOT_FOUND, f"there is no {what} {text!r}{did_you_mean(text, known)}")
    if len(matches) > 1:
        names = ", ".join(f"{each.project}/{each.name}" for each in matches)
        raise StrataError(Code.INVALID, f"several {what}s are called {text!r}: {names}", hint="write PROJECT/NAME")
    return matches[0]


def declared_name(declared: ScheduleReply | SweepSummary) -> str:
    """Prefixes the name with the project unless it is the default one."""
    from strata.fleet.core.jobspec import DEFAULT_PROJECT

    return declared.name if declared.project == DEFAULT_PROJECT else f"{declared.project}/{declared.name}"


def find_members(client: HubClient, text: str) -> list[JobReply]:
    """A job as `find_job` finds it; of a gang that is called so, all members by index."""
    from strata.fleet.core.jobspec import gang_ids
    from strata.fleet.wire.jobs import JobReply

    reply = find_job(client, text)
    if not names_gang(reply.job, text):
        return [reply]
    _, *others = gang_ids(reply.job.id, reply.job.spec)
    return [reply, *(client.call("GET", f"/v1/job/{member}", JobReply) for member in others)]


def names_gang(job: Job, text: str) -> bool:
    """Says whether the text by which a job was found is the name of its gang, and not that of the member."""
    older = _OLDER.fullmatch(text)
    gang = job.spec.gang
    return gang is not None and (older[1] if older else text) in (gang.name, f"{job.spec.project}/{gang.name}")


def _named_jobs(client: HubClient, text: str) -> list[Job]:
    """The jobs that have this name, with or without a project before it, the newest first. Of a gang: member 0."""
    from strata.fleet.core.jobspec import member_name

    return _labelled_jobs(client, text) or [
        job for job in _labelled_jobs(client, member_name(text, 0)) if names_gang(job, text)
    ]


def _labelled_jobs(client: HubClient, text: str) -> list[Job]:
    from strata.fleet.wire.jobs import JobsQuery

    project, slash, name = text.partition("/")
    queries = [JobsQuery(name=text)] + ([JobsQuery(name=name, project=project)] if slash else [])
    named = [job for query in queries for job in all_jobs(client, query, pages=_LABEL_PAGES)]
    return sorted(named, key=lambda job: (-job.created_at_s, job.newer))


def is_hidden(job: Job) -> bool:
    """Says whether lists leave the job out unless they are asked for all."""
    from strata.fleet.core.job import TERMINAL

    return (job.archived or job.superseded) and job.status in TERMINAL


def all_jobs(client: HubClient, query: JobsQuery | None = None, *, pages: int | None = None) -> Iterator[Job]:
    import msgspec

    from strata.fleet.wire.base import MAX_PAGE
    from strata.fleet.wire.jobs import JobsQuery, JobsReply

    query = msgspec.structs.replace(query or JobsQuery(), limit=MAX_PAGE)
    while pages is None or pages > 0:
        reply = client.call("GET", "/v1/jobs", JobsReply, query=query)
        yield from reply.jobs
        if not reply.next:
            return
        query = msgspec.structs.replace(query, after=reply.next)
        pages = None if pages is None else pages - 1


def all_hosts(client: HubClient) -> tuple[Host, ...]:
    from strata.fleet.wire.hosts import HostsReply

    return client.call("GET", "/v1/workers", HostsReply).hosts


def host_path(text: str) -> str:
    from urllib.parse import quote

    return f"/v1/host/{quote(text, safe='')}"


def short_id(content_id: str) -> str:
    """Enough digits of `job1_3f2a…` to find it again."""
    return content_id.partition("_")[2][:SHORT] or content_id[:SHORT]


def format_duration(seconds: float) -> str:
    """45s, 12m, 3h, 5d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def error_line(text: str) -> str:
    """The line of a traceback with the exception, which may have more lines below it; else the last line."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    return (raised or [line.strip() for line in lines] or [""])[-1]


def wrap_text(text: str, indent: str, hanging: str) -> str:
    """Wrap text to the width of the terminal: for reading, not for copying."""
    import shutil
    import textwrap

    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(
        printable(text), width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False
    )


def format_count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
