"""One seed of the training server: orchestrators, ranks, API servers and a journal, tormented, healed and judged."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import arm, disarm_all
from strata.base.loop import RunOnce, every
from strata.train.core import model_options, ops
from strata.train.link import messages
from strata.train.orchestrator import orchestrator
from strata.train.orchestrator.maintenance import compaction, curve_file
from strata.train.orchestrator.orchestrator import EXPIRE_S, Orchestrator, rules_of
from strata.train.settings import (
    LimitSettings,
    ModelSettings,
    RankSettings,
    SamplingSettings,
    ServerSection,
    ServerSettings,
    SnapshotSettings,
)
from strata.train.status import queries, views
from tests.sim.train import ablation
from tests.sim.train.audit import Audit, audited
from tests.sim.train.clients import ROW_TOKENS, Caller, Session
from tests.sim.train.expected_state import ExpectedState
from tests.sim.train.links import Board, SimClient, SimLinks
from tests.sim.train.ranks import Trouble, run_ranks
from tests.sim.train.wires import TrainWorld
from tests.support.remote_journal import RemoteJournal, serve
from tests.support.simloop import PROCESS, Process
from tests.support.world import Faults

ORCHESTRATORS = ["orchestrator-1", "orchestrator-2"]
APIS = ["api-1", "api-2"]
TENANTS = ["alice", "bob", "carol"]
TORMENT_S = 12.0
CONVERGES_S = 240.0
CALL_S = 0.8
REPLY_TIMEOUT_S = 5.0
FAILPOINTS = [
    "journal.replica.before_commit",
    "train.orchestrator.answer_heard",
    "train.orchestrator.before_cut",
    "train.orchestrator.dispatch_durable",
    "train.orchestrator.dispatch_sent",
    "train.orchestrator.snapshot_heard",
]
ENDS = (Code.STALE, Code.UNAVAILABLE)
"""What may end an orchestrator."""
FAULTS = Faults(
    crash_gap_s=3.0,
    down_s=0.4,
    pause_gap_s=4.0,
    paused_s=4.0,
    partition_gap_s=6.0,
    clock_offset_s=5.0,
    power_cut=0.002,
    sync_s=0.03,
)


class Plan(msgspec.Struct, frozen=True):
    """What differs from seed to seed beside the faults of the world."""

    trouble: Trouble
    sessions: int
    operations: int
    cut_gap_s: float
    flood: int
    deadly: bool
    gap: bool
    ttl_s: float
    snapshot_every: int
    snapshot_dispatches: int


class Outcome(msgspec.Struct, frozen=True):
    seed: int
    trace: str
    operations: int
    dispatches: int
    problem: str | None
    """Why the seed is a violation; None if it is not."""


def drawn(rng: random.Random) -> Plan:
    flood = rng.choice([0, 0, 0, 0, 24])
    trouble = Trouble(
        # Whoever has much to do beside others keeps the ranks busy for a while.
        work_s=0.3 if flood else rng.choice([0.02, 0.05, 0.2]),
        slow=rng.choice([0.0, 0.02, 0.1]),
        hang=rng.choice([0.0, 0.0, 0.03, 0.1]),
        death=rng.choice([0.0, 0.01, 0.05, 0.15]),
        kill_after_s=rng.choice([0.1, 1.0, 6.0]),
    )
    return Plan(
        trouble=trouble,
        sessions=rng.randint(2, 3),
        operations=rng.randint(5, 12),
        cut_gap_s=rng.choice([0.7, 2.0, 5.0, 1e6]),
        flood=flood,
        deadly=rng.random() < 0.2,
        gap=rng.random() < 0.4,
        ttl_s=rng.choice([45.0, 86_400.0, 86_400.0, 86_400.0, 86_400.0]),
        snapshot_every=rng.choice([5, 20, 100_000]),
        snapshot_dispatches=rng.choice([0, 3, 8]),
    )


def settings_for(plan: Plan) -> ServerSettings:
    return ServerSettings(
        server=ServerSection(name="sim", data=Path("/nowhere"), lease_s=3.0, snapshot_every=plan.snapshot_every),
        model=ModelSettings(path="tiny", slots=16, max_tokens_per_row=ROW_TOKENS),
        ranks=RankSettings(nproc=2, start_timeout_s=6.0),
        limits=LimitSettings(
            max_pending_requests=40, max_pending_per_tenant=16, operation_timeout_s=6.0, result_ttl_s=plan.ttl_s
        ),
        sampling=SamplingSettings(max_pending_requests=20, max_running_requests=4),
        snapshots=SnapshotSettings(
            every_dispatches=plan.snapshot_dispatches,
            every_replay_s=0.5 if plan.snapshot_dispatches else 0.0,
            payload_grace_s=0.0,
        ),
    )


class WatchedOrchestrator(Orchestrator):
    """The real one. A question that it breaks on is a finding and not only a line in its log."""

    world: TrainWorld

    def _on_response(self, task: asyncio.Task[None]) -> None:
        super()._on_response(task)
        if not task.cancelled() and task.exception() is not None:
            self.world.violated(f"a question was not answered: {task.exception()!r}")


async def _write_no_curves(_: curve_file.CurveFile) -> None:
    """A simulated orchestrator has no folder."""


class Scenario:
    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        rng = random.Random(f"plan of {seed}")
        self.plan = drawn(rng)
        faults = FAULTS.drawn(rng)
        self.world = TrainWorld(seed, faults, keep_trace=keep_trace)
        self.settings = settings_for(self.plan)
        rules = rules_of(self.settings)
        self.audit = Audit(self.world, rules, self.settings.by_device.nproc)
        self.expected = ExpectedState(self.world, self.audit, self.settings, 2 * faults.clock_offset_s)
        self.journal = audited(self.audit)
        self.disk: dict[str, bytes] = {}
        self.asked = 0

    def run(self) -> str | None:
        seams: list[tuple[Any, str, Any]] = [
            (compaction, "_snapshot_folders", self._named),
            (compaction, "_remove", self._remove),
            (orchestrator, "every", self._every),
            (curve_file.CurveFile, "run_once", _write_no_curves),
        ]
        real = [getattr(owner, name) for owner, name, _ in seams]
        for owner, name, mine in seams:
            setattr(owner, name, mine)
        try:
            for name in self.world.rng.sample(FAILPOINTS, 3):
                self._arm(name)
            return self.world.run(self._run())
        finally:
            disarm_all()
            for (owner, name, _), before in zip(seams, real, strict=True):
                setattr(owner, name, before)

    async def _run(self) -> str | None:
        world, plan = self.world, self.plan
        self.board = Board(world, APIS)
        world.add("journal", self._run_journal)
        for api in APIS:
            world.add(api, self._run_api)
        world.add(
            "ranks",
            lambda: run_ranks(world, self.board, self.settings, self.disk, self.audit, plan.trouble),
        )
        for name in ORCHESTRATORS:
            world.add(name, partial(self._run_orchestrator, name))
        working = asyncio.create_task(self._work())
        cutting = asyncio.create_task(world.cut_connections(plan.cut_gap_s))
        await world.inject_faults(["journal", "ranks", *APIS, *ORCHESTRATORS, *ORCHESTRATORS], TORMENT_S)
        cutting.cancel()
        done, _ = await asyncio.wait([working], timeout=CONVERGES_S)
        if not done:
            open_ones = [each for each, entry in self.expected.entries.items() if entry.result is None]
            return f"not done {CONVERGES_S} s after everything healed; without result: {open_ones}"
        working.result()
        return await self._look_again()

    async def _every(self, interval_s: float, run_once: RunOnce, *, clock: Clock, max_share: float = 1.0) -> None:
        """The real one. What it survives is a finding, unless it comes of the faults."""

        async def watched() -> None:
            try:
                await run_once()
            except Exception as error:
                if not isinstance(error, StrataError) or error.code not in ENDS:
                    self.world.violated(f"a periodic task failed: {error!r}")
                raise

        await every(interval_s, watched, clock=clock, max_share=max_share)

    def _arm(self, name: str) -> None:
        arm(name, self._die_there, skip=self.world.rng.randrange(12))

    def _die_there(self, name: str) -> None:
        """An orchestrator dies at this place, or a moment later."""
        process, rng = PROCESS.get(), self.world.rng
        self._arm(name)
        if process.name in ORCHESTRATORS and self.world.hurts(0.8):
            later_s = rng.choice([0.0, rng.expovariate(1 / 0.01)])
            self.world.loop.call_later(later_s, self._kill, process, context=contextvars.Context())

    def _kill(self, life: Process) -> None:
        if self.world.life(life.name) is life:
            self.world.kill(life.name)

    # Processes

    async def _run_journal(self) -> None:
        journal = self.journal(self.world.clock("journal"), self.world.disk("journal"))

        async def answer(sender: str, payload: bytes) -> bytes:
            del sender
            return await serve(journal, payload)

        self.world.listen(answer)

    async def _run_orchestrator(self, name: str) -> None:
        """Again and again, as the launcher does it."""
        world = self.world
        journal = RemoteJournal(lambda payload: world.call("journal", payload, CALL_S), longest_wait_s=CALL_S * 0.8)
        while True:
            watched = WatchedOrchestrator(
                self.settings, journal, world.clock(name), partial(self._hear, name), lambda _: SimLinks(self.board)
            )
            watched.world = world
            try:
                await watched.run(asyncio.Event(), world.holder(), asyncio.Event())
            except StrataError as error:
                world.trace.note(f"{name} ends: {error.code}")
                # Nothing else may end it.
                if error.code not in ENDS:
                    raise
            await asyncio.sleep(world.rng.expovariate(1 / 0.3))

    def _hear(self, name: str, event: str) -> None:
        """What the launcher does: stuck ranks are killed, at its own pace."""
        self.world.trace.note(f"{name}: {event}")
        if event.startswith("stuck"):
            life = self.world.life("ranks")
            later_s = self.world.rng.expovariate(1 / self.plan.trouble.kill_after_s)
            self.world.loop.call_later(later_s, self._kill, life, context=contextvars.Context())

    async def _run_api(self) -> None:
        client = SimClient(self.settings, *self.board.listen())

        async def answer(sender: str, payload: bytes) -> bytes:
            del sender
            request = messages.decode_request(payload)
            self.asked += 1
            request = msgspec.structs.replace(request, request_id=f"question-{self.asked}")
            wait_s = request.body.wait_s if isinstance(request.body, queries.WatchFuture) else 0.0
            return messages.encode(await client.request(request, timeout_s=REPLY_TIMEOUT_S + wait_s))

        self.world.listen(answer)

    def _named(self, above: Path) -> list[tuple[Path, str]]:
        """The snapshots on the disk of this world."""
        return sorted((Path(each), Path(each).name) for each in self.disk if Path(each).parent == above)

    def _remove(self, folders: Iterable[Path]) -> None:
        for each in folders:
            self.disk.pop(str(each), None)

    # Clients

    async def _work(self) -> None:
        plan, rng = self.plan, self.world.rng
        callers = [Caller(self.world, self.expected, APIS, tenant) for tenant in TENANTS]
        tasks = []
        for number in range(plan.sessions):
            caller, stranger = rng.sample(callers, 2)
            session = Session(caller, f"session-{number}", stranger)
            deadly = plan.deadly and number == 0
            tasks.append(asyncio.create_task(self._train(session, deadly=deadly)))
        if plan.flood:
            tasks.append(asyncio.create_task(self._flood(Session(callers[0], "flood", callers[1]))))
            tasks.append(asyncio.create_task(self._step_by_step(Session(callers[1], "beside", callers[2]))))
        holding = None
        if plan.gap:
            held = Session(callers[1], "held", callers[2])
            holding = asyncio.create_task(self._hold(held))
        for task in tasks:
            await task
        if holding is not None:
            session, sent = await holding
            await self._release(session, sent)

    async def _train(self, session: Session, *, deadly: bool) -> None:
        rng = self.world.rng
        await session.begin()
        await session.work(session.plan(self.plan.operations, deadly=deadly), burst=rng.randint(1, 8))
        if rng.random() < 0.3:
            await session.unload()

    async def _flood(self, session: Session) -> None:
        await session.begin()
        batches = [session.batch(seq, [ROW_TOKENS]) for seq in range(1, self.plan.flood + 1)]
        await session.work(batches, burst=30)

    async def _step_by_step(self, session: Session) -> None:
        """Small things, beside somebody with many large ones."""
        await session.begin()
        steps = [ops.OptimStep(session.model_id, seq, model_options.AdamParams()) for seq in range(1, 9)]
        await session.work(steps, burst=1)

    async def _hold(self, session: Session) -> tuple[Session, list[asyncio.Task[None]]]:
        """Everything but the first operation."""
        await session.begin()
        planned = session.plan(4, deadly=False)
        self.first = planned[0]
        return session, [asyncio.create_task(session.work(planned[1:], burst=4))]

    async def _release(self, session: Session, sent: list[asyncio.Task[None]]) -> None:
        """Nobody else waited for it: all others are done."""
        if self.world.rng.random() < 0.5:
            await session.work([self.first], burst=1)
        else:
            await session.unload()
        for task in sent:
            await task

    # Afterwards

    async def _look_again(self) -> str | None:
        """Results are what they were, as long as was promised, and gone after that."""
        callers = {tenant: Caller(self.world, self.expected, APIS, tenant) for tenant in TENANTS}
        for future_id, entry in self.expected.entries.items():
            await callers[entry.tenant].result(future_id)
        if self.plan.ttl_s > 1000:
            return None
        await asyncio.sleep(self.plan.ttl_s + self.expected.clock_error_s + EXPIRE_S)
        for future_id, entry in self.expected.entries.items():
            output = await callers[entry.tenant].look(queries.WatchFuture(future_id, 0.0))
            if not isinstance(output, views.ErrorResponse) or output.code is not Code.GONE:
                return f"long after its time, {future_id} was answered {output}"
        return None


def run_seed(seed: int, *, without: str | None = None) -> Outcome:
    """Run one seed, with every safeguard or `without` one of them."""
    with ablation.without(without or ""):
        return _run_seed(seed)


def _run_seed(seed: int) -> Outcome:
    scenario = Scenario(seed)
    world = scenario.world
    try:
        problem = scenario.run()
    except Exception as error:  # noqa: BLE001 - whatever breaks in a simulated process is a finding of this seed
        problem = f"a process failed: {error.__cause__ or error!r}"
    problem = (world.violations[0] if world.violations else None) or problem or scenario.expected.judge()
    return Outcome(
        seed=seed,
        trace=world.trace.digest(),
        operations=len(scenario.expected.entries),
        dispatches=len(scenario.audit.dispatched),
        problem=problem,
    )
