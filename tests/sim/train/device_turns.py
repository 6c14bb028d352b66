"""One seed of ranks and an engine that share devices: the real `DeviceTurns` on the real state machine, and processes
that die, start and are restarted between any two of its steps. Violation: both sides are awake at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.train.core import commands, ops
from strata.train.core.client_commands import AddEndpoint
from strata.train.core.device_turns import may_sleep, reject_reason
from strata.train.core.inputs import (
    ClientCommand,
    CompleteDispatch,
    CompletePush,
    Decision,
    Input,
    RanksAttached,
    TakeTurn,
)
from strata.train.device_permit import DevicePermit
from strata.train.endpoints.engine_report import EngineCondition, EngineReport
from strata.train.orchestrator import device_turns
from strata.train.orchestrator.device_turns import DeviceTurns
from tests.core.train.machines import settings
from tests.core.train.servers import TENANT, Server, step
from tests.core.train.test_publishing import SAVED

ENGINE: Final = "engine-0"
STEPS: Final = 150
Seam = tuple[Any, str, Any]


class CrashedError(Exception):
    """The orchestrator died."""


class ViolatedError(Exception):
    pass


class World:
    """The devices, both sides, what starts them, and the journal. Each await of the orchestrator is a step of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.settings = settings(inference_engine="vllm", inference_share_devices="turns", inference_turn_s=5.0)
        self.server = Server(
            route=True, push=True, engines=(ENGINE,), device_turn_s=self.settings.inference.turn_s, max_running=1
        )
        self.permit: DevicePermit | None = None
        """The file, as is the report."""
        self.groups = 0
        self.group = ""
        """The group of ranks that has a process; it is loading until it is up."""
        self.ranks_up = self.ranks_asleep = False
        self.ranks_cleared = self.engine_cleared = False
        """Who starts them has read the permit, and is about to start them."""
        self.engine = self.engine_up = self.engine_asleep = False
        self.attached: SimpleNamespace | None = None
        self.starts = 0
        self.report("waiting")
        self.turns = 0
        self.healed = False

    # Processes

    def report(self, condition: EngineCondition) -> None:
        seen = self.permit if condition == "waiting" else None
        number = None if seen is None else seen.number
        self.reported = EngineReport(condition=condition, reason="", starts=self.starts, since_s=0.0, permit=number)

    def write_permit(self, _: Any, permit: DevicePermit) -> None:
        self.permit = permit

    def may_start(self, side: str) -> bool:
        return self.permit is not None and self.permit.side == side

    def move(self) -> None:
        """Something happens, or nothing, while the orchestrator waits."""
        chance = self.rng.random()
        if not self.healed and chance < 0.04:
            self.group, self.ranks_up, self.ranks_asleep = "", False, False
        elif not self.healed and chance < 0.08:
            self.engine = self.engine_up = self.engine_asleep = False
        elif not self.healed and chance < 0.11:
            raise CrashedError
        for act in self.rng.sample([self._supervise_ranks, self._supervise_engine, self._attach, self._work], 4):
            if self.rng.random() < 0.4:
                act()
        self.check()

    def check(self) -> None:
        if self.group and not self.ranks_asleep and self.engine and not self.engine_asleep:
            raise ViolatedError("ranks and engine are awake at once")

    def _supervise_ranks(self) -> None:
        """As `single_node`: reads the permit when its group is dead, then forks the next one, which is awake."""
        if self.group:
            self.ranks_up = True
        elif self.ranks_cleared:
            self.groups += 1
            self.group, self.ranks_cleared = f"group-{self.groups}", False
        else:
            self.ranks_cleared = self.may_start("ranks")

    def _supervise_engine(self) -> None:
        """As `EngineSupervisor`."""
        if self.engine:
            if not self.engine_up:
                self.engine_up = True
                self.report("ready")
        elif self.engine_cleared:
            self.starts += 1
            self.engine, self.engine_cleared = True, False
            self.report("starting")
        elif self.may_start("engines"):
            self.engine_cleared = True
        else:
            self.report("waiting")

    def _attach(self) -> None:
        """As the orchestrator's sessions."""
        state = self.server.state
        if self.attached is not None and self.attached.group != self.group:
            self.attached = None
        elif self.attached is None and self.ranks_up and not reject_reason(state, self.group):
            self.attached = SimpleNamespace(group=self.group)
            self.server.ask(RanksAttached(self.group))
        elif self.attached is None and self.ranks_up:
            self.group, self.ranks_up, self.ranks_asleep = "", False, False

    def _work(self) -> None:
        """Clients train and have weights saved; ranks compute, and wake for it; the engine takes what is pushed."""
        server = self.server
        server.now_s += self.rng.random()
        model = server.state.models[self.model]
        if len(server.state.scheduler) < 2 and self.rng.random() < 0.3:
            sequence = model.line.wanted
            synced = ops.SyncWeights(self.model, sequence, f"w{sequence}")
            server.accept(step(self.model, sequence) if self.rng.random() < 0.7 else synced)
        if self.attached is not None and self.attached.group == self.group:
            dispatch = server.dispatch()
            if dispatch is not None:
                self.ranks_asleep = False
                server.ask(CompleteDispatch(dispatch.number, [SAVED] * len(dispatch.future_ids), server.now_s))
        if server.state.may_begin("engines") and self.engine_up and not self.engine_asleep:
            for path in list(server.state.pushes):
                server.ask(CompletePush(path, (), server.now_s))

    # What the orchestrator uses

    async def pause(self) -> None:
        self.move()
        await asyncio.sleep(0)

    async def commit(self, request: Input) -> Decision:
        await self.pause()
        decision = self.server.ask(request)
        self.turns += isinstance(request, TakeTurn) and bool(decision.facts)
        await self.pause()
        return decision

    async def request(self, work: commands.Requested, timeout_s: float) -> commands.HealthReply:
        del timeout_s
        assert isinstance(work, commands.YieldDevices)
        group = self.group
        await self.pause()
        if self.group != group or not self.ranks_up:
            raise StrataError(Code.UNAVAILABLE, "the connection to rank 0 has ended")
        self.ranks_asleep = True
        await self.pause()
        return commands.HealthReply(1, 1, (0,))

    async def sleep_engine(self, name: str) -> None:
        await self._connected()
        self.engine_asleep = True
        await self.pause()

    async def wake_engine(self, name: str) -> None:
        await self._connected()
        self.engine_asleep = False
        await self.pause()

    async def is_engine_asleep(self, name: str) -> bool:
        await self._connected()
        return self.engine_asleep

    async def _connected(self) -> None:
        await self.pause()
        if not self.engine_up:
            raise StrataError(Code.UNAVAILABLE, "the engine cannot be reached")

    # A run

    async def run(
        self, restart_engine: Callable[[str], None] = lambda _: None, *, steps: int = STEPS, demands_turns: bool = True
    ) -> None:
        """Restarts the orchestrator whenever it dies. In the end nobody dies any more, and the devices pass on."""
        self.model, turns, before = self._make_model(), self._orchestrator(restart_engine), 0
        for number in range(steps):
            if number == steps // 2:
                self.healed, before = True, self.turns
            try:
                await turns.run_once()
                self.move()
            except CrashedError:
                self.attached = None
                turns = self._orchestrator(restart_engine)
        if demands_turns and self.turns < before + 2:
            raise ViolatedError(f"a side starves: {self.server.state.current_turn}")

    def _make_model(self) -> str:
        self.server.ask(RanksAttached("group-0"))
        self.server.ask(ClientCommand(TENANT, AddEndpoint(ENGINE, f"unix:{ENGINE}", "vllm"), 0.0))
        return self.server.model()

    def _orchestrator(self, restart_engine: Callable[[str], None]) -> DeviceTurns:
        async def sleep(seconds: float) -> None:
            await self.pause()

        world = self

        class Store:
            state = property(lambda _: world.server.state)
            replayed = True
            clock = SimpleNamespace(
                wall_s=lambda: world.server.now_s, monotonic_s=lambda: world.server.now_s, sleep=sleep
            )
            dispatchable = asyncio.Event()
            commit = staticmethod(world.commit)
            wait_durable = staticmethod(world.pause)

        class Context:
            store = Store()
            settings = world.settings
            backend = SimpleNamespace(request=world.request)
            attached = property(lambda _: world.attached)

        class Shared:
            asleep = property(lambda _: set() if world.engine_up and not world.engine_asleep else {ENGINE})
            sleep = staticmethod(world.sleep_engine)
            wake = staticmethod(world.wake_engine)
            is_asleep = staticmethod(world.is_engine_asleep)

        publisher = SimpleNamespace(is_idle=True, shared=Shared())
        context: Any = Context()
        ports: Any = publisher
        return DeviceTurns(context, ports, restart_engine)


