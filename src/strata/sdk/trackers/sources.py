"""Reads points for trackers from jobs of a hub or models of a training server, at most 1,000 at a time; names and
groups of runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import HELD, TERMINAL
from strata.fleet.core.report import MetricsReport, parse_lines
from strata.fleet.wire.base import MAX_PAGE
from strata.fleet.wire.jobs import Job, JobReply, JobsQuery, JobsReply
from strata.fleet.wire.streams import StreamQuery
from strata.sdk.trackers.port import TrackedPoint, TrackedRun

MAX_POINTS: Final = 1000
"""The most points of a model in one request."""


class SourceCursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a run was read."""

    attempt: int = 1
    offset: int = 0
    """The offset in bytes of the attempt's stream; of a model, the sequence number of its last operation."""
    number: int = 0
    """The number of the next point."""
    step: int = -1
    """The step of the last point; of a model, steps of its optimizer until now."""
    ended: bool = False
    """Nothing follows, unless the job is queued again."""


class PointBatch(msgspec.Struct, frozen=True):
    points: list[TrackedPoint]
    cursor: SourceCursor


class MetricSource(Protocol):
    def runs(self, *, everything: bool) -> Iterator[tuple[TrackedRun, int]]:
        """Those that run, or all that there are; each with the number of its last attempt, 0 if it has none."""

    def read(self, run_id: str, cursor: SourceCursor) -> PointBatch:
        """Returns what follows the cursor. The batch is empty, and its cursor the same, if there is nothing new."""


class HubJobs:
    """The metrics that the trainers of jobs report, of all attempts."""

    def __init__(self, client: HubClient, query: JobsQuery) -> None:
        self._client = client
        self._query = msgspec.structs.replace(query, limit=MAX_PAGE)

    def runs(self, *, everything: bool) -> Iterator[tuple[TrackedRun, int]]:
        query = self._query if everything else msgspec.structs.replace(self._query, status=tuple(HELD))
        while True:
            reply = self._client.call("GET", "/v1/jobs", JobsReply, query=query)
            for job in reply.jobs:
                yield _tracked_job(job), job.attempt
            if not reply.next:
                return
            query = msgspec.structs.replace(query, after=reply.next)

    def read(self, run_id: str, cursor: SourceCursor) -> PointBatch:
        content, ended = self._piece(run_id, cursor.attempt, cursor.offset)
        whole = content[: content.rfind(b"\n") + 1]
        if content and not whole:
            # A trainer that was killed in a line leaves a part of it.
            rest, ended = self._piece(run_id, cursor.attempt, cursor.offset + len(content))
            if rest:
                whole = content
        if not whole:
            return PointBatch([], self._next_attempt(run_id, cursor) if ended else cursor)
        points: list[TrackedPoint] = []
        begins = cursor.offset == 0 and cursor.number > 0
        number, step = cursor.number, cursor.step
        for report in parse_lines(whole.splitlines())[0]:
            if isinstance(report, MetricsReport):
                step = number if report.step is None else report.step
                values = {name: float(value) for name, value in report.values.items()}
                points.append(TrackedPoint(number, step, report.at_s, values, resumed=begins))
                number, begins = number + 1, False
        offset = cursor.offset + len(whole)
        return PointBatch(points, SourceCursor(attempt=cursor.attempt, offset=offset, number=number, step=step))

    def _piece(self, run_id: str, attempt: int, offset: int) -> tuple[bytes, bool]:
        """A piece of the stream, and whether nothing follows it."""
        try:
            query = StreamQuery(attempt=attempt, offset=offset)
            reply = self._client.fetch(f"/v1/job/{run_id}/metrics", query=query)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return b"", True
        return reply.content, reply.headers.get("x-strata-ended") == "true"

    def _next_attempt(self, run_id: str, cursor: SourceCursor) -> SourceCursor:
        job = self._client.call("GET", f"/v1/job/{run_id}", JobReply).job
        if job.attempt > cursor.attempt:
            return SourceCursor(attempt=cursor.attempt + 1, number=cursor.number, step=cursor.step)
        return msgspec.structs.replace(cursor, ended=job.status in TERMINAL)


def _tracked_job(job: Job) -> TrackedRun:
    spec = job.spec
    config = {**spec.hyper, "model": spec.model, "mode": spec.mode, "seed": spec.seed, "project": spec.project}
    return TrackedRun(id=job.id, name=spec.label, group=spec.sweep or spec.project, config=config)


class _RunReply(msgspec.Struct, frozen=True):
    training_run_id: str
    base_model: str
    lora_rank: int | None = None
    user_metadata: Mapping[str, Any] = {}


class _RunsReply(msgspec.Struct, frozen=True):
    training_runs: list[_RunReply]


class _PageQuery(msgspec.Struct, frozen=True):
    limit: int
    offset: int


class _ModelPoint(msgspec.Struct, frozen=True):
    seq_id: int
    kind: str
    at_s: float
    values: dict[str, float]


class _MetricsReply(msgspec.Struct, frozen=True):
    points: list[_ModelPoint]
    unloaded: bool


class _ResultsQuery(msgspec.Struct, frozen=True):
    after: int
    limit: int = MAX_POINTS


class ServerModels:
    """The metrics of passes and optimizer steps of the caller's models."""

    def __init__(self, client: HubClient) -> None:
        self._client = client

    def runs(self, *, everything: bool) -> Iterator[tuple[TrackedRun, int]]:
        del everything  # A server keeps some hundred models.
        offset = 0
        while True:
            query = _PageQuery(MAX_POINTS, offset)
            found = self._client.call("GET", "/api/v1/training_runs", _RunsReply, query=query).training_runs
            for run in found:
                config = {"base_model": run.base_model, "lora_rank": run.lora_rank, **run.user_metadata}
                yield TrackedRun(id=run.training_run_id, name=run.training_run_id, config=config), 1
            if len(found) < MAX_POINTS:
                return
            offset += len(found)

    def read(self, run_id: str, cursor: SourceCursor) -> PointBatch:
        from urllib.parse import quote

        path = f"/api/v1/training_runs/{quote(run_id, safe='')}/metrics"
        reply = self._client.call("GET", path, _MetricsReply, query=_ResultsQuery(cursor.offset))
        points: list[TrackedPoint] = []
        steps = max(cursor.step, 0)
        for each in reply.points:
            points.append(TrackedPoint(each.seq_id, steps, each.at_s, each.values))
            steps += each.kind == "optim_step"
        if not points:
            return PointBatch([], msgspec.structs.replace(cursor, ended=reply.unloaded))
        last = reply.points[-1].seq_id
        return PointBatch(points, SourceCursor(offset=last, number=last + 1, step=steps))
