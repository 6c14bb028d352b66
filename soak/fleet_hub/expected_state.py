"""The oracle of the hub campaigns: the replies that clients received, kept outside the hub and compared with it.

Each client records the replies of the hub. `problems` has a sentence for each invariant that a reply violates at once;
`audit` checks the rest afterwards. All hosts are threads of this process, hence the lock.

A held attempt is *healthy* as long as its host renews the lease or tries to. An outage of the hub, however long, does
not end that: only a host that goes silent on purpose, or that this machine did not schedule, loses its lease.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from strata.fleet.core.job import TERMINAL, Cause, JobStatus
from strata.fleet.wire.jobs import Job
from strata.fleet.wire.leases import LeaseGiven, LeaseVerdict

MOST_NAMED: Final = 20
Key = tuple[str, int]
"""A job and the epoch of an attempt of it."""


@dataclass
class HeldAttempt:
    """An attempt, as its host knows it from the hub's replies."""

    host: str
    healthy: bool = True
    ending: bool = False
    """Its end is being reported, or was."""
    stopped: bool = False
    """The hub said to stop."""
    log: bytes = b""
    """What the hub has confirmed of it."""
    checkpoint: str = ""
    failed: tuple[Cause, str] | None = None
    """The failure that was confirmed."""
    result: tuple[str, float] | None = None
    """The artifact and the metric of the completion that was confirmed."""


@dataclass
class ExpectedJob:
    cancel_asked: bool = False
    cancel_confirmed: bool = False
    completed_by: int = 0
    """The epoch whose completion was confirmed."""
    final: JobStatus | None = None
    """The final status that a reply reported."""


