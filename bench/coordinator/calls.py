"""How many calls a second, and how soon an ack is durable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bench.against import OLDER_GOAL
from bench.coordinator.orders import Batches, Define, Heartbeats, Join, Offered, Order, Shards, Teach
from bench.coordinator.processes import Process
from bench.interleave import Comparison, Measure, interleave
from bench.load_process import Clients
from bench.report import Report

WORKERS: Final = 512
CHANNELS: Final = 64
BATCH: Final = 64
SHARDS: Final = 1_000_000
JOB: Final = "bench"
HEARTBEAT_GOAL: Final = 0.85
BATCHED_LIMIT: Final = 80_000
ACK_GOAL: Final = 0.6
ACK_LIMIT_MS: Final = 10.0
OFFERED: Final = 1_500


@dataclass(frozen=True)
class Turns:
    rounds: int
    seconds: float
    """Of one turn."""
    offered_s: float
    """Of one turn at a given rate."""


class Calls:
    """One pair of servers: `ours` has the workers and the dataset, and so has an older coordinator in the place of
    `bare` (`is_older`); else `bare` knows what `ours` would answer."""

    def __init__(
        self, report: Report, load: Clients, ours: Process, bare: Process, turns: Turns, *, is_older: bool = False
    ) -> None:
        self._report = report
        self._load = load
        self._ours = ours
        self._bare = bare
        self._turns = turns
        self._is_older = is_older
        self._sizes: list[float] = []

    async def heartbeats(self) -> None:
        await self._prepare()
        self._report.progress("heartbeats")
        beat_bytes, pulse_bytes = self._sizes[2:4]
        await self._rate(
            "heartbeat",
            "rpc/s",
            lambda server: Heartbeats(server.address, JOB, self._turns.seconds),
            goal=HEARTBEAT_GOAL,
            note=f"{beat_bytes:.0f} bytes in, {pulse_bytes:.0f} out",
        )
        self._report.progress("heartbeats in batches")
        await self._rate(
            "beats.batched",
            "beats/s",
            lambda server: Batches(server.address, JOB, self._turns.seconds, BATCH),
            limit=BATCHED_LIMIT,
            note=f"{BATCH} in a call",
        )

    async def shards(self, case: str) -> None:
        await self._prepare()
        self._report.progress(case)
        await self._rate(case, "rpc/s", lambda server: Shards(server.address, JOB, self._turns.seconds), goal=ACK_GOAL)
        slow: dict[str, list[float]] = {"ours": [], "bare": []}
        reached: list[float] = []

        def offered(side: str, server: Process) -> Measure:
            async def turn() -> float:
                order = Offered(server.address, JOB, self._turns.offered_s, OFFERED)
                p50_ms, p99_ms, rate = await self._load.carry_out(order)
                slow[side].append(p99_ms)
                reached.append(rate)
                return p50_ms

            return turn

        rounds = max(2, self._turns.rounds // 2)
        found = await interleave(offered("ours", self._ours), offered("bare", self._bare), rounds, better="lower")
        rate = f"at an offered {OFFERED:,}/s, {min(reached):,.0f}/s reached"
        self._report.add(f"{case}.p50", "ms", found, note=rate)
        # Without the warm-up, whose first call makes the order of the epoch.
        tail = Comparison(slow["ours"][1:], slow["bare"][1:], "lower")
        self._report.add(f"{case}.p99", "ms", tail, limit=ACK_LIMIT_MS, note=rate)

    async def _prepare(self) -> None:
        if self._sizes:
            return
        self._report.progress(f"registering {WORKERS} workers")
        for server in (self._ours, self._bare) if self._is_older else (self._ours,):
            await self._load.carry_out(Join(server.address, JOB, WORKERS, CHANNELS))
            await self._load.carry_out(Define(server.address, JOB, SHARDS))
        taught = "" if self._is_older else self._bare.address
        self._sizes = await self._load.carry_out(Teach(self._ours.address, taught, JOB, BATCH))

    async def _rate(
        self,
        case: str,
        unit: str,
        order: Callable[[Process], Order],
        *,
        goal: float | None = None,
        limit: float | None = None,
        note: str = "",
    ) -> None:
        """Both sides at full load. The processor time of the server says what a call costs, whatever held it up."""
        cpu_us: dict[int, list[float]] = {self._ours.pid: [], self._bare.pid: []}

        def measured(server: Process) -> Measure:
            async def turn() -> float:
                before_s = server.cpu_s()
                (rate,) = await self._load.carry_out(order(server))
                cpu_us[server.pid].append((server.cpu_s() - before_s) * 1e6 / (rate * self._turns.seconds))
                return rate

            return turn

        found = await interleave(measured(self._ours), measured(self._bare), self._turns.rounds)
        older_goal = OLDER_GOAL if self._is_older else None
        self._report.add(case, unit, found, goal=older_goal or goal, limit=limit, note=note)
        cost = Comparison(cpu_us[self._ours.pid][1:], cpu_us[self._bare.pid][1:], "lower")
        self._report.add(f"{case}.cpu", "µs", cost, goal=older_goal, note="processor time of the server for each")
