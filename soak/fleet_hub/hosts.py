"""Simulated hosts that call the hub's real API and retry requests without a reply, as the agent does.

Each has two threads: one claims jobs and works on them, the other renews all it holds. What a job does is chance: it
completes with an artifact, fails for one reason or another, or its host keeps silent for longer than a lease.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from soak.fleet_hub.expected_state import ExpectedState, HeldAttempt, Key
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.artifacts.manifest import ArtifactFile, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.wire.artifacts import MissingChunk
from strata.fleet.wire.jobs import Job
from strata.fleet.wire.leases import CompleteRequest, LeaseGiven, LeaseHeld

T = TypeVar("T")

RETRYABLE: Final = frozenset({Code.UNAVAILABLE, Code.DEADLINE, Code.EXHAUSTED})
OVER: Final = frozenset({Code.STALE, Code.CONFLICT})
"""Answers to the end of an attempt that somebody else has ended."""
WAIT_S: Final = 2.0
WRITES: Final = frozenset({"claim", "complete", "renew"})
"""What cannot be answered without the database."""
_names: Final = itertools.count()


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """The campaign is over, or was cut off."""


@dataclass(frozen=True)
class HostBehaviour:
    """How a simulated host behaves."""

    count: int = 2
    """Jobs it asks for at once; it works on them one after the other and holds all of them."""
    work_s: tuple[float, float] = (0.1, 1.5)
    fails: float = 0.12
    goes_silent: float = 0.12
    checkpoints: float = 0.2
    repeats: float = 0.25
    """How often it repeats a request that was answered."""


HOLDER: Final = HostBehaviour(count=4, work_s=(4.0, 12.0), fails=0.0, goes_silent=0.0)
"""Holds its jobs over several outages."""


class RetryingCaller:
    """Retries a request with backoff until the hub replies. A reply that no host should ever get is a problem."""

    def __init__(self, expected: ExpectedState, stopping: threading.Event, rng: random.Random, most_s: float) -> None:
        self._expected = expected
        self._stopping = stopping
        self._rng = rng
        self._most_s = most_s

    def call(self, what: str, request: Callable[[], T], *, accepted: frozenset[Code] = frozenset()) -> T:
        pause_s = 0.02
        while not self._stopping.is_set():
            try:
                answer = request()
            except StrataError as error:
                if error.code not in RETRYABLE:
                    if error.code not in accepted:
                        self._expected.problem(f"{what}: {error.code}: {error.message}")
                    raise
                self._stopping.wait(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(pause_s * 2, self._most_s)
            else:
                if what in WRITES:
                    self._expected.answered_s = time.monotonic()
                return answer
        raise Stopped


def monitored_thread(
    who: str, expected: ExpectedState, stopping: threading.Event, do: Callable[[], None]
) -> threading.Thread:
    """A thread whose end is a problem unless the campaign is over."""

    def run() -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001 - the outermost handler of a thread, which nobody else hears
            if not stopping.is_set():
                expected.problem(f"{who} gave up: {type(error).__name__}: {error}")

    return threading.Thread(target=run, name=who, daemon=True)


class SimulatedHost:
    def __init__(
        self,
        url: str,
        login: tuple[str, Secret],
        expected: ExpectedState,
        behaviour: HostBehaviour,
        *,
        lease_s: float,
        rng: random.Random,
    ) -> None:
        self.name, secret = login
        self._expected = expected
        self._behaviour = behaviour
        self._lease_s = lease_s
        self._rng = rng
        self._client = HubClient(url, bearer=secret, timeout_s=15.0)
        self._heartbeat_client = HubClient(url, bearer=secret, timeout_s=10.0)
        self._api = HubApi(self._client)
        self._stopping = threading.Event()
        # After an outage a host retries soon enough to keep its leases: as the agent, in proportion.
        self._caller = RetryingCaller(expected, self._stopping, rng, lease_s / 6)
        self._heartbeat_caller = RetryingCaller(expected, self._stopping, random.Random(rng.random()), lease_s / 6)  # noqa: S311
        self._held: dict[Key, tuple[LeaseGiven, HeldAttempt]] = {}
        self._silent: set[Key] = set()
        self._lock = threading.Lock()
        self._threads = [
            monitored_thread(self.name, expected, self._stopping, each) for each in (self._work, self._renew)
        ]
        self.draining = threading.Event()
        """Everything completes: the jobs are to come to an end."""

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        self._stopping.set()
        self._client.close()
        self._heartbeat_client.close()

    def join(self) -> None:
        for each in self._threads:
            each.join(30)
            if each.is_alive():
                self._expected.problem(f"{self.name} hangs")

    def register(self) -> None:
        capability = Capability(hostname=self.name, os="linux", cores=8, ram_bytes=2**35, slots=8)
        reply = self._caller.call("register", lambda: self._api.register(capability))
        if reply.lease_s != self._lease_s:
            self._expected.problem(f"a lease lasts {reply.lease_s:g} s, not {self._lease_s:g}")

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self._held

    # Claim and work

    def _work(self) -> None:
        self.register()
        while not self._stopping.is_set():
            for key, (lease, hold) in self._claim().items():
                self._attempt(key, lease, hold)
            if self._chance(0.02):
                self.register()

    def _claim(self) -> dict[Key, tuple[LeaseGiven, HeldAttempt]]:
        count = self._behaviour.count
        claim_id = f"{self.name}-{next(_names)}"
        held = self._keep(self._caller.call("claim", lambda: self._api.claim(claim_id, count, WAIT_S)))
        if held and self._chance(self._behaviour.repeats):
            again = self._caller.call("claim again", lambda: self._api.claim(claim_id, count, 0.0))
            self._expected.repeated_claim(self.name, set(held), {(each.job_id, each.epoch) for each in again})
        return held

    def _keep(self, leases: tuple[LeaseGiven, ...]) -> dict[Key, tuple[LeaseGiven, HeldAttempt]]:
        if len(leases) > self._behaviour.count:
            self._expected.problem(f"{self.name} asked for {self._behaviour.count} jobs and was given {len(leases)}")
        held: dict[Key, tuple[LeaseGiven, HeldAttempt]] = {}
        with self._lock:
            for lease in leases:
                hold = self._expected.granted(self.name, lease)
                if hold is not None:
                    held[lease.job_id, lease.epoch] = (lease, hold)
            self._held |= held
        return held

    def _attempt(self, key: Key, lease: LeaseGiven, hold: HeldAttempt) -> None:
        behaviour, draining = self._behaviour, self.draining.is_set()
        try:
            self._append_log(key, lease, hold, f"begins on {self.name}\n".encode())
            if self._chance(behaviour.checkpoints):
                self._checkpoint(key, lease, hold)
            self._wait(self._rng.uniform(*behaviour.work_s), hold)
            if not draining and self._chance(behaviour.goes_silent):
                self._go_silent(key)
            if hold.stopped:
                return
            self._append_log(key, lease, hold, b"ends\n")
            if not draining and self._chance(behaviour.fails):
                self._fail(key, lease, hold)
            else:
                self._complete(key, lease, hold)
        except StrataError as error:
            if error.code not in OVER:
                raise
            self._expected.refused(key, "a write", str(error.code))
        finally:
            with self._lock:
                self._held.pop(key, None)
                self._silent.discard(key)

    def _go_silent(self, key: Key) -> None:
        self._expected.mark_silent(key)
        self._silent.add(key)
        self._wait(self._lease_s * self._rng.uniform(1.3, 3.5))

    def _wait(self, work_s: float, hold: HeldAttempt | None = None) -> None:
        until_s = time.monotonic() + work_s
        while time.monotonic() < until_s and not self._stopping.is_set():
            # In the end nobody waits for the slow ones.
            if self.draining.is_set() or (hold is not None and hold.stopped):
                return
            self._stopping.wait(0.1)

    def _append_log(self, key: Key, lease: LeaseGiven, hold: HeldAttempt, piece: bytes) -> None:
        offset = len(hold.log)
        size = self._caller.call(
            f"log of {key[0][:14]}", lambda: self._api.append(lease, "log", offset, piece), accepted=OVER
        )
        if size != offset + len(piece):
            self._expected.problem(f"{offset + len(piece)} bytes of a log were sent, and the hub has {size}")
        hold.log += piece

    def _checkpoint(self, key: Key, lease: LeaseGiven, hold: HeldAttempt) -> None:
        hold.checkpoint = self._upload(lease, f"checkpoint {key}".encode(), ArtifactKind.CHECKPOINT)

    def _complete(self, key: Key, lease: LeaseGiven, hold: HeldAttempt) -> None:
        metric = self._rng.random()
        artifact = self._upload(
            lease, f"result {key} {metric}".encode() * self._rng.randint(1, 2000), ArtifactKind.RESULT
        )
        body = CompleteRequest(epoch=lease.epoch, artifact=artifact, metrics={"loss": metric})
        hold.ending = True
        try:
            answer = self._caller.call("complete", lambda: self._api.complete(lease, body), accepted=OVER)
        except StrataError as error:
            self._expected.refused(key, "the result", str(error.code))
            return
        self._expected.completed(key, artifact, metric, answer)
        if self._chance(self._behaviour.repeats):
            again = self._caller.call("complete again", lambda: self._api.complete(lease, body))
            self._same(key, "complete", _of(answer), _of(again))

    def _fail(self, key: Key, lease: LeaseGiven, hold: HeldAttempt) -> None:
        # Not too often infra, else the hosts would all be quarantined.
        cause = self._rng.choice([Cause.USER_ERROR, Cause.USER_ERROR, Cause.OOM, Cause.TIMEOUT, Cause.PREEMPTED])
        error = f"attempt {lease.epoch} on {self.name}"
        hold.ending = True
        try:
            answer = self._caller.call("fail", lambda: self._api.fail(lease, cause, error, {}), accepted=OVER)
        except StrataError as refusal:
            self._expected.refused(key, "the failure", str(refusal.code))
            return
        self._expected.failed(key, cause, error, answer)
        if self._chance(self._behaviour.repeats):
            again = self._caller.call("fail again", lambda: self._api.fail(lease, cause, error, {}))
            # Once the job has gone on to its next attempt, or was cancelled, the answer shows that.
            if again.epoch == lease.epoch and again.status is not JobStatus.CANCELLED:
                self._same(key, "fail", _of(answer), _of(again))

    def _same(self, key: Key, what: str, first: object, second: object) -> None:
        self._expected.counted[f"{what} repeated"] += 1
        if first != second:
            self._expected.problem(f"{what} of {key[0][:14]}/{key[1]} was answered {first}, and then {second}")

    def _upload(self, lease: LeaseGiven, content: bytes, kind: ArtifactKind) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        file = ArtifactFile(path="result.bin", size=len(content), sha256=sha256, chunks=(sha256,))
        manifest = ArtifactManifest(files=(file,))
        lineage = Lineage(kind=kind, model=lease.spec.model, mode=lease.spec.mode)

        def upload() -> str:
            for chunk in self._api.missing(manifest.chunks()):
                self._put(chunk, content)
            return self._api.commit(lease, manifest, lineage)

        return self._caller.call("upload", upload, accepted=OVER)

    def _put(self, chunk: MissingChunk, content: bytes) -> None:
        try:
            self._api.put_chunk(chunk, content)
        except StrataError as error:
            if error.code not in (Code.CONFLICT, Code.PRECONDITION):
                raise
            # More or less of it arrived than the sender knows: ask what is missing, and go on from there.
            self._expected.counted["uploads resumed"] += 1
            raise StrataError(Code.UNAVAILABLE, error.message) from error

    # Renew

    def _renew(self) -> None:
        every_s = self._lease_s / 4
        rested_s = time.monotonic()
        while not self._stopping.wait(max(0.0, rested_s + every_s - time.monotonic())):
            if time.monotonic() - rested_s > self._lease_s / 2:
                # This machine did not let the thread run: not the hub's fault.
                self._excuse()
            self._send_heartbeats()
            rested_s = time.monotonic()

    def _send_heartbeats(self) -> None:
        held = self._all_held()
        if held:
            for each in self._heartbeat_caller.call(
                "renew", lambda: HubApi(self._heartbeat_client).renew(held).verdicts
            ):
                self._expected.verdict(self.name, each)

    def _all_held(self) -> tuple[LeaseHeld, ...]:
        with self._lock:
            return tuple(
                LeaseHeld(job_id=job_id, epoch=epoch, running=True)
                for job_id, epoch in self._held
                if (job_id, epoch) not in self._silent
            )

    def _excuse(self) -> None:
        with self._lock:
            for key in self._held:
                self._expected.mark_silent(key)
            self._expected.counted["excused"] += len(self._held)

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share


def _of(job: Job) -> tuple[object, ...]:
    return (job.id, job.status, job.epoch, job.host_id, job.artifact, job.reason, job.not_before_s)
