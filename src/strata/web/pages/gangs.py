"""Gangs: which there are; of one who holds it up, what its workers do, how its data goes, what incidents cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.wire.gangs import (
    GangBarrier,
    GangCount,
    GangEpoch,
    GangEventsReply,
    GangGoodput,
    GangReply,
    GangSpan,
    GangsReply,
    GangWorker,
)
from strata.http.route import VIEWER, Route
from strata.web.page import Page, View
from strata.web.render import duration

LIMIT: Final = 50
WIDTH: Final = 1000.0
EVERY_S: Final = 5.0
NAMED: Final = 3
WORDS: Final = {"initializing": "initialising", "loading_data": "loading"}
"""The states of a worker as people say them, where that differs from the contract."""
STATES: Final = ("initialising", "idle", "loading", "training", "checkpointing", "recovering", "error")
PARTS: Final = ("useful", "checkpoint", "detect", "restart", "rolled_back", "waiting")
Word = Annotated[str, msgspec.Meta(max_length=256)]


class GangPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    q: Word = ""
    offset: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    before: Annotated[int, msgspec.Meta(ge=0)] = 0
    project: Word = ""


@dataclass(frozen=True)
class Bar:
    """A stretch of a line that is `WIDTH` long."""

    name: str
    x: float
    width: float
    words: str


@dataclass(frozen=True)
class WorkerLane:
    worker: GangWorker
    state: str
    bars: Sequence[Bar]


async def gangs(page: Page) -> View:
    """The jobs of the coordinator."""
    try:
        reply = await page.get("/v1/gangs", GangsReply)
    except StrataError as error:
        if error.code is not Code.UNAVAILABLE:
            raise
        # That of `strata up` starts with the first gang.
        reply = GangsReply(gangs=(), coordinator="")
        away = True
    else:
        away = False
    return page.render(
        "gangs.html",
        title="Gangs",
        section="/gangs",
        every_s=EVERY_S,
        gangs=sorted(reply.gangs, key=lambda each: (each.status != "running", each.id)),
        coordinator=reply.coordinator,
        away=away,
    )


async def gang(page: Page, query: GangPageQuery) -> View:
    """One gang. A large one shows its workers by page, those first that hold it up."""
    path = f"/v1/gang/{page.path['id']}"
    found = await page.get(path, GangReply, search=query.q, offset=query.offset, limit=LIMIT)
    events = await page.get(f"{path}/events", GangEventsReply, before=query.before, limit=20)
    span = _span(found)
    lanes = [WorkerLane(each, WORDS.get(each.status, each.status), _bars(each.lane, span)) for each in found.workers]
    return page.render(
        "gang.html",
        title=found.gang.id,
        section="/gangs",
        every_s=EVERY_S,
        gang=found.gang,
        found=found,
        query=query,
        headline=headline(found),
        barriers=[barrier_words(each, found.workers) for each in found.barriers],
        counts=_counts(found.counts),
        lanes=lanes,
        span=span,
        axis_marks=_marks(found, span),
        states=STATES,
        datasets=[(dataset, epoch, _epoch_bars(epoch)) for dataset in found.datasets for epoch in dataset.epochs],
        goodput=None if found.goodput is None else _goodput_bars(found.goodput),
        events=events.events,
        next_before=events.next_before,
        limit=LIMIT,
    )


def headline(found: GangReply) -> str:
    """Who holds the gang up, in a sentence; empty: nobody."""
    suspects = [each for each in found.workers if each.liveness == "suspect"]
    # Before the barriers: ranks that step together are at one most of the time, and wait there for the slow one.
    stragglers = [each for each in found.workers if each.finding]
    if stragglers:
        more = f" (and {len(stragglers) - 1} more)" if len(stragglers) > 1 else ""
        return f"{stragglers[0].finding_reason}{more}"
    if found.barriers:
        return barrier_words(max(found.barriers, key=lambda each: each.open_s), found.workers)
    if suspects:
        more = f" and {len(suspects) - 1} more" if len(suspects) > 1 else ""
        return f"{suspects[0].id}{more} may be gone: {suspects[0].reason}"
    slow = [each for each in found.workers if each.slowdown is not None and each.slowdown >= 1.5]
    if slow:
        return f"{slow[0].id} takes {slow[0].slowdown:.1f}\N{MULTIPLICATION SIGN} as long for a step as the others"
    return ""


def barrier_words(barrier: GangBarrier, workers: Sequence[GangWorker]) -> str:
    """How many arrived, who is missing since when, and of a single one when it was last seen and how slow it is."""
    arrived = f"Barrier {barrier.id}: {barrier.arrived} of {barrier.expected} arrived"
    left = barrier.expected - barrier.arrived
    if not barrier.missing or left <= 0:
        return arrived
    names = ", ".join(barrier.missing[:NAMED])
    more = f" and {left - NAMED} more" if left > NAMED else ""
    words = f"{arrived}, waiting for {names}{more} since {duration(barrier.open_s)}"
    known = {each.id: each for each in workers}
    worker = known.get(barrier.missing[0]) if left == 1 else None
    if worker is None:
        return words
    slower = worker.slowdown is not None and worker.slowdown >= 1.1
    pace = f", {worker.slowdown:.1f}\N{MULTIPLICATION SIGN} slower" if slower else ""
    return f"{words} (last seen {duration(worker.silent_s)} ago{pace})"


def _counts(counts: Sequence[GangCount]) -> list[tuple[str, int]]:
    """By state; a worker that may be gone counts as suspect, whatever it said last."""
    found: dict[str, int] = {}
    for each in counts:
        word = "suspect" if each.liveness == "suspect" else WORDS.get(each.status, each.status)
        found[word] = found.get(word, 0) + each.count
    return sorted(found.items(), key=lambda item: -item[1])


def _span(found: GangReply) -> tuple[float, float]:
    start_s = found.lanes_start_s if found.lanes_start_s is not None else found.observed_at_s
    return start_s, max(found.observed_at_s, start_s + 1.0)


def _x(at_s: float, span: tuple[float, float]) -> float:
    start_s, end_s = span
    return min(WIDTH, max(0.0, (at_s - start_s) / (end_s - start_s) * WIDTH))


def _bars(lane: Sequence[GangSpan], span: tuple[float, float]) -> list[Bar]:
    bars = []
    for number, each in enumerate(lane):
        end_s = span[1] if number == len(lane) - 1 and each.end_s >= span[1] - 10.0 else each.end_s
        x = _x(each.start_s, span)
        word = WORDS.get(each.status, each.status)
        bars.append(Bar(word, x, _x(end_s, span) - x, f"{word} for {duration(end_s - each.start_s)}"))
    return bars


def _marks(found: GangReply, span: tuple[float, float]) -> list[Bar]:
    """Checkpoints and incidents on the axis of the lanes."""
    marks = [
        Bar("checkpoint", _x(each.at_s, span), 0.0, f"checkpoint of step {each.step}")
        for each in found.checkpoints
        if each.at_s is not None and each.at_s >= span[0]
    ]
    marks += [
        Bar("incident", _x(each.at_s, span), 0.0, f"{each.kind.replace('_', ' ')}: {each.message}")
        for each in found.incidents
        if each.at_s >= span[0]
    ]
    return marks


def _stack(parts: Sequence[tuple[str, float, str]]) -> list[Bar]:
    """Parts side by side, each with its share of the line."""
    total = sum(value for _, value, _ in parts)
    bars, x = [], 0.0
    for name, value, words in parts:
        width = value / total * WIDTH if total else 0.0
        if width:
            bars.append(Bar(name, x, width, words))
        x += width
    return bars


def _epoch_bars(epoch: GangEpoch) -> list[Bar]:
    counts = (("done", epoch.done), ("leased", epoch.leased), ("waiting", epoch.waiting), ("aside", epoch.quarantined))
    return _stack([(name, count, f"{count} {name}") for name, count in counts])


def _goodput_bars(found: GangGoodput) -> list[Bar]:
    spent = [(part, float(getattr(found, f"{part}_s"))) for part in PARTS]
    return _stack([(part, each_s, f"{part.replace('_', ' ')} {duration(each_s)}") for part, each_s in spent])


ROUTES = (Route("GET", "/gangs", VIEWER, gangs), Route("GET", "/gangs/{id}", VIEWER, gang))
