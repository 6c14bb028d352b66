"""Audits the hub after a round: all jobs have ended, each as the replies to the hosts said.

Everything is read through the hub's interface after the last restart of a round, while nobody writes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from soak.fleet_hub.expected_state import ExpectedState, HeldAttempt, Key
from strata.base.errors import StrataError
from strata.fleet.artifacts.manifest import ArtifactFile, ArtifactManifest
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import CHARGED, TERMINAL, Cause, JobEvent, JobStatus, advance
from strata.fleet.records import JobAttempt
from strata.fleet.wire.artifacts import FileQuery
from strata.fleet.wire.events import EventsQuery, EventsReply, FeedEvent
from strata.fleet.wire.jobs import Job, JobReply, JobsQuery, JobsReply
from strata.fleet.wire.streams import StreamQuery

DRAIN_S: Final = 90.0
_UNFINISHED: Final = tuple(status for status in JobStatus if status not in TERMINAL)
_EVENT: Final[Mapping[str, JobEvent]] = {
    "job.claimed": JobEvent.CLAIM,
    "job.started": JobEvent.START,
    "job.completed": JobEvent.COMPLETE,
    "job.failed": JobEvent.FAIL,
    "job.retried": JobEvent.RETRY,
    "job.expired": JobEvent.EXPIRE,
    "job.revived": JobEvent.REVIVE,
    "job.cancelled": JobEvent.CANCEL,
}


def drain(client: HubClient, expected: ExpectedState, idle: Callable[[], bool], within_s: float = DRAIN_S) -> None:
    """Wait until nothing is left to do, and nobody is at anything."""
    until_s = time.monotonic() + within_s
    while (left := _unfinished(client)) or not idle():
        if time.monotonic() > until_s:
            break
        time.sleep(0.1)
    else:
        return
    if not left:
        expected.problem(f"all jobs have ended, and a host still holds one after {within_s:g} s")
    for job in left[:5]:
        expected.problem(f"{job.id[:14]} is lost: still {job.status} ({job.reason}) after {within_s:g} s")


def _unfinished(client: HubClient) -> Sequence[Job]:
    query = JobsQuery(status=_UNFINISHED, limit=1000)
    return client.call("GET", "/v1/jobs", JobsReply, query=query).jobs


def audit(client: HubClient, expected: ExpectedState, host_ids: Mapping[str, str], events: Sequence[FeedEvent]) -> None:
    """`events` are those of this round, as the listener received them."""
    events_of: dict[str, list[FeedEvent]] = {}
    for event in events:
        events_of.setdefault(event.subject, []).append(event)
    for job_id in expected.jobs:
        try:
            found = client.call("GET", f"/v1/job/{job_id}", JobReply)
        except StrataError as error:
            expected.problem(f"{job_id[:14]} was queued and is gone: {error.message}")
            continue
        holds = {key: hold for key, hold in expected.holds.items() if key[0] == job_id}
        _check_end(expected, found.job)
        _check_attempts(expected, found, holds, host_ids)
        _check_events(expected, found.job, holds, events_of.get(job_id, []))
        _check_bytes(client, expected, found.job, holds)


def _check_end(expected: ExpectedState, job: Job) -> None:
    known = expected.jobs[job.id]
    name = job.id[:14]
    if known.final not in (None, job.status):
        expected.problem(f"{name} was reported as {known.final}, and is {job.status}")
    if job.status is JobStatus.CANCELLED and not known.cancel_asked:
        expected.problem(f"{name} is cancelled, and nobody asked for it")
    if job.status is JobStatus.COMPLETED and not known.completed_by:
        expected.problem(f"{name} is completed, and no host got a reply that says so")


def _check_attempts(
    expected: ExpectedState, found: JobReply, holds: Mapping[Key, HeldAttempt], host_ids: Mapping[str, str]
) -> None:
    job, name = found.job, found.job.id[:14]
    epochs = [attempt.epoch for attempt in found.attempts]
    if epochs != list(range(1, job.epoch + 1)):
        expected.problem(f"{name} is at attempt {job.epoch} and has the attempts {epochs}")
    for attempt in found.attempts:
        hold = holds.get((job.id, attempt.epoch))
        if hold is None:
            expected.problem(f"attempt {attempt.epoch} of {name} was given away, and no host got a reply that says so")
        elif host_ids[hold.host] != attempt.host_id:
            expected.problem(f"attempt {attempt.epoch} of {name} is another host's than {hold.host}'s")
        else:
            _check_report(expected, job, attempt, hold)
    if len([1 for attempt in found.attempts if attempt.outcome == "completed"]) != (job.status is JobStatus.COMPLETED):
        expected.problem(f"{name} is {job.status}, and its attempts ended {[each.outcome for each in found.attempts]}")
    for key in holds.keys() - {(job.id, epoch) for epoch in epochs}:
        expected.problem(f"attempt {key[1]} of {name} was given to {holds[key].host} and is gone")
    _check_budget(expected, found)


def _check_report(expected: ExpectedState, job: Job, attempt: JobAttempt, hold: HeldAttempt) -> None:
    name = f"{job.id[:14]}/{attempt.epoch}"
    if hold.result is not None:
        kept = (attempt.outcome, attempt.artifact, attempt.facts.get("metrics", {}).get("loss"), job.artifact)
        if kept != ("completed", hold.result[0], hold.result[1], hold.result[0]):
            expected.problem(f"{name} was completed with {hold.result}, and the hub has {kept}")
    elif attempt.outcome == "completed":
        expected.problem(f"{name} is completed, and its host got no reply that says so")
    if hold.failed is not None and (attempt.cause, attempt.error) != hold.failed:
        expected.problem(f"{name} failed with {hold.failed}, and the hub has {(attempt.cause, attempt.error)}")
    if hold.checkpoint and not attempt.checkpoint:
        expected.problem(f"{name} left the checkpoint {hold.checkpoint}, and the hub does not know it")


def _check_budget(expected: ExpectedState, found: JobReply) -> None:
    """An attempt that was counted twice ends a job too early."""
    job, spec = found.job, found.job.spec
    charged = len([1 for attempt in found.attempts if attempt.cause in CHARGED])
    lost = len([1 for attempt in found.attempts if attempt.cause is Cause.HOST_LOST])
    used_up = charged == spec.max_attempts or lost == spec.max_lost
    if charged > spec.max_attempts or (job.status is JobStatus.FAILED) != used_up:
        expected.problem(
            f"{job.id[:14]} is {job.status} after {charged} of {spec.max_attempts} attempts failed and {lost} of"
            f" {spec.max_lost} were lost: {job.reason}"
        )


def _check_events(
    expected: ExpectedState, job: Job, holds: Mapping[Key, HeldAttempt], events: Sequence[FeedEvent]
) -> None:
    """Played through the table of statuses, they lead to where the job is."""
    name, status, claims = job.id[:14], JobStatus.PENDING, 0
    for event in events:
        moves = _EVENT.get(event.kind)
        if moves is None:
            continue
        try:
            status = advance(status, moves)
        except StrataError as error:
            expected.problem(f"{name}: {event.kind} after {status}: {error.message}")
            return
        claims += moves is JobEvent.CLAIM
        hold = holds.get((job.id, event.body.get("epoch", 0)))
        if moves is JobEvent.EXPIRE:
            expected.counted["expired"] += 1
            if hold is not None and hold.healthy:
                expected.problem(
                    f"the lease of {name}/{event.body['epoch']} ran out, and {hold.host} renews all the time"
                )
    if (status, claims) != (job.status, job.epoch):
        expected.problem(f"the events of {name} end {status} after {claims} claims; it is {job.status} at {job.epoch}")


def _check_bytes(client: HubClient, expected: ExpectedState, job: Job, holds: Mapping[Key, HeldAttempt]) -> None:
    for (_, epoch), hold in holds.items():
        query = StreamQuery(attempt=epoch)
        stored = client.fetch(f"/v1/job/{job.id}/log", query=query).content if hold.log else b""
        # What was not confirmed may be there as well.
        if not stored.startswith(hold.log):
            sizes = f"{len(hold.log)} bytes were confirmed, {len(stored)} are there"
            expected.problem(f"the log of {job.id[:14]}/{epoch} is not what was sent: {sizes}")
    if job.status is JobStatus.COMPLETED:
        content = client.fetch(f"/v1/artifact/{job.artifact}/file", query=FileQuery(path="result.bin")).content
        sha256 = hashlib.sha256(content).hexdigest()
        file = ArtifactFile(path="result.bin", size=len(content), sha256=sha256, chunks=(sha256,))
        if ArtifactManifest(files=(file,)).id != job.artifact:
            expected.problem(f"the result of {job.id[:14]} is not what was uploaded")


def check_feed(client: HubClient, expected: ExpectedState, received: Sequence[FeedEvent], after: str) -> None:
    """What the listener was told over all outages is what the table has: nothing skipped, nothing twice."""
    kept: list[str] = []
    cursor = after
    while True:
        query = EventsQuery(after=cursor, limit=1000)
        reply = client.call("GET", "/v1/events", EventsReply, query=query)
        if not reply.events:
            break
        kept += [event.cursor for event in reply.events]
        cursor = reply.cursor
    heard = [event.cursor for event in received]
    if heard != kept:
        different = len(set(heard))
        expected.problem(f"the listener was told {len(heard)} events, {different} different; the feed has {len(kept)}")


def check_webhook(expected: ExpectedState, wanted: Sequence[str], got: Sequence[str], within_s: float = 30.0) -> None:
    """Every event that the webhook wants came, in order, at least once; `got` grows."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s and not set(wanted) <= set(got):
        time.sleep(0.05)
    first = list(dict.fromkeys(got))
    arrived = [cursor for cursor in first if cursor in set(wanted)]
    if arrived != list(wanted):
        expected.problem(
            f"a webhook wants {len(wanted)} events, and got {len(arrived)} of them, not all or not in order"
        )