@contextmanager
def seams(world: World, without: str = "") -> Iterator[None]:
    """The files of a world in memory, and a safeguard removed."""
    replaced: list[Seam] = [
        (device_turns, "write_permit", world.write_permit),
        (device_turns, "read_report", lambda *_: world.reported),
        *([SAFEGUARDS[without]] if without else []),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, mine in replaced:
        setattr(owner, name, mine)
    try:
        yield
    finally:
        for (owner, name, _), real in zip(replaced, before, strict=True):
            setattr(owner, name, real)


def run_seed(seed: int, without: str = "") -> str | None:
    """Returns the violation that this seed finds, with every safeguard or without one of them."""
    world = World(seed)
    with seams(world, without):
        try:
            asyncio.run(world.run())
        except ViolatedError as violation:
            return str(violation)
    return None


# Safeguards


async def _not_taken_back(self: DeviceTurns, number: int, side: Any) -> None:
    if side:
        await _grant(self, number, side)


async def _any_waits(self: DeviceTurns, name: str, number: int) -> bool:
    return self._condition(name) == "waiting" or await _sleeps(self, name, number)


async def _unconfirmed(self: DeviceTurns, name: str, number: int) -> bool:
    await _sleeps(self, name, number)
    return True


async def _ranks_unasked(self: DeviceTurns, turn: Any) -> None:
    attached = self._context.attached
    if attached is None:
        await _have_ranks_leave(self, turn)
    elif may_sleep(self._store.state):
        await self._grant(turn.number, "")
        await self._take(turn, attached.group)


def _starts_at_once(self: World, side: str) -> bool:
    return True


_grant = DeviceTurns._grant
_sleeps = DeviceTurns._sleeps
_have_ranks_leave = DeviceTurns._have_ranks_leave
SAFEGUARDS: Final[dict[str, Seam]] = {
    "the permit is taken back before a side is asked to sleep": (DeviceTurns, "_grant", _not_taken_back),
    "an engine that waits counts only under the permit of the request": (DeviceTurns, "_sleeps", _any_waits),
    "an engine confirms that it sleeps": (DeviceTurns, "_sleeps", _unconfirmed),
    "ranks confirm that they sleep": (DeviceTurns, "_have_ranks_leave", _ranks_unasked),
    "processes start with a permit": (World, "may_start", _starts_at_once),
}
