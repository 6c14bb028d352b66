"""The life of one attempt on its host: prepare, run, watch, report, clean up; from wherever an earlier agent left it.

What is on the disk says how far it is, and each step can be done again. The report comes last: first all of the log and
the metrics, then the files, then `complete` or `fail`; while the hub is away it waits, and survives this agent.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet import wire
from strata.fleet.agent import child, workdir
from strata.fleet.agent.checkpoints import newest
from strata.fleet.agent.outcome import outcome_of
from strata.fleet.agent.patience import BACKOFF, TRANSIENT, Patience, Threads, sleeps, within
from strata.fleet.agent.prepare import Site, prepare
from strata.fleet.agent.ship import Shipper, last_metrics, tail_of
from strata.fleet.agent.sources import code_of
from strata.fleet.agent.state import Outcome, Phase, Record, State, Stop
from strata.fleet.agent.transfer import upload
from strata.fleet.agent.workdir import Place
from strata.fleet.artifacts.files import Tree
from strata.fleet.artifacts.manifest import Kind, Lineage
from strata.fleet.core.job import Cause

LOOK_S: Final = 0.2
SHIP_S: Final = 0.5
FAREWELL_S: Final = 10.0
"""How long the rest of a log is sent for an attempt that nobody waits for."""
END_S: Final = 10.0
"""How long a child may take to be gone that this host cannot watch any longer."""
_ROUNDS: Final = 3
_MAX_ERROR: Final = 65_536
_OVER: Final = frozenset({Code.STALE, Code.NOT_FOUND, Code.CONFLICT})
"""What the next renewal will say as well, in so many words."""
_OF_THE_SOURCE: Final = frozenset(
    {
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.EILSEQ,
        errno.ELOOP,
        errno.EACCES,
        errno.EPERM,
        errno.ENOTDIR,
        errno.EISDIR,
    }
)
"""What names and links in a source can bring about on a host that is well."""
_log = log.get(__name__)


class Attempt:
    def __init__(
        self, record: Record, state: State, site: Site, threads: Threads, *, told: Callable[[], None] = lambda: None
    ) -> None:
        self.record = record
        self._state = state
        self._site = site
        self._threads = threads
        self._told = told
        """Called when the child has started: the hub should hear of it soon."""
        self._folder = state.folder_of(record)
        self._place = Place(site.attempts / record.key)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()
        self._unwanted = asyncio.Event()
        """Nobody waits for a report: give up what is being tried."""
        self._patience = Patience(self._unwanted)
        lease = record.lease
        self._log = Shipper(site.calls, lease, "log", self._folder / child.LOG)
        self._metrics = Shipper(site.calls, lease, "metrics", self._place.metrics)

    @property
    def running(self) -> bool:
        outcome = self.record.outcome
        return self.record.phase is Phase.RUNNING or (outcome is not None and "exit" in outcome.facts)

    @property
    def over(self) -> bool:
        """The child has ended, or there was none; only the report is left."""
        return self.record.phase is Phase.ENDED

    @property
    def told_to_drop(self) -> bool:
        """In this life: an agent that died after it had written it down may not have ended the child."""
        return self._unwanted.is_set()

    @property
    def waiter_pid(self) -> int:
        pids = child.pids(self._folder)
        return 0 if pids is None else pids.waiter

    async def run(self) -> None:
        """Until the hub knows the outcome and nothing is left of it here."""
        try:
            if self.record.phase is Phase.PREPARING:
                await self._prepare()
            if self.record.phase in (Phase.STARTING, Phase.RUNNING):
                await self._watch()
            outcome = self.record.outcome
            assert outcome is not None, "an attempt that is over has an outcome"
        except Exception as error:  # noqa: BLE001 - the outermost handler of an attempt: said now, another host takes it
            # A disk that is full or gone, or a defect of ours: in either case nothing the job has done.
            _log.exception("an attempt met a broken host", job=self.record.lease.job_id)
            await self._end_for_sure()
            outcome = Outcome(cause=Cause.INFRA, error=f"the host failed: {error!r}")
        await self._report(outcome)
        self._clean()

    def stop(self, stop: Stop, grace_s: float) -> None:
        """End the child, for this reason. Said twice, the first reason counts, unless the second drops the attempt."""
        known = self.record.stop
        if known is None or (stop.drop and not known.drop):
            self._save(stop=stop)
            failpoint("agent.stop.written")
        if self.record.phase is Phase.ENDED and not stop.drop:
            return
        if stop.drop:
            self._unwanted.set()
        self._end_child(grace_s)

    def _end_child(self, grace_s: float) -> None:
        if self._folder.exists():
            child.stop(self._folder, grace_s)

    async def _end_for_sure(self) -> None:
        """Before anybody else hears that the job is free: also on a disk that does not even take the word to stop."""
        for _ in range(round(END_S / LOOK_S)):
            with suppress(OSError, StrataError):
                self._end_child(0.0)
            with suppress(OSError, StrataError):
                child.end_leftovers(self._folder)
            if not child.is_watched(self._folder, self._process):
                return
            await asyncio.sleep(LOOK_S)
        _log.error("a child cannot be ended", job=self.record.lease.job_id)

    async def _prepare(self) -> None:
        lease = self.record.lease
        try:
            run = await self._patience.ask(
                self._threads.work,
                "prepare",
                lambda: prepare(self._site, lease, self._place, self.record.devices),
            )
        except StrataError as error:
            # A hub or a network that is away is waited for; what else is missing is missing on this host.
            cause = Cause.INFRA if error.code in TRANSIENT else Cause.SETUP_ERROR
            self._finish(self._unless_stopped(Outcome(cause=cause, error=f"cannot prepare: {error}")))
            return
        except OSError as error:
            if error.errno not in _OF_THE_SOURCE:
                raise
            self._finish(self._unless_stopped(Outcome(cause=Cause.SETUP_ERROR, error=f"cannot prepare: {error}")))
            return
        if self.record.stop is not None:
            self._finish(self._unless_stopped(Outcome(cause=Cause.INFRA)))
            return
        child.write(self._folder, run)
        self._save(phase=Phase.STARTING, code=code_of(lease.trainer) if lease.trainer else "")
        failpoint("agent.attempt.starting")
        self._process = child.start(self._folder)
        failpoint("agent.attempt.started")

    async def _watch(self) -> None:
        shipping = asyncio.create_task(self._ship_until_ended())
        try:
            seen = await self._until_over()
            tail = await within(self._threads.work, tail_of, self._folder / child.LOG)
            outcome = outcome_of(seen, tail, stop=self.record.stop, timeout_s=self.record.lease.spec.timeout_s)
            self._finish(outcome)
            failpoint("agent.attempt.ended")
        finally:
            self._ended.set()
            await shipping

    async def _until_over(self) -> child.Exit | child.Lost:
        while True:
            seen = child.look(self._folder, self._process)
            match seen:
                case child.Exit():
                    return seen
                case child.Lost():
                    child.end_leftovers(self._folder)
                    return seen
                case child.NotStarted() if self._process is None:
                    # An earlier agent died before, or just after, it started the waiter.
                    self._process = child.start(self._folder)
                case child.Running() if self.record.phase is not Phase.RUNNING:
                    failpoint("agent.attempt.seen")
                    self._save(phase=Phase.RUNNING)
                    self._told()
                case _:
                    pass
            await asyncio.sleep(LOOK_S)

    async def _ship_until_ended(self) -> None:
        failures = 0
        while not self._ended.is_set():
            try:
                moved = await within(self._threads.work, self._ship_some)
                await self._checkpoint()
                failures = 0
                await sleeps(self._ended, 0.0 if moved else SHIP_S)
            except StrataError as error:
                # Nothing is lost: it is all on the disk, and the report sends what is left.
                failures += 1
                if error.code not in TRANSIENT | _OVER:
                    _log.warning("cannot send what a job says", job=self.record.lease.job_id, reason=error.message)
                await sleeps(self._ended, BACKOFF.delay_s(failures, 0.5))

    def _ship_some(self) -> bool:
        moved = self._log.ship()
        return self._metrics.ship() or moved

    async def _checkpoint(self) -> None:
        """Send the newest one, if it is new. One that cannot be an artifact is skipped, and the job goes on."""
        name = newest(self._place.checkpoints, self.record.sent)
        if not name:
            return
        artifact = ""
        try:
            artifact = await within(self._threads.work, self._upload, ("checkpoints", name), Kind.CHECKPOINT)
        except StrataError as error:
            if error.code is not Code.INVALID:
                raise
            _log.warning("a checkpoint is not kept", job=self.record.lease.job_id, name=name, reason=error.message)
        self._save(sent=(*self.record.sent, name)[-100:], checkpoint=artifact or self.record.checkpoint)
        failpoint("agent.attempt.checkpointed")

    async def _report(self, outcome: Outcome) -> None:
        try:
            if outcome.drop or self._unwanted.is_set():
                await self._farewell()
                return
            await self._patiently("the log", lambda: self._log.ship(last=True))
            outcome = await self._ship_metrics(outcome)
            failpoint("agent.attempt.logged")
            await self._tell(outcome)
        except StrataError as error:
            # Stale, ended, unknown: somebody else has the last word, and said it.
            _log.warning("an attempt is dropped", job=self.record.lease.job_id, reason=error.message)

    async def _ship_metrics(self, outcome: Outcome) -> Outcome:
        """The outcome: a job that put a pipe or a link in place of its metrics has not completed."""
        try:
            await self._patiently("the metrics", lambda: self._metrics.ship(last=True))
        except StrataError as error:
            if error.code is not Code.INVALID:
                raise
            if outcome.cause is None:
                return Outcome(
                    cause=Cause.USER_ERROR, error=f"the metrics cannot be kept: {error}", facts=outcome.facts
                )
        return outcome

    async def _tell(self, outcome: Outcome) -> None:
        if outcome.cause is None:
            outcome = await self._complete(outcome)
        if outcome.cause is not None:
            await self._fail(outcome, outcome.cause)

    async def _complete(self, outcome: Outcome) -> Outcome:
        """The outcome it has in the end: a result that cannot be kept is no success."""
        metrics = await within(self._threads.work, last_metrics, self._place.metrics)
        for _ in range(_ROUNDS):
            try:
                artifact = await self._patiently("the result", lambda: self._upload(("output",), Kind.RESULT, metrics))
            except StrataError as error:
                if error.code is Code.STALE:
                    raise
                # Names that no other system could hold are the trainer's doing; the rest is ours.
                cause = Cause.USER_ERROR if error.code is Code.INVALID else Cause.INFRA
                return Outcome(cause=cause, error=f"the result cannot be kept: {error}", facts=outcome.facts)
            failpoint("agent.attempt.uploaded")
            if await self._completed(artifact, metrics, outcome):
                return outcome
        return Outcome(cause=Cause.INFRA, error="the hub loses the result again and again", facts=outcome.facts)

    async def _completed(self, artifact: str, metrics: dict[str, float], outcome: Outcome) -> bool:
        """Whether the hub has the artifact and took the report."""
        lease = self.record.lease
        request = wire.CompleteRequest(
            epoch=lease.epoch, artifact=artifact, metrics=metrics, facts=self._facts(outcome)
        )
        try:
            await self._patiently("complete", lambda: self._site.calls.complete(lease, request))
        except StrataError as error:
            if error.code is Code.PRECONDITION and artifact:
                return False
            raise
        failpoint("agent.attempt.completed")
        _log.info("an attempt is complete", job=lease.job_id, epoch=lease.epoch, artifact=artifact)
        return True

    async def _fail(self, outcome: Outcome, cause: Cause) -> None:
        """A last checkpoint is worth a try, for the next attempt; the report does not wait for it."""
        lease = self.record.lease
        try:
            await self._checkpoint()
        except (StrataError, OSError) as error:
            _log.warning("the last checkpoint stays here", job=lease.job_id, reason=str(error))
        error_text = outcome.error[:_MAX_ERROR]
        facts = self._facts(outcome)
        failpoint("agent.fail.before")
        await self._patiently("fail", lambda: self._site.calls.fail(lease, cause, error_text, facts))
        failpoint("agent.fail.told")
        _log.info("an attempt failed", job=lease.job_id, epoch=lease.epoch, cause=cause.value)

    def _facts(self, outcome: Outcome) -> dict[str, Any]:
        known = {"code": self.record.code, "checkpoint": self.record.checkpoint}
        return outcome.facts | {name: value for name, value in known.items() if value}

    def _upload(self, inside: tuple[str, ...], kind: Kind, metrics: dict[str, float] | None = None) -> str:
        return upload(
            self._site.calls,
            Tree(self._place.folder, inside, uid=self._site.uid),
            self.record.lease,
            self._lineage(kind, metrics or {}),
            wanted=lambda: not self._unwanted.is_set(),
        )

    async def _farewell(self) -> None:
        """The job is gone, but somebody may want to read why: what is left of the log, if the hub takes it at once."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await within(self._threads.work, lambda: self._log.ship(last=True))
        except (StrataError, TimeoutError) as error:
            _log.info("the end of a log stays here", job=self.record.lease.job_id, reason=str(error))

    async def _patiently(self, what: str, call: Callable[[], Any]) -> Any:
        return await self._patience.ask(self._threads.work, what, call)

    def _lineage(self, kind: Kind, metrics: dict[str, float]) -> Lineage:
        lease = self.record.lease
        parents = (lease.checkpoint,) if lease.checkpoint else ()
        return Lineage(
            kind=kind,
            model=lease.spec.model,
            mode=lease.spec.mode,
            metrics=metrics,
            code=self.record.code[:256],
            data=lease.spec.data[:256],
            parents=parents,
        )

    def _unless_stopped(self, outcome: Outcome) -> Outcome:
        stop = self.record.stop
        return outcome if stop is None else Outcome(cause=stop.cause, error=stop.reason, drop=stop.drop)

    def _finish(self, outcome: Outcome) -> None:
        self._save(phase=Phase.ENDED, outcome=outcome)

    def _save(self, **changes: Any) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)
        self._state.save(self.record)

    def _clean(self) -> None:
        self._state.remove(self.record)
        try:
            workdir.remove(self._place.folder)
        except StrataError as error:
            _log.warning("the folder of an attempt stays", job=self.record.lease.job_id, reason=error.message)
