"""Pages of gangs: list, and one with its headline, lanes of workers, data, incidents; refreshed every 5 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.coord.view import (
    BarrierView,
    EpochView,
    GangEventsView,
    GangsView,
    GangView,
    LaneSpanView,
    WorkerCountView,
    WorkerView,
)
from strata.http.route import VIEWER, Route
from strata.web.bars import WIDTH, Bar, goodput_bars, stack_bars
from strata.web.page import Page, View
from strata.web.render import duration

LIMIT: Final = 50
EVERY_S: Final = 5.0
NAMED: Final = 3
WORDS: Final = {"INITIALIZING": "initialising", "LOADING_DATA": "loading"}
"""The states of a worker as people say them, where that differs from the contract."""
STATES: Final = ("initialising", "idle", "loading", "training", "checkpointing", "recovering", "error")
SHARDS: Final = ("done", "leased", "waiting", "aside")
PARTS: Final = ("useful", "checkpoint", "detect", "restart", "rolled_back", "waiting")
Word = Annotated[str, msgspec.Meta(max_length=256)]


class GangPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    q: Word = ""
    offset: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    before: Annotated[int, msgspec.Meta(ge=0)] = 0
    project: Word = ""


@dataclass(frozen=True)
class WorkerLane:
    worker: WorkerView
    state: str
    bars: Sequence[Bar]


async def gangs(page: Page) -> View:
    """The jobs of the coordinator."""
    try:
        reply = await page.get("/v1/gangs", GangsView)
    except StrataError as error:
        if error.code is not Code.UNAVAILABLE:
            raise
        # That of `strata up` starts with the first gang.
        reply = GangsView(gangs=(), coordinator="")
        away = True
    else:
        away = False
    return page.render(
        "gangs.html",
        title="Gangs",
        section="/gangs",
        every_s=EVERY_S,
        gangs=sorted(reply.gangs, key=lambda each: (each.status != "RUNNING", each.job_id)),
        coordinator=reply.coordinator,
        away=away,
    )


async def gang(page: Page, query: GangPageQuery) -> View:
    """One gang. A large one shows its workers by page, those first that hold it up."""
    path = f"/v1/gang/{page.path['id']}"
    found = await page.get(path, GangView, search=query.q, offset=query.offset, limit=LIMIT)
    events = await page.get(f"{path}/events", GangEventsView, before=query.before, limit=20)
    span, spent = _span(found), found.goodput
    spans = {each.worker_id: each.spans for each in found.lanes}
    workers = found.job.workers
    lanes = [WorkerLane(each, _state(each.status), _bars(spans.get(each.worker_id, ()), span)) for each in workers]
    return page.render(
        "gang.html",
        title=found.job.job_id,
        section="/gangs",
        every_s=EVERY_S,
        gang=found.job,
        found=found,
        query=query,
        checkpoint_step=next((each.manifest.step for each in found.job.checkpoints if each.committed), None),
        headline=headline(found),
        barriers=[barrier_words(each, workers) for each in found.job.barriers],
        members=sum(each.count for each in found.worker_counts),
        counts=_counts(found.worker_counts),
        lanes=lanes,
        span=span,
        axis_marks=_marks(found, span),
        states=STATES,
        shards=SHARDS,
        words_of=words_of,
        datasets=[
            (dataset, epoch, _epoch_bars(epoch)) for dataset in found.job.datasets for epoch in dataset.open_epochs
        ],
        goodput=None
        if spent is None
        else goodput_bars([(part, getattr(spent, f"{part}_ms") / 1000) for part in PARTS]),
        events=events.events,
        next_before=events.next_before,
        limit=LIMIT,
    )


def words_of(kind: str | None) -> str:
    """The kind of an event as people say it."""
    return (kind or "UNKNOWN").lower().replace("_", " ")


def headline(found: GangView) -> str:
    """Returns who holds the gang up, in a sentence; empty: nobody."""
    workers, barriers = found.job.workers, found.job.barriers
    suspects = [each for each in workers if each.liveness == "SUSPECT"]
    # Before the barriers: ranks that step together are at one most of the time, and wait there for the slow one.
    stragglers = [each for each in workers if each.finding]
    if stragglers:
        more = f" (and {len(stragglers) - 1} more)" if len(stragglers) > 1 else ""
        return f"{stragglers[0].finding_reason}{more}"
    if barriers:
        return barrier_words(max(barriers, key=lambda each: each.open_ms), workers)
    if suspects:
        more = f" and {len(suspects) - 1} more" if len(suspects) > 1 else ""
        return f"{suspects[0].worker_id}{more} may be gone: {suspects[0].liveness_reason}"
    slow = [each for each in workers if each.slowdown is not None and each.slowdown >= 1.5]
    if slow:
        return (
            f"{slow[0].worker_id} takes {slow[0].slowdown:.1f}\N{MULTIPLICATION SIGN} as long for a step as the others"
        )
    return ""


def barrier_words(barrier: BarrierView, workers: Sequence[WorkerView]) -> str:
    """Returns how many arrived, who is missing since when, and of a single one when it was last seen and how slow it
    is."""
    arrived = f"Barrier {barrier.barrier_id}: {barrier.arrived} of {barrier.expected} arrived"
    left = barrier.expected - barrier.arrived
    if not barrier.missing or left <= 0:
        return arrived
    names = ", ".join(barrier.missing[:NAMED])
    more = f" and {left - NAMED} more" if left > NAMED else ""
    words = f"{arrived}, waiting for {names}{more} since {duration(barrier.open_ms / 1000)}"
    known = {each.worker_id: each for each in workers}
    worker = known.get(barrier.missing[0]) if left == 1 else None
    if worker is None:
        return words
    slower = worker.slowdown is not None and worker.slowdown >= 1.1
    pace = f", {worker.slowdown:.1f}\N{MULTIPLICATION SIGN} slower" if slower else ""
    return f"{words} (last seen {duration(worker.silent_ms / 1000)} ago{pace})"


def _counts(counts: Sequence[WorkerCountView]) -> list[tuple[str, int]]:
    """Counts by state; a worker that may be gone counts as suspect, whatever it said last."""
    found: dict[str, int] = {}
    for each in counts:
        word = "suspect" if each.liveness == "SUSPECT" else _state(each.status)
        found[word] = found.get(word, 0) + each.count
    return sorted(found.items(), key=lambda item: -item[1])


def _state(status: str | None) -> str:
    return "unknown" if status is None else WORDS.get(status, status.lower())


def _span(found: GangView) -> tuple[float, float]:
    end_s = found.job.observed_at_unix_ms / 1000
    start_s = end_s if found.lanes_start_unix_ms is None else found.lanes_start_unix_ms / 1000
    return start_s, max(end_s, start_s + 1.0)


def _x(at_s: float, span: tuple[float, float]) -> float:
    start_s, end_s = span
    return min(WIDTH, max(0.0, (at_s - start_s) / (end_s - start_s) * WIDTH))


def _bars(lane: Sequence[LaneSpanView], span: tuple[float, float]) -> list[Bar]:
    bars = []
    for number, each in enumerate(lane):
        start_s, end_s = each.start_unix_ms / 1000, each.end_unix_ms / 1000
        if number == len(lane) - 1 and end_s >= span[1] - 10.0:
            end_s = span[1]
        x, word = _x(start_s, span), _state(each.status)
        bars.append(Bar(word, x, _x(end_s, span) - x, f"{word} for {duration(end_s - start_s)}"))
    return bars


def _marks(found: GangView, span: tuple[float, float]) -> list[Bar]:
    """Checkpoints and incidents on the axis of the lanes."""
    marks = [
        Bar("checkpoint", _x(each.committed_at_unix_ms / 1000, span), 0.0, f"checkpoint of step {each.step}")
        for each in (checkpoint.manifest for checkpoint in found.job.checkpoints)
        if each.committed_at_unix_ms / 1000 >= span[0]
    ]
    marks += [
        Bar("incident", _x(each.at_unix_ms / 1000, span), 0.0, f"{words_of(each.kind)}: {each.message}")
        for each in found.incidents
        if each.at_unix_ms / 1000 >= span[0]
    ]
    return marks


def _epoch_bars(epoch: EpochView) -> list[Bar]:
    counts = (epoch.done_shards, epoch.leased_shards, epoch.waiting_shards, epoch.quarantined_shards)
    return stack_bars([(name, count, f"{count} {name}") for name, count in zip(SHARDS, counts, strict=True)])


ROUTES = (Route("GET", "/gangs", VIEWER, gangs), Route("GET", "/gangs/{id}", VIEWER, gang))
