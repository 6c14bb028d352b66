"""Clients that are no hosts: an operator who queues and cancels jobs, and a listener of the feed."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from soak.fleet_hub.expected_state import ExpectedState
from soak.fleet_hub.hosts import RetryingCaller, monitored_thread
from strata.base.errors import Code, StrataError
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.manifest import JobManifest
from strata.fleet.wire.events import EventsQuery, EventsReply, FeedEvent
from strata.fleet.wire.jobs import CancelRequest, Job, SubmitReply, SubmitRequest
from strata.fleet.wire.manifests import ManifestReply, ManifestRequest

T = TypeVar("T")

TRAINER: Final = TrainerSpec(name="soak", command=("true",), directory="/nowhere")
MODELS: Final = ("gbt", "mlp", "cnn")


class Operator:
    """Keeps about `backlog` jobs unfinished, one by one and by manifests; cancels some."""

    def __init__(
        self, client: HubClient, expected: ExpectedState, rng: random.Random, first_seed: int, backlog: int
    ) -> None:
        self._client = client
        self._expected = expected
        self._rng = rng
        self._seed = first_seed
        self._backlog = backlog
        self._stopping = threading.Event()
        self._caller = RetryingCaller(expected, self._stopping, rng, 0.5)
        self._thread = monitored_thread("the operator", expected, self._stopping, self._run)
        self.draining = threading.Event()
        """No new jobs."""
        self.drained = threading.Event()
        """It has heard of that, and nothing it asked for is under way."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._client.close()

    def join(self) -> None:
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stopping.wait(self._rng.uniform(0.02, 0.2)):
            if self.draining.is_set():
                self.drained.set()
            else:
                self._turn()

    def _turn(self) -> None:
        with self._expected.lock:
            unfinished = [job_id for job_id, job in self._expected.jobs.items() if job.final is None]
        if len(unfinished) < self._backlog:
            if self._rng.random() < 0.3:
                self._apply(self._rng.randint(2, 6))
            else:
                self._submit()
        if unfinished and self._rng.random() < 0.03:
            self._cancel(self._rng.choice(unfinished))

    def _next(self) -> JobSpec:
        self._seed += 1
        return JobSpec(
            model=MODELS[self._seed % len(MODELS)],
            seed=self._seed,
            trainer=TRAINER.name,
            priority=self._rng.randint(0, 3),
            max_attempts=2,
        )

    def _submit(self) -> None:
        body = SubmitRequest(spec=self._next(), trainer=TRAINER)
        reply = self._caller.call("submit", lambda: self._send("/v1/jobs", SubmitReply, body))
        if reply.job.id != body.spec.id:
            self._expected.problem(f"{body.spec.id[:14]} was queued as {reply.job.id[:14]}")
        self._expected.queued(reply.job.id)

    def _apply(self, count: int) -> None:
        specs = [self._next() for _ in range(count)]
        jobs = {spec.id: spec for spec in specs}
        manifest = JobManifest(source="soak.toml", trainers={TRAINER.name: TRAINER}, jobs=jobs)
        body = ManifestRequest(manifest=manifest)
        reply = self._caller.call("apply", lambda: self._send("/v1/manifest", ManifestReply, body))
        if not reply.applied or len(reply.new) + len(reply.changed) + reply.unchanged != count:
            self._expected.problem(f"a manifest of {count} jobs was applied as {reply.summary!r}")
        for spec in specs:
            self._expected.queued(spec.id)

    def _send(self, path: str, kind: type[T], body: msgspec.Struct) -> T:
        try:
            return self._client.call("POST", path, kind, body=body)
        except StrataError as error:
            if error.code is not Code.CONFLICT:
                raise
            # Repeated after a lost answer, it met itself: the one before is just being applied.
            raise StrataError(Code.UNAVAILABLE, error.message) from error

    def _cancel(self, job_id: str) -> None:
        # Before it is asked for: the answer may be lost, and the cancel not.
        self._expected.jobs[job_id].cancel_asked = True
        path, body = f"/v1/job/{job_id}/cancel", CancelRequest(reason="enough")
        try:
            answer = self._caller.call(
                "cancel",
                lambda: self._client.call("POST", path, Job, body=body),
                accepted=frozenset({Code.PRECONDITION}),
            )
        except StrataError as error:
            if error.code is not Code.PRECONDITION:
                raise
            return
        self._expected.cancelled(job_id, answer)


@dataclass
class Listener:
    """Follows the feed from its beginning over every outage; what it was told once has to stay so."""

    client: HubClient
    expected: ExpectedState
    events: list[FeedEvent] = field(default_factory=list)
    cursor: str = ""
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = monitored_thread("the listener", self.expected, self._stopping, self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self.client.close()

    def join(self) -> None:
        self._thread.join(30)

    def _run(self) -> None:
        caller = RetryingCaller(self.expected, self._stopping, random.Random(0), 0.5)  # noqa: S311 - no secret
        while not self._stopping.is_set():
            query = EventsQuery(after=self.cursor, limit=1000, wait_s=2.0)
            reply = caller.call("events", lambda query=query: self._read(query))  # type: ignore[misc]
            self.events += reply.events
            self.cursor = reply.cursor

    def _read(self, query: EventsQuery) -> EventsReply:
        return self.client.call("GET", "/v1/events", EventsReply, query=query)

    def caught_up(self, within_s: float = 30.0) -> None:
        """Wait until it has all there is, while nobody writes: a feed may be a moment behind its table."""
        until_s = time.monotonic() + within_s
        level = 0
        while time.monotonic() < until_s:
            newest = self._read(EventsQuery(after="newest", limit=1)).cursor
            level = level + 1 if newest == self.cursor else 0
            if level > 3:
                return
            time.sleep(0.2)
        self.expected.problem(f"the feed did not catch up within {within_s:g} s")
