"""The agent as a process: registers, claims, renews, and goes in good order. What an attempt does is in `attempt`."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.loop import every
from strata.fleet import wire
from strata.fleet.agent import gpu, identity, person
from strata.fleet.agent.attempt import Attempt
from strata.fleet.agent.patience import BACKOFF, TRANSIENT, Patience, Threads, sleeps, within
from strata.fleet.agent.prepare import Site, prune
from strata.fleet.agent.probe import Probed, probe
from strata.fleet.agent.selftest import room
from strata.fleet.agent.state import Claiming, Record, State, Stop
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import Cause

UPKEEP_S: Final = 10.0
PROBE_EVERY_S: Final = 600.0
LAST_WORDS_S: Final = 20.0
"""After the last child has ended: so long may the hub be away before the rest is left to the next agent."""
_MAX_AT_ONCE: Final = 16
_log = log.get(__name__)


class Agent:
    def __init__(self, site: Site, state: State, clock: Clock, capability: Capability) -> None:
        self._site = site
        self._settings = site.settings
        self._state = state
        self._clock = clock
        self._capability = capability
        self._threads = Threads()
        self._attempts: dict[str, Attempt] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._now = asyncio.Event()
        """Told to stop a second time."""
        self._on_stop = site.settings.on_stop
        self._changed = asyncio.Event()
        """Free slots, perhaps: an attempt is over, or the machine is nobody's again."""
        self._beat_now = asyncio.Event()
        self._patience = Patience(self._stopping)
        self._renew_every_s = 10.0
        self._probed_at_s = clock.monotonic_s()
        self._held_back = ""
        """Why nothing is claimed at the moment."""

    async def run(self) -> None:
        """Until told to stop and done with it."""
        await self._register()
        await self._adopt()
        await self._look_around()
        loops: list[Coroutine[Any, Any, None]] = [
            self._forever(self._renew_once),
            self._forever(self._claim_once),
            every(UPKEEP_S, self._upkeep_once, clock=self._clock),
        ]
        tasks = [asyncio.create_task(each) for each in loops]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                # A defect ended a loop. Better an agent that is started again than one that does half of its work.
                await asyncio.gather(*(task for task in tasks if task.done()))
            await self._drain()
        finally:
            stopping.cancel()
            for task in (*tasks, *self._tasks.values()):
                task.cancel()
            self._site.calls.client.close()
            await asyncio.wait([*tasks, *self._tasks.values()])
            self._threads.close()

    def stop(self) -> None:
        """Once: as `on_stop` says. Twice: at once."""
        if self._stopping.is_set():
            self._now.set()
        self._stopping.set()
        self._changed.set()

    def hand_over(self) -> None:
        """Go now, and leave the jobs to the agent that comes next; one that stops already stops as it was told."""
        if not self._stopping.is_set():
            self._on_stop = "leave"
            self.stop()

    # Registering

    async def _register(self) -> None:
        reply = await self._patience.ask(
            self._threads.work, "register", lambda: self._site.calls.register(self._capability)
        )
        self._renew_every_s = reply.renew_every_s
        _log.info("registered", host=reply.name, state=reply.state, reason=reply.state_reason)

    async def _adopt(self) -> None:
        """Go on with what an earlier agent left. Whether it is still wanted, the first renewal will say."""
        records = await within(self._threads.work, lambda: list(self._state.records()))
        failpoint("agent.adopt.read")
        await within(self._threads.work, prune, self._site, {each.key for each in records}, self._clock.wall_s())
        for record in records:
            _log.info("goes on with an attempt", job=record.lease.job_id, epoch=record.lease.epoch, phase=record.phase)
            self._begin(record)
        failpoint("agent.adopt.begun")
        self._beat_now.set()

    # Claiming

    async def _claim_once(self) -> None:
        self._changed.clear()
        claiming = self._state.claiming() or self._next_claim()
        if claiming is None or self._stopping.is_set():
            await self._changed.wait()
            return
        self._state.claim(claiming)
        failpoint("agent.claim.written")
        try:
            leases = await within(self._threads.claims, self._site.calls.claim, claiming, self._settings.poll_s)
        except StrataError as error:
            if error.code not in TRANSIENT:
                # It will never be answered; the next one has another name.
                self._state.claimed()
            raise
        failpoint("agent.claim.replied")
        for lease in leases:
            self._take(lease)
        failpoint("agent.claim.taken")
        # Only now: a crash before this claims the same again, and what is known already is not begun twice.
        self._state.claimed()

    def _next_claim(self) -> Claiming | None:
        free = self._settings.slots - sum(each.record.lease.spec.needs.slots for each in self._attempts.values())
        if free <= 0 or self._held_back:
            return None
        claim_id = f"claim-{secrets.token_hex(12)}"
        return Claiming(claim_id=claim_id, count=min(free, _MAX_AT_ONCE), slots=free)

    def _take(self, lease: wire.LeaseGiven) -> None:
        held = [each.record.devices or () for each in self._attempts.values()]
        devices = gpu.choose(self._capability.gpus, held, lease.spec.needs, slots=self._settings.slots)
        record = Record(lease=lease, claimed_at_s=self._clock.wall_s(), devices=devices)
        if self._state.add(record):
            _log.info("claimed", job=lease.job_id, epoch=lease.epoch, label=lease.spec.label)
            self._begin(record)

    def _begin(self, record: Record) -> None:
        attempt = Attempt(record, self._state, self._site, self._threads, told=self._beat_now.set)
        task = asyncio.create_task(attempt.run(), name=record.key)
        self._attempts[record.key] = attempt
        self._tasks[record.key] = task
        task.add_done_callback(lambda _: self._over(record.key, task))

    def _over(self, key: str, task: asyncio.Task[None]) -> None:
        del self._attempts[key], self._tasks[key]
        if not task.cancelled() and task.exception() is not None:
            # A defect: the record stays, and the next start of the agent goes on with it.
            _log.error("an attempt met a defect", attempt=key, reason=repr(task.exception()))
        self._changed.set()

    # Renewing

    async def _renew_once(self) -> None:
        self._beat_now.clear()
        held = tuple(
            wire.LeaseHeld(job_id=each.record.lease.job_id, epoch=each.record.lease.epoch, running=each.running)
            for each in self._attempts.values()
        )
        verdicts = await within(self._threads.beats, self._site.calls.renew, held)
        for verdict in verdicts:
            if verdict.verdict == "stop":
                self._obey(verdict)
        await sleeps(self._beat_now, self._renew_every_s)

    def _obey(self, verdict: wire.Verdict) -> None:
        for attempt in self._attempts.values():
            lease = attempt.record.lease
            if (lease.job_id, lease.epoch) != (verdict.job_id, verdict.epoch) or attempt.told_to_drop:
                continue
            if verdict.cause == "ended" and attempt.over:
                # Perhaps by our own report, whose reply was lost: it is sent again and gets the same answer.
                continue
            # Somebody cancelled it, as a rule: what was asked for is no warning.
            note = _log.info if verdict.cause == "ended" else _log.warning
            note("must stop", job=lease.job_id, epoch=lease.epoch, reason=verdict.reason)
            stop = Stop(cause=Cause.CANCELLED, reason=verdict.reason, drop=True)
            attempt.stop(stop, self._settings.grace_s if verdict.cause == "ended" else 0.0)

    # Upkeep

    async def _upkeep_once(self) -> None:
        await self._renew_certificate()
        await self._look_around()
        if self._clock.monotonic_s() - self._probed_at_s >= PROBE_EVERY_S:
            self._probed_at_s = self._clock.monotonic_s()
            found = await within(self._threads.work, self.probe)
            if found.capability != self._capability:
                self._capability = found.capability
                await self._register()

    async def _renew_certificate(self) -> None:
        folder, now_s = self._settings.state_folder, self._clock.wall_s()
        member = await within(self._threads.work, identity.membership, folder)
        if member.renewal_due(now_s):
            client = self._site.calls.client
            renewed = await within(self._threads.work, identity.renew_certificate, folder, client, now_s)
            _log.info("the certificate is renewed", valid_for_s=round(renewed.valid_for_s))

    async def _look_around(self) -> None:
        """Whether there is room, and whether somebody wants the machine back."""
        space = await within(self._threads.work, room, self._settings.work_folder, self._settings.min_free_gib)
        wanted = ""
        if self._settings.yield_to_people != "never":
            ours = [pid for each in self._attempts.values() if (pid := each.waiter_pid)]
            wanted = person.wanted_back(await within(self._threads.work, person.observe, self._site.environ, ours))
        self._hold_back("" if space.ok else space.reason, wanted)

    def _hold_back(self, crowded: str, wanted: str) -> None:
        reason = crowded or wanted
        if reason != self._held_back:
            _log.info("claims nothing" if reason else "claims again", reason=reason)
        self._held_back = reason
        if not reason:
            self._changed.set()
        if wanted and self._settings.yield_to_people == "jobs":
            for attempt in self._attempts.values():
                attempt.stop(Stop(cause=Cause.PREEMPTED, reason=wanted), self._settings.grace_s)

    def probe(self) -> Probed:
        settings = self._settings
        return probe(
            self._site.environ, interpreter=settings.interpreter, source=settings.source, labels=settings.labels
        )

    # Going

    async def _drain(self) -> None:
        how = self._on_stop
        _log.info("stopping", how=how, attempts=len(self._attempts))
        if how == "leave":
            return
        if how == "preempt":
            self._stop_all(self._settings.grace_s)
        await self._until(lambda: all(each.over for each in self._attempts.values()), self._now)
        if self._now.is_set():
            self._stop_all(0.0)
            await self._until(lambda: all(each.over for each in self._attempts.values()), asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._until(lambda: not self._attempts, self._now)
        if self._attempts:
            _log.warning("reports are left to the next agent", attempts=len(self._attempts))

    def _stop_all(self, grace_s: float) -> None:
        for attempt in self._attempts.values():
            attempt.stop(Stop(cause=Cause.PREEMPTED, reason="the agent of this host was stopped"), grace_s)

    async def _until(self, done: Callable[[], bool], interrupted: asyncio.Event) -> None:
        while not done() and not interrupted.is_set():
            await sleeps(interrupted, 0.1)

    async def _forever(self, run_once: Callable[[], Awaitable[None]]) -> None:
        """Again at once; after a failure a little later. `every` is for what has an interval of its own."""
        failures = 0
        while True:
            try:
                await run_once()
                failures = 0
            except (StrataError, OSError) as error:
                failures += 1
                if failures == 1 or failures % 20 == 0:
                    _log.warning("will try again", what=run_once.__name__, failures=failures, reason=str(error))
                if isinstance(error, StrataError) and error.code is Code.NOT_FOUND:
                    # The hub does not know this host any more, perhaps since it was restored from a backup.
                    await self._register()
                await asyncio.sleep(min(BACKOFF.delay_s(failures, 0.5), self._renew_every_s))


def handle_signals(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if sys.platform == "win32":
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(agent.stop))
        else:
            loop.add_signal_handler(number, agent.stop)
    if sys.platform != "win32":
        loop.add_signal_handler(signal.SIGUSR1, agent.hand_over)
