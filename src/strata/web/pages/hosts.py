"""Pages of hosts: tiles (96) or table (50), one with cards, plots, spans, jobs, policy, and confirmed actions."""

from __future__ import annotations

from typing import Annotated, Final, Literal
from urllib.parse import quote

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.core.amounts import Taken
from strata.fleet.core.host_status import HostAction
from strata.fleet.records import HostJob
from strata.fleet.wire.events import EventsReply
from strata.fleet.wire.hosts import (
    Host,
    HostAmounts,
    HostPageReply,
    HostPlanReply,
    HostPolicyReply,
    HostRoom,
    HostStateRequest,
)
from strata.http.route import KIB, OPERATOR, VIEWER, Route
from strata.identity.roles import Role
from strata.web.page import Form, Page, View

Word = Annotated[str, msgspec.Meta(max_length=256)]
TILES: Final = 96
ROWS: Final = 50
EVENTS: Final = 8
SPANS: Final = {"1 h": 3600, "24 h": 86_400, "7 d": 604_800, "90 d": 7_776_000}
ACTIONS: Final[dict[HostAction, str]] = {
    "drain": "Drain",
    "pause": "Pause",
    "resume": "Resume",
    "revoke": "Revoke",
}
STATUSES: Final = ("online", "quiet", "suspect", "offline", "quarantined", "draining", "paused", "left")


class HostsPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    q: Word = ""
    status: Word = ""
    sort: Literal["name", "load", "seen"] = "name"
    view: Literal["tiles", "table"] = "tiles"
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    project: str = ""


class HostPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    span: Annotated[int, msgspec.Meta(ge=60, le=7_776_000)] = 3600
    project: str = ""


class HostConfirmQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    action: HostAction


async def show_hosts(page: Page, query: HostsPageQuery) -> View:
    """All hosts: name, state, load, cards, jobs and the age of the last heartbeat."""
    limit = TILES if query.view == "tiles" else ROWS
    reply = await page.get(
        "/v1/hosts",
        HostPageReply,
        search=query.q,
        status=query.status if query.status in STATUSES else None,
        sort=query.sort,
        offset=query.offset,
        limit=limit,
    )
    counts = [(status, reply.by_status[status]) for status in STATUSES if reply.by_status.get(status)]
    return page.render(
        "hosts.html",
        title="Hosts",
        topics=["hosts", "jobs"],
        every_s=5.0,
        section="/hosts",
        query=query,
        reply=reply,
        counts=counts,
        known=sum(reply.by_status.values()),
        limit=limit,
    )


async def show_host(page: Page, query: HostPageQuery) -> View:
    """One host."""
    path = f"/v1/host/{page.path['id']}"
    host = await page.get(path, Host)
    room = await page.get(f"{path}/room", HostRoom)
    policy = await page.get(f"{path}/policy", HostPolicyReply)
    events = await page.get("/v1/events", EventsReply, subject=host.id, before="newest", limit=EVENTS)
    cards, has = _cards(host, room), host.capability
    span = query.span if query.span in SPANS.values() else 3600
    return page.render(
        "host.html",
        title=host.name,
        topics=[f"host:{host.id}", "jobs"],
        every_s=15.0,
        section="/hosts",
        host=host,
        room=room,
        policy=policy,
        cards=cards,
        events=events.events,
        host_names=events.hosts,
        span=span,
        spans=SPANS,
        actions=_possible(host) if page.may(Role.OPERATOR) else (),
        words=ACTIONS,
        labels=has.labels | dict(host.labels),
        card_names=lambda value: ",".join(f"{card.id}/{value}" for card in cards),
        card_labels="\n".join(f"{number} {card.name}" for number, card in enumerate(cards)),
        takes=format_taken,
        amounts=format_amounts,
        samples=f"/v1/host/{host.id}/samples?span_s={span}&points=300",
    )


class CardView(msgspec.Struct, frozen=True):
    id: str
    name: str
    vram_gib: float
    use: float | None
    vram_used_gib: float | None
    temperature_c: float | None
    power_w: float | None
    jobs: tuple[HostJob, ...]


def _cards(host: Host, room: HostRoom) -> list[CardView]:
    cards = []
    for number, gpu in enumerate(host.capability.gpus):
        card, sample = gpu.uuid or str(number), host.sample
        cards.append(
            CardView(
                card,
                gpu.name,
                gpu.vram_bytes / 2**30,
                sample.get(f"{card}/use"),
                sample.get(f"{card}/vram_used_gib"),
                sample.get(f"{card}/temperature_c"),
                sample.get(f"{card}/power_w"),
                tuple(job for job in room.jobs if job.taken.whole or card in job.taken.cards),
            )
        )
    return cards


def format_taken(taken: Taken) -> str:
    """Returns what a job has of its host, in words."""
    if taken.whole:
        return "the whole host"
    cards = f"{taken.gpus:g} {'card' if taken.gpus == 1 else 'cards'}" if taken.cards else ""
    parts = [cards, f"{taken.cores} cores" if taken.cores else "", f"{taken.ram_gib:g} GiB" if taken.ram_gib else ""]
    return ", ".join(filter(None, parts)) or f"{taken.slots} {'slot' if taken.slots == 1 else 'slots'}"


def format_amounts(amounts: HostAmounts) -> str:
    cards = f"{len(amounts.cards)} {'card' if len(amounts.cards) == 1 else 'cards'}"
    slots = "" if amounts.slots is None else f"{amounts.slots} {'slot' if amounts.slots == 1 else 'slots'}"
    return ", ".join(filter(None, [slots, f"{amounts.cores} cores", f"{amounts.ram_gib:g} GiB of memory", cards]))


def _possible(host: Host) -> tuple[HostAction, ...]:
    """The actions that make sense in its state."""
    if host.state == "left":
        return ()
    if host.state == "active":
        return ("drain", "pause", "revoke")
    return ("resume", "revoke")


async def confirm(page: Page, query: HostConfirmQuery) -> View:
    """Returns what an action on a host would do, and the button that does it."""
    path = f"/v1/host/{page.path['id']}"
    host = await page.get(path, Host)
    plan = await page.get(f"{path}/plan", HostPlanReply, action=query.action)
    word = ACTIONS[query.action]
    return page.render(
        "host_confirm.html", title=f"{word} {host.name}", section="/hosts", host=host, plan=plan, word=word
    )


async def act(page: Page, form: Form) -> str:
    """Drain, pause, resume or revoke a host."""
    action = form.get("action", "")
    if action not in ACTIONS:
        raise StrataError(Code.INVALID, "this is no action on a host")
    path = f"/v1/host/{page.path['id']}"
    await page.post(f"{path}/{action}", HostStateRequest(reason=form.get("reason", "")[:1000]))
    return f"/hosts/{quote(page.path['id'], safe='')}"


ROUTES = (
    Route("GET", "/hosts", VIEWER, show_hosts),
    Route("GET", "/hosts/{id}", VIEWER, show_host),
    Route("GET", "/hosts/{id}/confirm", OPERATOR, confirm),
    Route("POST", "/hosts/{id}", OPERATOR, act, 8 * KIB),
)
