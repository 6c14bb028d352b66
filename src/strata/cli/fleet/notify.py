"""`strata notify`: add, list, remove, test subscriptions; names of events, reading of the URL."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.fleet.client import hub_client, hub_option, hub_view_options, print_rows
from strata.cli.groups import VerbGroup
from strata.cli.output import Format, print_error
from strata.cli.rows import Column

if TYPE_CHECKING:
    from strata.fleet.wire.owners import SubscriptionReply

EVENTS: Final = ("completed", "failed", "cancelled", "retried", "expired", "started", "host_lost")
_COLUMNS: Final = (Column("name"), Column("service"), Column("events"), Column("jobs"))


@click.group(cls=VerbGroup)
def notify() -> None:
    """Send yourself messages about jobs: Slack, ntfy, e-mail and others.

    The hub sends them through Apprise. Each message has the job, its host, the reason, the metrics and the last lines
    of the log.
    """


@notify.command()
@click.argument("name")
@click.option(
    "--events",
    multiple=True,
    metavar="EVENT,…",
    help=f"Which events, separated by commas; repeatable: {', '.join(EVENTS)} (default: completed,failed,expired).",
)
@click.option("--mine", is_flag=True, help="Only your own jobs (the default).")
@click.option("--project", metavar="PROJECT", default="", help="The jobs of PROJECT.")
@click.option("--all", "all_jobs", is_flag=True, help="All jobs.")
@hub_option
def add(*, name: str, events: tuple[str, ...], mine: bool, project: str, all_jobs: bool, context: str | None) -> None:
    """Subscribe under NAME, or change that subscription.

    The URL of the service is read from a prompt or from standard input, for it holds a token: ntfy://TOPIC,
    slack://TOKEN_A/TOKEN_B/TOKEN_C, discord://ID/TOKEN, mailto://USER:PASSWORD@HOST and all that Apprise knows. Where a
    URL can name any address, as of e-mail and Matrix, the subscription needs the role operator.
    """
    if mine + bool(project) + all_jobs > 1:
        raise StrataError(Code.INVALID, "--mine, --project and --all exclude each other")
    url = _read_url()
    with hub_client(context) as client:
        import msgspec

        from strata.fleet.wire.owners import SubscriptionReply, SubscriptionRequest

        wanted: dict[str, Any] = {"url": url, "project": project, "all_jobs": all_jobs}
        if events:
            wanted["events"] = _check_events(",".join(events))
        try:
            body = msgspec.convert(wanted, SubscriptionRequest)
        except msgspec.ValidationError as error:
            # The message quotes no value, and the URL must not be shown.
            raise StrataError(Code.INVALID, f"the subscription is not valid: {error}") from None
        added = client.call("PUT", _path(name), SubscriptionReply, body=body)
    print_error(f"strata: {name} gets {', '.join(added.events)} through {added.service}")


@notify.command("list")
@hub_view_options
def list_subscriptions(context: str | None, output: Format) -> None:
    """List your subscriptions, without their URLs."""
    with hub_client(context) as client:
        from strata.fleet.wire.owners import SubscriptionsReply

        listed = client.call("GET", "/v1/subscriptions", SubscriptionsReply).subscriptions
    print_rows(output, _COLUMNS, ((_row(each), {"events": ", ".join(each.events)}) for each in listed))


@notify.command("rm")
@click.argument("name")
@hub_option
def remove(name: str, context: str | None) -> None:
    """Remove the subscription NAME."""
    with hub_client(context) as client:
        client.call("DELETE", _path(name), type(None))
    print_error(f"strata: the subscription {name} is removed")


@notify.command()
@click.argument("name")
@hub_option
def test(name: str, context: str | None) -> None:
    """Send a message with the subscription NAME now."""
    with hub_client(context) as client:
        from strata.fleet.wire.owners import SubscriptionTestReply

        sent = client.call_once("POST", f"{_path(name)}/test", SubscriptionTestReply)
    print_error(f"strata: {sent.service} accepted a message")


def _row(each: SubscriptionReply) -> dict[str, Any]:
    jobs = "all" if each.all_jobs else f"project {each.project}" if each.project else "mine"
    return {"name": each.name, "service": each.service, "events": list(each.events), "jobs": jobs}


def _check_events(text: str) -> list[str]:
    events = [part.strip() for part in text.split(",") if part.strip()]
    for event in events:
        if event not in EVENTS:
            raise StrataError(Code.INVALID, f"{event!r} is not an event", hint=f"one of {', '.join(EVENTS)}")
    return events


def _path(name: str) -> str:
    from urllib.parse import quote

    return f"/v1/subscription/{quote(name, safe='')}"


def _read_url() -> str:
    if sys.stdin.isatty():
        return str(click.prompt("URL", hide_input=True, err=True))
    return sys.stdin.read().strip()
