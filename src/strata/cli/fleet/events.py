"""`strata events`: who changed what in the fleet, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.fleet.client import find_job, hub_client, hub_option, print_rows, short_id
from strata.cli.output import Column, Format, output_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.fleet import wire
    from strata.fleet.client import HubClient

_EVENTS: Final = (
    Column("time"),
    Column("event", cut=17),
    Column("subject", cut=14),
    Column("by", cut=12),
    Column("address", cut=15),
    Column("detail", wide=True),
)
_PAGE: Final = 500
_WAIT_S: Final = 20.0


@click.command()
@click.option("--job", default="", metavar="JOB", help="Show only events of this job.")
@click.option("--subject", default="", metavar="ID", help="Show only events of this host, key or other id.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new events as they come.")
@hub_option
@output_option
def events(job: str, subject: str, follow: bool, context: str | None, output: Format) -> None:  # noqa: FBT001 (click)
    """Show who changed what in the fleet, and when.

    Without --job and --subject, --follow begins with what happens from now on. It prints a line of JSON for each event.
    """
    with hub_client(context) as client:
        if job:
            subject = find_job(client, job).job.id
        after = "newest" if follow and not subject else ""
        if follow:
            # A table needs the width of all rows.
            output = Format.JSONL
        rows = ((_row(event), _shown(event)) for event in _read(client, after, subject, follow=follow))
        print_rows(output, _EVENTS, rows)


def _read(client: HubClient, after: str, subject: str, *, follow: bool) -> Iterator[wire.FeedEvent]:
    from strata.fleet import wire

    while True:
        query = wire.EventsQuery(after=after, subject=subject, limit=_PAGE, wait_s=_WAIT_S if follow else 0.0)
        reply = client.call("GET", "/v1/events", wire.EventsReply, query=query)
        yield from reply.events
        if not reply.events and not follow:
            return
        after = reply.cursor


def _row(event: wire.FeedEvent) -> dict[str, Any]:
    return {
        "at_s": event.at_s,
        "event": event.kind,
        "subject": event.subject,
        "by": event.actor,
        "address": event.address or None,
        "body": event.body,
        "cursor": event.cursor,
    }


def _shown(event: wire.FeedEvent) -> dict[str, Any]:
    import datetime
    import json

    at = datetime.datetime.fromtimestamp(event.at_s, datetime.UTC)
    subject = short_id(event.subject) if event.subject.startswith("job1_") else event.subject
    return {"time": at.strftime("%m-%d %H:%M:%S"), "subject": subject, "detail": json.dumps(event.body)}
