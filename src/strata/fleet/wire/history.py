"""Messages about timelines, interruptions and goodput of jobs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.goodput import GoodputPart, TimelineSegment
from strata.fleet.records import JobAttempt
from strata.fleet.wire.base import HubReply, Message


class TimelineMark(HubReply, frozen=True, kw_only=True):
    at_s: float
    kind: str
    """The kind of the event: `job.checkpointed`, `job.expired`, `job.preempted`, `job.revived`, `job.requeued` …"""
    attempt: int = 0


class Interruption(HubReply, frozen=True, kw_only=True):
    """An attempt that ended before the job did, and what that cost."""

    at_s: float
    """When the trainer ended, or its host was seen last."""
    attempt: int
    host_id: str
    host: str = ""
    """Its name."""
    cause: str
    resumed_at_s: float | None
    """When the job ran again; null: it does not yet, or never did."""
    detect_s: float
    restart_s: float
    rolled_back_s: float
    cost_s: float
    """The sum of the three."""
    job_id: str = ""
    """The job, in the sum over many jobs."""


class JobTimelineReply(HubReply, frozen=True, kw_only=True):
    from_s: float
    to_s: float
    """The end of a job that has ended; now of another."""
    segments: tuple[TimelineSegment, ...]
    """The segments in order; only between the end of a job and its requeue is a gap."""
    marks: tuple[TimelineMark, ...]
    attempts: tuple[JobAttempt, ...]
    hosts: dict[str, str]
    """The names of the hosts of these attempts, by id."""
    interruptions: tuple[Interruption, ...]


class GoodputQuery(Message, frozen=True, kw_only=True):
    project: Word = ""
    span_s: Annotated[float, msgspec.Meta(gt=0, le=7 * 86_400)] = 86_400.0
    """How far back."""


class GoodputReply(HubReply, frozen=True, kw_only=True):
    seconds: dict[GoodputPart, float]
    """`waiting`, `useful`, `checkpoint`, `detect`, `restart`, `rolled_back`: each moment belongs to one of them."""
    wall_s: float
    """Their sum: the time from queueing to the end, without that between an end and a requeue."""
    share: float | None
    """`useful` of all but `waiting`; null while there is nothing of these."""
    interruptions: tuple[Interruption, ...]
    """The interruptions; of many jobs the most expensive ones."""
    jobs: int = 1
    whole: bool = True
    """False: there were more attempts than are added up at once; these are the last ones."""
