"""Watches of a job: one projection for all watchers, with the interval of rounds (0.2 s), how many workers are
described at once, when rows are refreshed, how many rounds are kept, and how long a projection without watchers is (30
s).

A round looks at every worker, describes again those that changed and, in turn, those whose telemetry is oldest, and
encodes both once. A watcher gets the whole job first and then the rounds that it has not seen, as one message; after a
round that removes workers, or if it is too far behind, it gets the whole job again. So watching costs about the same
for one watcher and for many, and what is described in a round has a limit.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.base.notify import KeyedNotifier
from strata.coord.core.state import CoordState, JobState
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server import wire_job
from strata.coord.server.service import CoordinatorService, not_leading
from strata.coord.server.telemetry import JobTelemetry

ROWS_AT_ONCE: Final = 256
"""Workers that a round describes at most. Those that changed come first."""
SCANNED_AT_ONCE: Final = 500
DESCRIBED_AT_ONCE: Final = 16
"""Workers between two turns of the loop: below a millisecond each."""
INTERVAL_S: Final = 0.2
WORKERS_PER_S: Final = 6_000
"""A round looks at this many workers a second at most."""
SURVEY_S: Final = 1.0
"""How old the order and the counts of workers may be in a page of them."""
TYPICAL_S: Final = 5.0
"""The age of the median step time."""
REFRESH_S: Final = 2.0
"""A watcher hears something at least this often; telemetry of a small job is never older."""
ROUNDS_KEPT: Final = 32
LINGER_S: Final = 30.0
"""How long a projection without watchers is kept, so that one who comes back does not make it all again."""
LARGE_BYTES: Final = 1 << 20
FEW: Final = wire_job.HISTORY
MANY: Final = 1_000
"""Two projections at most for a job, whatever limits watchers name: few checkpoints and incidents, or many."""

_WORKERS: Final = pb.JobState.DESCRIPTOR.fields_by_name["workers"].number
_LISTS: Final = tuple(
    (each.name, each.number) for each in pb.JobState.DESCRIPTOR.fields if each.is_repeated and each.number != _WORKERS
)


def unknown_job(job_id: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"there is no job {job_id!r}", reason="unknown-job")


@dataclass(frozen=True)
class WorkerSurvey:
    """All workers of a job at a glance, made in slices."""

    made_s: float
    attention: Sequence[str]
    """Those first that a person may have to look at: found to be slow or to hang, missing at a barrier, suspect; then
    by step time and rank."""
    counts: Mapping[tuple[int, int], int]
    """Members by status and liveness."""
    typical_ms: float | None
    """The median step time, by computing times where they are known."""


async def survey_workers(service: CoordinatorService, job_id: str) -> WorkerSurvey:
    state = service.state
    job = state.jobs.get(job_id)
    if job is None:
        raise unknown_job(job_id)
    soft, telemetry, made_s = state.soft_of(job_id), service.telemetry.of(job_id), service.clock.monotonic_s()
    order = wire_job.worker_order(job)
    counts: Counter[tuple[int, int]] = Counter()
    steps_ms: dict[str, float] = {}
    found: set[str] = set()
    suspects: set[str] = set()
    for start in range(0, len(order), SCANNED_AT_ONCE):
        for worker_id in order[start : start + SCANNED_AT_ONCE]:
            member = job.members.get(worker_id)
            if member is not None:
                heartbeat = telemetry.heartbeats.get(worker_id)
                liveness = wire_job.worker_liveness(job, soft, worker_id, made_s)[0]
                counts[heartbeat.status if heartbeat is not None else 0, liveness] += 1
                if heartbeat is not None and (own_ms := wire_job.own_step_ms(heartbeat)):
                    steps_ms[worker_id] = own_ms
                if wire_job.current_finding(member, soft) is not None:
                    found.add(worker_id)
                if liveness == pb.LIVENESS_SUSPECT:
                    suspects.add(worker_id)
        await asyncio.sleep(0)
    typical_ms = median(steps_ms.values()) if steps_ms else None
    missing = {worker_id for barrier in soft.barriers.values() for worker_id in barrier.missing}

    def urgency(worker_id: str) -> tuple[list[bool], float]:
        slow = steps_ms.get(worker_id, 0.0) / typical_ms if typical_ms else 0.0
        return [worker_id not in some for some in (job.members, found, missing, suspects)], -round(slow, 1)

    return WorkerSurvey(made_s, sorted(order, key=urgency), counts, typical_ms)


def _matches(job: JobState, worker_id: str, text: str) -> bool:
    member = job.members.get(worker_id)
    return text in worker_id.casefold() or (member is not None and text in member.worker.hostname.casefold())


@dataclass(frozen=True)
class _Round:
    version: int
    rows: bytes
    """Workers that were described, as fields of a JobState."""
    replaced: frozenset[str]
    """Lists of the job that changed."""


@dataclass
class JobProjection:
    """What all watchers of one job see. `run_once` is one round."""

    service: CoordinatorService
    job_id: str
    limit: int
    watchers: int = 0
    version: int = 0
    """0: nothing is described yet."""
    whole_since: int = 0
    """A watcher of an earlier version needs the whole job."""
    begun: int = 0
    """Rounds that were begun; `done` is the last one that ended."""
    done: int = 0
    notifier: KeyedNotifier[None] = field(default_factory=KeyedNotifier)
    _rows: dict[str, bytes] = field(default_factory=dict)
    _keys: dict[str, object] = field(default_factory=dict)
    _described_s: dict[str, float] = field(default_factory=dict)
    """Longest ago first."""
    _order: list[str] = field(default_factory=list)
    _typical_ms: float | None = None
    _typical_s: float = 0.0
    _checkpoints: object = None
    _scalars: bytes = b""
    _lists: dict[str, bytes] = field(default_factory=dict)
    _rounds: deque[_Round] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    _sent_s: float = 0.0

    async def run_once(self) -> None:
        """Look at all workers, and make a version if there is something to say."""
        self.begun += 1
        await self._make_version()
        self.done = self.begun
        self.notifier.notify(None, None)

    async def _make_version(self) -> None:
        state = self.service.state
        job, telemetry = self._job(state), self.service.telemetry.of(self.job_id)
        self._order = wire_job.worker_order(job)
        due = await self._due(state, job, telemetry)
        rows = await self._describe(state, job, telemetry, due)
        removed = self._rows.keys() - set(self._order)
        for worker_id in removed:
            del self._rows[worker_id], self._keys[worker_id], self._described_s[worker_id]
        replaced = self._describe_job(self.service.state, telemetry)
        now_s = self.service.clock.monotonic_s()
        if not (rows or removed or replaced) and now_s < self._sent_s + REFRESH_S:
            return
        self._sent_s = now_s
        self.version += 1
        if removed:
            self.whole_since = self.version
        self._rounds.append(_Round(self.version, rows, replaced))

    def _job(self, state: CoordState) -> JobState:
        job = state.jobs.get(self.job_id)
        if job is None:
            raise unknown_job(self.job_id)
        return job

    async def _due(self, state: CoordState, job: JobState, telemetry: JobTelemetry) -> list[str]:
        """The workers to describe: those that changed, then the oldest; all that are there in the first round."""
        changed: list[str] = []
        for start in range(0, len(self._order), SCANNED_AT_ONCE):
            now_s = self.service.clock.monotonic_s()
            changed += [
                worker_id
                for worker_id in self._order[start : start + SCANNED_AT_ONCE]
                if self._keys.get(worker_id) != self._key(state, job, telemetry, worker_id, now_s)
            ]
            await asyncio.sleep(0)
        if not self.version:
            return changed
        # None waits for ever behind others that change all the time.
        changed.sort(key=lambda worker_id: self._described_s.get(worker_id, 0.0))
        due = dict.fromkeys(changed[:ROWS_AT_ONCE])
        now_s = self.service.clock.monotonic_s()
        for worker_id, described_s in self._described_s.items():
            if len(due) >= ROWS_AT_ONCE or now_s - described_s < REFRESH_S:
                break
            if worker_id in job.members:
                due[worker_id] = None
        return list(due)

    def _key(self, state: CoordState, job: JobState, telemetry: JobTelemetry, worker_id: str, now_s: float) -> object:
        """Returns what of a worker is worth a description as soon as it changes; the rest follows in turn."""
        member = job.members.get(worker_id)
        if member is None:
            return job.evicted.get(worker_id), telemetry.departed.get(worker_id)
        soft, heartbeat = state.soft_of(self.job_id), telemetry.heartbeats.get(worker_id)
        return (
            member.worker.incarnation,
            member.share,
            job.ranks.get(worker_id),
            heartbeat.status if heartbeat is not None else None,
            wire_job.worker_liveness(job, soft, worker_id, now_s)[0],
            worker_id in telemetry.streams,
        )

    async def _describe(self, state: CoordState, job: JobState, telemetry: JobTelemetry, due: Sequence[str]) -> bytes:
        parts: list[bytes] = []
        soft, typical_ms = state.soft_of(self.job_id), self._median_step_ms(job, telemetry)
        for start in range(0, len(due), DESCRIBED_AT_ONCE):
            now_s = self.service.clock.monotonic_s()
            for worker_id in due[start : start + DESCRIBED_AT_ONCE]:
                described = wire_job.worker_state(job, soft, telemetry, worker_id, now_s, typical_ms)
                row = pb.JobState(workers=(described,)).SerializeToString()
                parts.append(row)
                self._rows[worker_id] = row
                self._keys[worker_id] = self._key(state, job, telemetry, worker_id, now_s)
                self._described_s.pop(worker_id, None)
                self._described_s[worker_id] = now_s
            await asyncio.sleep(0)
        return b"".join(parts)

    def _median_step_ms(self, job: JobState, telemetry: JobTelemetry) -> float | None:
        now_s = self.service.clock.monotonic_s()
        if not self.version or now_s - self._typical_s >= TYPICAL_S:
            self._typical_ms, self._typical_s = wire_job.median_step_ms(job, telemetry), now_s
        return self._typical_ms

    def _describe_job(self, state: CoordState, telemetry: JobTelemetry) -> frozenset[str]:
        """Everything but the workers. Returns the lists that changed."""
        job, clock = self._job(state), self.service.clock
        header = wire_job.job_header(state, self.job_id, telemetry, clock.monotonic_s(), clock.wall_s(), self.limit)
        checkpoints = wire_job.checkpoint_key(job)
        if checkpoints != self._checkpoints:
            self._checkpoints = checkpoints
            header.checkpoints.extend(wire_job.checkpoint_states(job, self.limit))
            self._lists.pop("checkpoints", None)
        lists, self._scalars = _split(header)
        if "checkpoints" in self._lists:
            lists["checkpoints"] = self._lists["checkpoints"]
        replaced = frozenset(name for name, encoded in lists.items() if self._lists.get(name) != encoded)
        self._lists = lists
        return replaced

    def whole(self) -> bytes:
        """A WatchJobResponse with the whole job. On the wire, a message is the concatenation of its fields."""
        rows = [row for worker_id in self._order if (row := self._rows.get(worker_id)) is not None]
        job = b"".join((self._scalars, *self._lists.values(), *rows))
        return _field(1, job)

    def change_since(self, version: int) -> bytes | None:
        """A WatchJobResponse with what changed after a version; None: only the whole job would do."""
        if version < self.whole_since or not version:
            return None
        missed = [each for each in self._rounds if each.version > version]
        if len(missed) != self.version - version:
            return None
        replaced = frozenset().union(*(each.replaced for each in missed))
        lists = [self._lists[name] for name, _ in _LISTS if name in replaced]
        job = b"".join((self._scalars, *lists, *(each.rows for each in missed)))
        numbers = pb.JobChange(replaced_fields=[number for name, number in _LISTS if name in replaced])
        return _field(2, _field(1, job) + numbers.SerializeToString())

    @property
    def interval_s(self) -> float:
        return max(INTERVAL_S, len(self._rows) / WORKERS_PER_S)


def _split(header: pb.JobState) -> tuple[dict[str, bytes], bytes]:
    """The lists of a job, each encoded by itself, and its single fields."""
    lists: dict[str, bytes] = {}
    clear: Any = header.ClearField
    for name, _ in _LISTS:
        part = pb.JobState()
        if name == "training_parameters":
            part.training_parameters.update(header.training_parameters)
        else:
            getattr(part, name).MergeFrom(getattr(header, name))
        lists[name] = part.SerializeToString(deterministic=True)
        clear(name)
    return lists, header.SerializeToString()


def _field(number: int, payload: bytes) -> bytes:
    """A field of a message, encoded: its tag, its length, its bytes."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