@dataclass
class ExpectedState:
    jobs: dict[str, ExpectedJob] = field(default_factory=dict)
    """All that were confirmed to be queued."""
    holds: dict[Key, HeldAttempt] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock)
    answered_s: float = 0.0
    """When a host was last answered, by the monotonic clock."""

    def problem(self, what: str) -> None:
        with self.lock:
            self.problems.append(what)

    def problem_lines(self) -> list[str]:
        """The first problems, and how many more there are."""
        with self.lock:
            more = len(self.problems) - MOST_NAMED
            return [*self.problems[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]

    def queued(self, job_id: str) -> None:
        with self.lock:
            self._job(job_id)
            self.counted["jobs"] += 1

    def _job(self, job_id: str) -> ExpectedJob:
        """A host may have ended it before the answer to whoever queued it came."""
        return self.jobs.setdefault(job_id, ExpectedJob())

    def close_round(self) -> None:
        """Everything was audited: forget the jobs of this round, and keep the counters."""
        with self.lock:
            self.jobs.clear()
            self.holds.clear()

    # Replies to hosts

    def granted(self, host: str, lease: LeaseGiven) -> HeldAttempt | None:
        """A new hold; None if the hub gave away what it may not."""
        with self.lock:
            key = (lease.job_id, lease.epoch)
            self._check_epoch(host, lease)
            known = self.holds.get(key)
            if known is not None:
                self.problem(f"attempt {_name(key)} was given to {known.host}, and then to {host}")
                return None
            self.counted["claims"] += 1
            self._check_checkpoint(lease)
            return self.holds.setdefault(key, HeldAttempt(host))

    def _check_epoch(self, host: str, lease: LeaseGiven) -> None:
        name = _name((lease.job_id, lease.epoch))
        job = self.jobs.get(lease.job_id)
        # A cancel may overtake the answer to a claim; the events show which of them was first.
        if job is not None and job.final in (JobStatus.COMPLETED, JobStatus.FAILED):
            self.problem(f"{name} was given to {host}, and the job is {job.final}")
        for (job_id, epoch), other in self.holds.items():
            if job_id != lease.job_id:
                continue
            if epoch > lease.epoch:
                self.problem(f"{name} was given to {host} after attempt {epoch} had been given to {other.host}")
            elif other.healthy and not other.ending and not other.stopped and epoch < lease.epoch:
                self.problem(f"{name} was given to {host}, and {other.host} holds attempt {epoch} and renews it")

    def _check_checkpoint(self, lease: LeaseGiven) -> None:
        kept = [
            (epoch, hold.checkpoint)
            for (job_id, epoch), hold in self.holds.items()
            if job_id == lease.job_id and epoch < lease.epoch and hold.checkpoint
        ]
        # A later attempt may have left a newer one whose confirmation was lost, so only its absence is wrong.
        if kept and not lease.checkpoint:
            name = _name((lease.job_id, lease.epoch))
            self.problem(f"{name} begins without the checkpoint of attempt {max(kept)[0]}")

    def repeated_claim(self, host: str, given: set[Key], again: set[Key]) -> None:
        """The same claim, asked again before anything of it has ended."""
        with self.lock:
            self.counted["claims repeated"] += 1
            if again - given:
                self.problem(f"{host} repeated a claim and was given {_names(again - given)} besides")
            # A hold that ended meanwhile is not given again: by cancel, or because the job has ended.
            lost = {key for key in given - again if not self._cancelled(key[0])}
            if lost:
                self.problem(f"{host} repeated a claim and was not given {_names(lost)} again")

    def verdict(self, host: str, verdict: LeaseVerdict) -> bool:
        """Whether to go on."""
        with self.lock:
            key = (verdict.job_id, verdict.epoch)
            hold = self.holds[key]
            if verdict.verdict == "continue":
                return True
            hold.stopped = True
            excused = hold.ending or (verdict.cause == "ended" and self._cancelled(verdict.job_id))
            if hold.healthy and not excused:
                self.problem(f"{host} was told to stop {_name(key)} ({verdict.reason}), and it renews all the time")
            return False

    def mark_silent(self, key: Key) -> None:
        """The host sends no heartbeats from now on."""
        with self.lock:
            self.holds[key].healthy = False

    def completed(self, key: Key, artifact: str, metric: float, answer: Job) -> None:
        with self.lock:
            job_id, epoch = key
            hold, job = self.holds[key], self._job(job_id)
            hold.result = (artifact, metric)
            self.counted["completed"] += 1
            if (answer.status, answer.epoch, answer.artifact) != (JobStatus.COMPLETED, epoch, artifact):
                self.problem(f"{_name(key)} completed with {artifact}; the answer: {answer.status} {answer.artifact}")
            if job.completed_by and job.completed_by != epoch:
                self.problem(f"{_name(key)} completed, and attempt {job.completed_by} had completed it before")
            self._ended(job_id, JobStatus.COMPLETED)
            job.completed_by = epoch

    def failed(self, key: Key, cause: Cause, error: str, answer: Job) -> None:
        with self.lock:
            self.holds[key].failed = (cause, error)
            self.counted["failed"] += 1
            if answer.status in TERMINAL and answer.epoch == key[1]:
                self._ended(key[0], answer.status)

    def refused(self, key: Key, what: str, why: str) -> None:
        """An end that was not taken: right only if the job was cancelled, or the host had let go of it."""
        with self.lock:
            self.counted["refused"] += 1
            if self.holds[key].healthy and not self._cancelled(key[0]):
                self.problem(f"{what} of {_name(key)} was refused ({why}), and its host renews all the time")

    def cancelled(self, job_id: str, answer: Job) -> None:
        with self.lock:
            self.counted["cancelled"] += 1
            self.jobs[job_id].cancel_confirmed = True
            if answer.status is not JobStatus.CANCELLED:
                self.problem(f"{job_id[:14]} was cancelled, and the answer says {answer.status}")
            self._ended(job_id, JobStatus.CANCELLED)

    def _ended(self, job_id: str, status: JobStatus) -> None:
        job = self._job(job_id)
        if job.final not in (None, status):
            self.problem(f"{job_id[:14]} was {job.final}, and is {status} now")
        job.final = status

    def _cancelled(self, job_id: str) -> bool:
        job = self.jobs.get(job_id)
        return job is not None and job.cancel_asked


def _name(key: Key) -> str:
    return f"{key[0][:14]}/{key[1]}"


def _names(keys: set[Key]) -> str:
    return ", ".join(sorted(map(_name, keys)))
