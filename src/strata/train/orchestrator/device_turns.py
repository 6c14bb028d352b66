"""`DeviceTurns`: carries out the turns of ranks and engines on shared devices: takes back the permit to start, has the
side that leaves sleep, confirms it to the state machine, wakes the other; and what happens when one of them is dead.

Each run looks at the journaled turn alone and does what is missing, so the next leader goes on after any death:

1. The side that leaves has nothing left to do. It is not asked before.
2. The permit to start is taken back, so that no process starts from here on.
3. The side that leaves is asked to sleep, and confirms it. Ranks that are lost get the permit again, because nothing
   tells a dead group from one that lost its connection: they start, replay, and are asked again. An engine that is dead
   waits to start under the permit of this request, and its launcher says so; that counts as asleep.
4. `DeviceTurnTaken` is durable.
5. The other side gets the permit, and is woken: engines here, ranks before their next dispatch (`RankSession`).

A process that is awake out of its turn is put to sleep (an engine), or not used and shut down (ranks).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Literal

from strata.base import log
from strata.base.errors import StrataError
from strata.train.core import commands
from strata.train.core.device_turns import may_sleep
from strata.train.core.facts import DeviceTurnRequested
from strata.train.core.inputs import RequestTurn, TakeTurn
from strata.train.core.state import DeviceSide, DeviceTurn
from strata.train.device_permit import DevicePermit, write_permit
from strata.train.endpoints.engine_report import read_report
from strata.train.endpoints.publisher import Publisher
from strata.train.orchestrator.rank_session import OrchestratorContext

TURN_S: Final = 0.1
"""Time between two runs."""
CHECK_S: Final = 2.0
"""Time between two checks that engines sleep while ranks have the devices."""
STUCK_S: Final = 60.0
"""An engine that is ready and has not done for so long what it was asked for is restarted."""
_log = log.get(__name__)


class DeviceTurns:
    def __init__(
        self, context: OrchestratorContext, publisher: Publisher, restart_engine: Callable[[str], None]
    ) -> None:
        self._context = context
        self._store = context.store
        self._publisher = publisher
        self._restart_engine = restart_engine
        self._engines = context.settings.inference.engines
        self._permit: DevicePermit | None = None
        """What this leader wrote last."""
        self._checked_s = float("-inf")
        self._failing_since_s: dict[str, float] = {}
        """Engines that do not sleep or wake, and since when."""

    async def run_once(self) -> None:
        store = self._store
        decision = await store.commit(RequestTurn(store.clock.wall_s(), self._starting()))
        for fact in decision.facts:
            if isinstance(fact, DeviceTurnRequested):
                _log.info("device_turn_requested", number=fact.number, side=fact.side, reason=fact.reason)
        turn = store.state.current_turn
        if turn is None:
            return
        if not turn.leaving:
            await self._settle(turn)
        elif turn.side == "ranks":
            await self._have_ranks_leave(turn)
        else:
            await self._have_engines_leave(turn)

    def _starting(self) -> frozenset[DeviceSide]:
        sides: set[DeviceSide] = set()
        if self._context.attached is None:
            sides.add("ranks")
        if any(self._condition(name) in ("waiting", "starting", "restarting") for name in self._engines):
            sides.add("engines")
        return frozenset(sides)

    async def _settle(self, turn: DeviceTurn) -> None:
        """The side that has the devices may start, and engines are asleep or awake as it says."""
        await self._grant(turn.number, turn.side)
        now_s = self._store.clock.monotonic_s()
        if turn.side == "engines":
            asleep = [name for name in self._engines if name in self._publisher.shared.asleep]
            await asyncio.gather(*(self._wake(name) for name in asleep))
        elif now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            await asyncio.gather(*(self._keep_asleep(name) for name in self._engines))

    async def _have_ranks_leave(self, turn: DeviceTurn) -> None:
        context, store = self._context, self._store
        attached = context.attached
        if attached is None:
            await self._grant(turn.number, "ranks")
            return
        if not store.replayed or not may_sleep(store.state):
            return
        await self._grant(turn.number, "")
        try:
            reply = await context.backend.request(commands.YieldDevices(), context.settings.limits.operation_timeout_s)
        except StrataError as error:
            _log.warning("ranks_did_not_leave_devices", reason=str(error))
            return
        if reply.failure:
            _log.error("ranks_did_not_leave_devices", reason=reply.failure)
            await store.clock.sleep(CHECK_S)
            return
        await self._take(turn, attached.group)

    async def _have_engines_leave(self, turn: DeviceTurn) -> None:
        if not may_sleep(self._store.state) or not self._publisher.is_idle:
            # Samples of a leader that died end there.
            await self._settle(turn)
            return
        await self._grant(turn.number, "")
        if all(await asyncio.gather(*(self._sleeps(name, turn.number) for name in self._engines))):
            await self._take(turn, "")

    async def _take(self, turn: DeviceTurn, group: str) -> None:
        decision = await self._store.commit(TakeTurn(turn.number, self._store.clock.wall_s(), group))
        if decision.facts:
            self._checked_s = float("-inf")
            to = "engines" if turn.side == "ranks" else "ranks"
            _log.info("device_turn_taken", number=turn.number, side=to, group=group)
            self._store.dispatchable.set()

    async def _grant(self, number: int, side: Literal["", "ranks", "engines"]) -> None:
        permit = DevicePermit(number=number, side=side)
        if permit != self._permit:
            # What it follows from has to outlive this process.
            await self._store.wait_durable()
            await asyncio.to_thread(write_permit, self._context.settings, permit)
            self._permit = permit

    # Engines

    def _condition(self, name: str) -> str:
        try:
            report = read_report(self._context.settings, name)
        except (StrataError, OSError):
            return ""
        return "" if report is None else report.condition

    async def _sleeps(self, name: str, number: int) -> bool:
        """Says whether an engine confirms that it sleeps, or its launcher that it is dead and stays so."""
        try:
            report = read_report(self._context.settings, name)
            if report is not None and report.condition == "waiting":
                return report.permit == number
            await self._publisher.shared.sleep(name)
        except (StrataError, OSError) as error:
            self._fail(name, error)
            return False
        self._failing_since_s.pop(name, None)
        return True

    async def _wake(self, name: str) -> None:
        """One that is dead starts by itself, now that it may."""
        try:
            await self._publisher.shared.wake(name)
        except StrataError as error:
            self._fail(name, error)
        else:
            self._failing_since_s.pop(name, None)

    async def _keep_asleep(self, name: str) -> None:
        """Have an engine that is awake in the turn of the ranks sleep. One that does not reply has no process, or its
        supervisor kills it."""
        try:
            if await self._publisher.shared.is_asleep(name):
                return
            _log.error("engine_awake_out_of_turn", engine=name)
            await self._publisher.shared.sleep(name)
        except StrataError as error:
            _log.debug("engine_not_checked", engine=name, reason=str(error))

    def _fail(self, name: str, error: StrataError | OSError) -> None:
        now_s = self._store.clock.monotonic_s()
        since_s = self._failing_since_s.setdefault(name, now_s)
        _log.debug("engine_did_not_turn", engine=name, reason=str(error))
        if self._condition(name) != "ready":
            self._failing_since_s[name] = now_s
        elif now_s - since_s >= STUCK_S:
            self._failing_since_s[name] = now_s
            self._restart_engine(name)