class JobWatches:
    """The projections that are watched now, each with one task that makes its rounds."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._projections: dict[tuple[str, bool], tuple[JobProjection, asyncio.Task[None]]] = {}
        self._surveys: dict[str, asyncio.Task[WorkerSurvey]] = {}

    async def describe(self, job_id: str, request: pb.GetJobRequest) -> pb.GetJobResponse:
        """The job now, with the workers that the request asks for; they are described in slices."""
        service = self._service
        survey = await self._survey(job_id) if request.worker_limit else None
        state, clock = service.state, service.clock
        job = state.jobs.get(job_id)
        if job is None:
            raise unknown_job(job_id)
        telemetry, limit = service.telemetry.of(job_id), request.history_limit
        response = pb.GetJobResponse(
            job=wire_job.job_header(state, job_id, telemetry, clock.monotonic_s(), clock.wall_s(), limit),
            goodput=wire_job.job_goodput(job, clock.wall_s()),
        )
        response.job.checkpoints.extend(wire_job.checkpoint_states(job, limit))
        order: Sequence[str] = wire_job.worker_order(job)
        if survey is not None:
            response.worker_counts.extend(wire_job.worker_counts(survey.counts))
            order = survey.attention if request.worker_order == pb.WORKER_ORDER_ATTENTION else order
        if request.worker_search:
            order = [each for each in order if _matches(job, each, request.worker_search.casefold())]
        response.workers_total = len(order)
        page = order[request.worker_offset :][: request.worker_limit or None]
        typical_ms = wire_job.median_step_ms(job, telemetry) if survey is None else survey.typical_ms
        for start in range(0, len(page), DESCRIBED_AT_ONCE):
            now_s, soft = clock.monotonic_s(), state.soft_of(job_id)
            for worker_id in page[start : start + DESCRIBED_AT_ONCE]:
                response.job.workers.append(wire_job.worker_state(job, soft, telemetry, worker_id, now_s, typical_ms))
            if start + DESCRIBED_AT_ONCE < len(page):
                await asyncio.sleep(0)
        if request.lanes:
            response.lane_times_unix_ms.extend(telemetry.lanes.latest())
            response.lanes.extend(pb.WorkerLane(worker_id=each, states=telemetry.lanes.lane(each)) for each in page)
        return response

    async def _survey(self, job_id: str) -> WorkerSurvey:
        """One for all readers of a job, at most once in `SURVEY_S`."""
        task = self._surveys.get(job_id)
        if task is not None and (not task.done() or self._is_fresh(task)):
            return await asyncio.shield(task)
        for name in [name for name, each in self._surveys.items() if each.done() and not self._is_fresh(each)]:
            del self._surveys[name]
        task = self._surveys[job_id] = asyncio.create_task(survey_workers(self._service, job_id))
        return await asyncio.shield(task)

    def _is_fresh(self, task: asyncio.Task[WorkerSurvey]) -> bool:
        if task.cancelled() or task.exception() is not None:
            return False
        return self._service.clock.monotonic_s() < task.result().made_s + SURVEY_S

    async def watch(self, job_id: str, limit: int, pause_s: float, *, deltas: bool) -> AsyncGenerator[bytes, None]:
        """Encoded responses, for ever; UNAVAILABLE when this process leads no more."""
        if job_id not in self._service.state.jobs:
            raise unknown_job(job_id)
        projection, task = self._projection(job_id, many=limit > FEW)
        seen = 0
        with _watching(projection):
            # The first response is not older than the request: what the caller did before is in it.
            before = projection.begun
            self._service.notifier.events.notify(("changed", job_id), None)
            while True:
                with projection.notifier.subscribe(None) as newer:
                    if projection.done > before and projection.version > seen:
                        message = projection.change_since(seen) if deltas else None
                        if message is None:
                            message = projection.whole()
                        seen = projection.version
                        yield message
                        # A whole large job is not sent as often as a change.
                        large = not deltas and len(message) > LARGE_BYTES
                        await self._service.clock.sleep(max(pause_s, REFRESH_S) if large else pause_s)
                        if projection.version > seen:
                            continue
                    if not task.done():
                        await newer.wait()
                if task.done() and projection.version == seen:
                    task.result()
                    raise not_leading()

    def _projection(self, job_id: str, *, many: bool) -> tuple[JobProjection, asyncio.Task[None]]:
        known = self._projections.get((job_id, many))
        if known is None or known[1].done():
            projection = JobProjection(self._service, job_id, MANY if many else FEW)
            task = asyncio.create_task(self._run(projection), name=f"watch {job_id}")
            known = self._projections[job_id, many] = projection, task
            task.add_done_callback(lambda ended: self._forget((job_id, many), projection, ended))
        return known

    def _forget(self, key: tuple[str, bool], projection: JobProjection, ended: asyncio.Task[None]) -> None:
        known = self._projections.get(key)
        if known is not None and known[0] is projection:
            del self._projections[key]
        projection.notifier.notify(None, None)
        if not ended.cancelled():
            # Watchers, if there are any, read it themselves.
            ended.exception()

    async def _run(self, projection: JobProjection) -> None:
        """Rounds while somebody watches, and until the lead is lost."""
        service, idle_s = self._service, 0.0
        while projection.watchers or idle_s < LINGER_S:
            with service.notifier.events.subscribe(("changed", projection.job_id)) as changed:
                if projection.watchers:
                    await projection.run_once()
                idle_s = 0.0 if projection.watchers else idle_s + projection.interval_s
                await service.clock.sleep(projection.interval_s)
                if projection.watchers:
                    await changed.wait(max(0.0, REFRESH_S - projection.interval_s))
                if changed.cancelled():
                    raise not_leading()


@contextmanager
def _watching(projection: JobProjection) -> Iterator[None]:
    projection.watchers += 1
    try:
        yield
    finally:
        projection.watchers -= 1
