"""Page of a job: why, attempts, plots (24), log tail (64 KiB), parameters against another job, events (50), actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

import msgspec

from strata.database import event_kinds
from strata.fleet.core.job import HELD, TERMINAL, JobStatus
from strata.fleet.core.why import Why
from strata.fleet.records import JobAttempt
from strata.fleet.wire.artifacts import ArtifactsReply
from strata.fleet.wire.events import EventsReply
from strata.fleet.wire.history import GoodputReply, JobTimelineReply
from strata.fleet.wire.jobs import CancelRequest, Job, JobReply
from strata.fleet.wire.streams import MetricsReply
from strata.http.route import KIB, MIB, RESEARCHER, VIEWER, RawReply, Route
from strata.web.bars import WIDTH, Bar, goodput_bars
from strata.web.page import Form, Page, View
from strata.web.render import MISSING, duration

LOG_TAIL: Final = 64 * KIB
EVENTS: Final = 50
MAX_PLOTS: Final = 24
POINTS: Final = 500
Id = Annotated[str, msgspec.Meta(max_length=80)]


class JobPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """The attempt whose log is shown; 0: the last one."""
    against: Id = ""
    """Another job, whose parameters and metrics are compared."""


class DownloadQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0


@dataclass(frozen=True)
class AttemptLane:
    """An attempt on the time axis of its job, with the wait before it."""

    attempt: JobAttempt | None
    """None: it waits for one."""
    state: str
    bars: Sequence[Bar]
    marks: Sequence[Bar]
    resumed: bool = False
    """An attempt before it saved a checkpoint."""


@dataclass(frozen=True)
class MetricPlot:
    name: str
    src: str
    labels: str = ""


@dataclass(frozen=True)
class ParameterRow:
    name: str
    value: str
    other: str | None = None

    @property
    def differs(self) -> bool:
        return self.other is not None and self.value != self.other


@dataclass(frozen=True)
class LogTail:
    text: str
    next: int
    cut: bool
    """It does not begin at the beginning."""


async def job(page: Page, query: JobPageQuery) -> View:
    """One job, and everything about it."""
    shown = (await page.get(f"/v1/job/{page.path['id']}", JobReply)).job
    other = (await page.find(f"/v1/job/{quote(query.against)}", JobReply)) if query.against else None
    compared = other.job if other else None
    below = f"/v1/job/{shown.id}"
    timeline, goodput, metrics, artifacts, events = await asyncio.gather(
        page.get(f"{below}/timeline", JobTimelineReply),
        page.get(f"{below}/goodput", GoodputReply),
        page.get(f"{below}/metrics", MetricsReply, points=1),
        page.get("/v1/artifacts", ArtifactsReply, job_id=shown.id, limit=50),
        page.get("/v1/events", EventsReply, subject=shown.id, before="newest", limit=EVENTS),
    )
    attempts, lanes = timeline.attempts, attempt_lanes(timeline)
    attempt = query.attempt or (attempts[-1].attempt if attempts else 0)
    return page.render(
        "job.html",
        title=shown.spec.label,
        section="/jobs",
        topics=[f"job:{shown.id}"],
        every_s=10 if shown.status in HELD else 0,
        job=shown,
        attempts=attempts,
        host_names={**timeline.hosts, **events.hosts},
        lanes=lanes,
        phases={bar.name for lane in lanes for bar in (*lane.bars, *lane.marks)},
        goodput=goodput,
        ledger=goodput_bars(goodput.seconds.items()),
        progress_of=metrics.progress,
        plots=metric_plots(shown, metrics.names, compared),
        why=await page.get(f"{below}/why", Why) if shown.status is JobStatus.PENDING else None,
        attempt=attempt,
        log=await _log_tail(page, shown.id, attempt) if attempt else None,
        parameters=compare(shown, compared),
        other=compared,
        against=query.against,
        artifacts=artifacts.artifacts,
        events=events.events,
        may_change=page.may_change(shown.owner),
        ended=shown.status in TERMINAL,
    )


def attempt_lanes(timeline: JobTimelineReply) -> list[AttemptLane]:
    """One lane for each attempt, all on the time axis of the job; what comes before an attempt is in its lane."""
    scale = WIDTH / max(1e-3, timeline.to_s - timeline.from_s)
    numbers = [each.attempt for each in timeline.attempts]
    bars: dict[int, list[Bar]] = {}
    waiting: list[Bar] = []
    for each in timeline.segments:
        words = f"{each.phase} {duration(each.to_s - each.from_s)}"
        bar = Bar(each.phase, (each.from_s - timeline.from_s) * scale, (each.to_s - each.from_s) * scale, words)
        waiting.append(bar)
        if each.attempt in numbers:
            bars.setdefault(each.attempt, []).extend(waiting)
            waiting = []
    lanes = [
        AttemptLane(
            attempt,
            "running" if attempt.ended_at_s is None else attempt.outcome or "lost",
            bars.get(attempt.attempt, []),
            [
                Bar(
                    "good" if mark.kind in (event_kinds.JOB_COMPLETED, event_kinds.JOB_CHECKPOINTED) else "bad",
                    (mark.at_s - timeline.from_s) * scale,
                    0.0,
                    mark.kind.removeprefix("job."),
                )
                for mark in timeline.marks
                if mark.attempt == attempt.attempt
            ],
            any(before.checkpoint for before in timeline.attempts[:place]),
        )
        for place, attempt in enumerate(timeline.attempts)
    ]
    return [*lanes, AttemptLane(None, "pending", waiting, [])] if waiting else lanes


def metric_plots(shown: Job, names: Sequence[str], other: Job | None) -> list[MetricPlot]:
    plots = []
    for name in names[:MAX_PLOTS]:
        sources = [
            f"/v1/job/{each.id}/metrics?{urlencode({'points': POINTS, 'names': name})}"
            for each in (shown, other)
            if each is not None
        ]
        labels = "" if other is None else f"{shown.spec.label}\n{other.spec.label}"
        plots.append(MetricPlot(name, " ".join(sources), labels))
    return plots


def compare(shown: Job, other: Job | None) -> list[ParameterRow]:
    """Returns what the job is made of, beside that of another one."""
    mine = _parameters(shown)
    theirs = _parameters(other) if other else {}
    names = dict.fromkeys([*mine, *theirs])
    return [ParameterRow(name, mine.get(name, MISSING), theirs.get(name, MISSING) if other else None) for name in names]


def _parameters(shown: Job) -> Mapping[str, str]:
    spec = shown.spec
    fixed = {
        "model": spec.model,
        "mode": spec.mode,
        "seed": str(spec.seed),
        "trainer": spec.trainer,
        "priority": str(spec.priority),
    }
    return {**fixed, **{f"hyper.{name}": _text(value) for name, value in _flat(spec.hyper)}}


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else [(prefix + name, value)]
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def _log_tail(page: Page, job_id: str, attempt: int) -> LogTail:
    reply = await page.get(f"/v1/job/{job_id}/log", RawReply, attempt=attempt, tail=LOG_TAIL, limit=2 * LOG_TAIL)
    assert isinstance(reply.content, bytes)
    begins = int(reply.headers["X-Strata-Offset"])
    content = reply.content
    if begins:
        # From the next whole line on.
        content = content[content.find(b"\n") + 1 :]
    return LogTail(content.decode("utf-8", "replace"), int(reply.headers["X-Strata-Next"]), begins > 0)


async def download_log(page: Page, query: DownloadQuery) -> RawReply:
    """The whole log of an attempt, as a file."""
    job_id = (await page.get(f"/v1/job/{page.path['id']}", JobReply)).job.id
    first = await page.get(f"/v1/job/{job_id}/log", RawReply, attempt=query.attempt, limit=MIB)
    name = f"{job_id.rpartition('_')[2][:12]}-{first.headers['X-Strata-Attempt']}.log"

    async def pieces() -> AsyncIterator[bytes]:
        reply = first
        while reply.content:
            assert isinstance(reply.content, bytes)
            yield reply.content
            reply = await page.get(
                f"/v1/job/{job_id}/log",
                RawReply,
                attempt=first.headers["X-Strata-Attempt"],
                offset=reply.headers["X-Strata-Next"],
                limit=MIB,
            )

    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return RawReply(pieces(), media_type="text/plain; charset=utf-8", headers=headers)


async def cancel(page: Page, form: Form) -> str:
    """End the job."""
    await page.post(f"/v1/job/{page.path['id']}/cancel", CancelRequest(reason=form.get("reason", "")[:1000]))
    return _path(page)


async def requeue(page: Page, form: Form) -> str:
    """Let the job run again."""
    del form
    await page.post(f"/v1/job/{page.path['id']}/requeue")
    return _path(page)


async def archive(page: Page, form: Form) -> str:
    """Leave the job out of lists."""
    del form
    await page.post(f"/v1/job/{page.path['id']}/archive")
    return _path(page)


def _path(page: Page) -> str:
    return f"/jobs/{quote(page.path['id'])}"


ROUTES = (
    Route("GET", "/jobs/{id}", VIEWER, job),
    Route("GET", "/jobs/{id}/log.txt", VIEWER, download_log),
    Route("POST", "/jobs/{id}/cancel", RESEARCHER, cancel, owner="job"),
    Route("POST", "/jobs/{id}/requeue", RESEARCHER, requeue, owner="job"),
    Route("POST", "/jobs/{id}/archive", RESEARCHER, archive, owner="job"),
)
