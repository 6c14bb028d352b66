"""`strata events`: filters, columns, pages of 500, and following."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.completion import complete_jobs
from strata.cli.fleet.client import find_job, hub_client, hub_option, print_rows, short_id
from strata.cli.output import Format, output_option
from strata.cli.rows import Column

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.wire.events import EventsQuery, EventsReply, FeedEvent

_EVENTS: Final = (
    Column("time"),
    Column("event", cut=17),
    Column("subject", cut=18, identifies=True),
    Column("by", cut=12),
    Column("address", cut=15),
    Column("detail", wide=True),
)
_PAGE: Final = 500
_WAIT_S: Final = 20.0


@click.command()
@click.option("--job", default="", metavar="JOB", shell_complete=complete_jobs, help="Show only events of this job.")
@click.option("--subject", default="", metavar="ID", help="Show only events of this host, key or other id.")
@click.option("--kind", multiple=True, metavar="KIND", help="Show only this kind, as in job.failed or 'host.*'.")
@click.option("--search", default="", metavar="TEXT", help="Show only events with TEXT in them.")
@click.option(
    "-n",
    "--last",
    default=1000,
    show_default=True,
    type=click.IntRange(1),
    help="Show the last events, at most so many.",
)
@click.option("-f", "--follow", "-w", "--watch", "follow", is_flag=True, help="Continue with new events as they come.")
@hub_option
@output_option
def events(  # noqa: PLR0913 (the options of the command)
    *,
    job: str,
    subject: str,
    kind: tuple[str, ...],
    search: str,
    last: int,
    follow: bool,
    context: str | None,
    output: Format,
) -> None:
    """Show who changed what in the fleet, and when.

    Without --job and --subject, --follow begins with what happens from now on. It prints a line of JSON for each event.
    """
    with hub_client(context) as client:
        from strata.fleet.wire.events import EventsQuery

        if job:
            subject = find_job(client, job).job.id
        wanted = EventsQuery(subject=subject, kind=kind, search=search)
        if follow:
            # A table needs the width of all rows.
            output = Format.JSONL
            found = _follow(client, wanted)
        else:
            found = _read_last(client, wanted, last)
        print_rows(output, _EVENTS, ((_row(*each), _shown(*each)) for each in found))


def _read_last(client: HubClient, wanted: EventsQuery, last: int) -> Iterator[tuple[FeedEvent, EventsReply]]:
    """The last events, oldest first, each with the reply that has the names of its key, host and job."""
    import msgspec

    from strata.fleet.wire.events import EventsReply

    found: list[tuple[FeedEvent, EventsReply]] = []
    before = "newest"
    while before and len(found) < last:
        query = msgspec.structs.replace(wanted, before=before, limit=min(_PAGE, last - len(found)))
        reply = client.call("GET", "/v1/events", EventsReply, query=query)
        found += ((event, reply) for event in reply.events)
        before = reply.cursor if reply.more else ""
    return reversed(found)


def _follow(client: HubClient, wanted: EventsQuery) -> Iterator[tuple[FeedEvent, EventsReply]]:
    import msgspec

    from strata.fleet.wire.events import EventsReply

    after = "" if wanted.subject else "newest"
    while True:
        query = msgspec.structs.replace(wanted, after=after, limit=_PAGE, wait_s=_WAIT_S)
        reply = client.call("GET", "/v1/events", EventsReply, query=query)
        yield from ((event, reply) for event in reply.events)
        after = reply.cursor


def _row(event: FeedEvent, reply: EventsReply) -> dict[str, Any]:
    kind, _, actor_id = event.actor.partition(":")
    actors = {"key": reply.keys, "host": reply.hosts}.get(kind, {})
    return {
        "at_s": event.at_s,
        "event": event.kind,
        "subject": event.subject,
        "name": reply.jobs.get(event.subject),
        "by": event.actor,
        "by_name": actors.get(actor_id),
        "address": event.address or None,
        "body": event.body,
        "cursor": event.cursor,
    }


def _shown(event: FeedEvent, reply: EventsReply) -> dict[str, Any]:
    import datetime
    import json

    at = datetime.datetime.fromtimestamp(event.at_s, datetime.UTC)
    subject = short_id(event.subject) if event.subject.startswith("job1_") else event.subject
    return {
        "time": at.strftime("%m-%d %H:%M:%S"),
        "subject": reply.jobs.get(event.subject, subject),
        "by": _row(event, reply)["by_name"] or event.actor,
        "detail": json.dumps(event.body),
    }
