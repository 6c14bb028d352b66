"""Routes of subscriptions: add, list, remove and send a test message. A URL goes in and never comes out."""

from __future__ import annotations

from strata.base.errors import Code, StrataError
from strata.fleet.http.context import HubCall, named_in_path
from strata.fleet.records import StoredSubscription
from strata.fleet.wire.owners import (
    SubscriptionName,
    SubscriptionReply,
    SubscriptionRequest,
    SubscriptionsReply,
    SubscriptionTestReply,
)


async def put(call: HubCall, body: SubscriptionRequest) -> SubscriptionReply:
    """Subscribe to events of jobs, or change a subscription. Operators with any service, others with public ones."""
    if body.project and body.all_jobs:
        raise StrataError(Code.INVALID, "a subscription covers the jobs of a project or all jobs, not both")
    added = await call.context.subscriptions.add(
        call.caller, _name(call), body.url, body.events, project=body.project, all_jobs=body.all_jobs
    )
    return _reply(added)


async def listed(call: HubCall) -> SubscriptionsReply:
    """The caller's own, without their URLs."""
    return SubscriptionsReply(subscriptions=tuple(map(_reply, await call.context.subscriptions.listed(call.actor))))


async def remove(call: HubCall) -> None:
    """End one."""
    await call.context.subscriptions.remove(call.actor, _name(call))


async def send_test(call: HubCall) -> SubscriptionTestReply:
    """Send a message with it now."""
    return SubscriptionTestReply(service=await call.context.subscriptions.send_test(call.actor, _name(call)))


def _reply(row: StoredSubscription) -> SubscriptionReply:
    subscription = row.subscription
    return SubscriptionReply(
        name=row.name,
        service=subscription.service,
        events=subscription.events,
        project=subscription.project,
        all_jobs=subscription.all_jobs,
    )


def _name(call: HubCall) -> str:
    rule = "the name of a subscription has up to 64 letters, digits, dots, hyphens and underscores"
    return named_in_path(call, SubscriptionName, rule)
