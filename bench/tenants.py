"""Many tenants at once, each with an adapter and an API key of its own: `python -m bench tenants`.

Every server runs as `strata serve` starts it, with two ranks, and all stay alive for the whole run and alternate. In a
step all tenants together submit the same documents, partitioned into as many operations as there are tenants; each
tenant makes its own optimizer step. All steps are submitted before waiting for the first.

- `tenants.N`: tokens of N tenants whose operations share passes, against one tenant that submits the same documents in
  one operation. The ratio is the speed that remains when the work belongs to N tenants instead of one.
- `narrow.8`: the same for eight with adapters of a small LoRA rank. The adapters of the other cases are together larger
  than the base of the quick run, and all-reducing and stepping them is work that one tenant does not have.
- `slices.N`: the same N tenants against the same N on a server that gives each operation its own pass, one after the
  other (`limits.pack_tenants = false`).
- `snapshots`: eight tenants on a server that takes a snapshot of all models every few dispatches, against the same
  without. The note has the number of snapshots: far more than with the default settings.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import httpx
import msgspec
import numpy as np
import psutil  # type: ignore[import-untyped]

from bench.interleave import interleave
from bench.report import Report
from bench.train.processes import served
from bench.train.protocol import LORA_RANK, MODEL, Tokens, Work, draw
from bench.train.wire import Wire
from strata.train.api.keys import TOKEN_FILE
from strata.train.runner.model.tiny import TinyModel, make

TENANTS: Final = (1, 2, 4, 8, 16)
MOST: Final = max(TENANTS)
GOAL_TENANTS: Final = 8
GOAL: Final = 0.9
SNAPSHOT_GOAL: Final = 0.97
SAME_LOSS: Final = 1e-4
NARROW_RANK: Final = 4
SETTINGS: Final = """
[server]
port = 0
data = "{folder}/d"
log_level = "warning"
[model]
path = "{model}"
name = "{name}"
max_tokens_per_row = {row_tokens}
slots = {slots}
initial_checkpoint = false
[ranks]
nproc = {ranks}
[limits]
pack_tenants = {pack}
max_pending_requests = 10000
[snapshots]
every_dispatches = {snapshots}
every_s = 0
every_payload_mb = 0
every_replay_s = 0
"""


@dataclass(frozen=True)
class Turns:
    steps: int
    """In a round."""
    rounds: int
    snapshot_steps: int
    snapshot_rounds: int
    snapshot_dispatches: int
    """Between two snapshots."""


SMALL: Final = Work(layers=4, hidden=256, vocabulary=2048, documents=8, length=256)
LARGE: Final = Work(layers=11, hidden=640, vocabulary=8192, documents=8, length=512)
QUICK: Final = Turns(steps=6, rounds=3, snapshot_steps=24, snapshot_rounds=3, snapshot_dispatches=48)
LONG: Final = Turns(steps=6, rounds=6, snapshot_steps=24, snapshot_rounds=6, snapshot_dispatches=48)


@dataclass(frozen=True)
class Tenancy:
    """Tenants of one server, each by a connection of its own."""

    wires: Sequence[Wire]
    data: Path

    def train(self, batches: Tokens, count: int, steps: int) -> tuple[float, float]:
        """Seconds, and the loss of the first step of all tenants together."""
        started = perf_counter()
        passes: list[list[str]] = []
        after: list[list[str]] = []
        for step in range(steps):
            parts = np.split(documents_of(batches, step), count)
            passes.append([])
            after.append([])
            for wire, part in zip(self.wires[:count], parts, strict=True):
                passes[-1].append(wire.forward_backward(part))
                after[-1].append(wire.optim_step())
        losses = [
            sum(wire.loss(each) for wire, each in zip(self.wires[:count], futures, strict=True)) for futures in passes
        ]
        for futures in after:
            for wire, each in zip(self.wires[:count], futures, strict=True):
                wire.result(each)
        seconds = perf_counter() - started
        self._rest(count)
        return seconds, losses[0]

    def untrained_loss(self, batches: Tokens, count: int) -> float:
        """Of one step of the first `count`, which leaves nothing behind; it warms up too."""
        parts = np.split(documents_of(batches, 0), count)
        wires = self.wires[:count]
        passes = [wire.forward_backward(part) for wire, part in zip(wires, parts, strict=True)]
        for wire, each in [(wire, wire.abort_gradients()) for wire in wires]:
            wire.result(each)
        loss = sum(wire.loss(each) for wire, each in zip(wires, passes, strict=True))
        self._rest(count)
        return loss

    def _rest(self, count: int) -> None:
        for wire in self.wires[:count]:
            wire.rest()

    def cpu_s(self) -> float:
        """Of all processes of this server: what disturbs the machine hardly shows in it."""
        found = 0.0
        for launcher in psutil.Process().children():
            if str(self.data.parent / "server.toml") in launcher.cmdline():
                times = [process.cpu_times() for process in (launcher, *launcher.children(recursive=True))]
                found += sum(each.user + each.system for each in times)
        return found

    def snapshots(self) -> int:
        """The dispatch of the newest one on the disk."""
        found = [int(path.name.partition("-")[0]) for path in (self.data / "snapshots").glob("0*")]
        return max(found, default=0)


def documents_of(batches: Tokens, step: int) -> Tokens:
    found: Tokens = batches[step % len(batches)].reshape(-1, batches.shape[-1])
    return found


async def run(report: Report, *, quick: bool) -> None:
    turns, work = (QUICK, SMALL) if quick else (LONG, LARGE)
    # A short path: Unix sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="strata-bench-"))
    shape = TinyModel(layers=work.layers, hidden=work.hidden, vocabulary=work.vocabulary, context=work.length)
    try:
        parameters = await asyncio.to_thread(make, folder / "model", shape)
        report.progress("three groups of ranks start")
        async with AsyncExitStack() as stack:

            async def tenancy(name: str, ranks: Sequence[int], *, pack: bool, snapshots: int = 0) -> Tenancy:
                return await _tenancy(stack, folder / name, work, ranks, pack=pack, snapshots=snapshots)

            eight = [LORA_RANK] * GOAL_TENANTS
            packed = await tenancy("p", [LORA_RANK] * MOST + [NARROW_RANK] * GOAL_TENANTS, pack=True)
            narrow = Tenancy(packed.wires[MOST:], packed.data)
            sliced = await tenancy("s", [LORA_RANK] * MOST, pack=False)
            guarded = await tenancy("g", eight, pack=True, snapshots=turns.snapshot_dispatches)
            about = f"{parameters / 1e6:.1f} M parameters"
            await _Bench(report, turns, work, about, (packed, narrow, sliced, guarded)).run()
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


class _Side:
    """So many tenants of a server, turn by turn."""

    def __init__(self, tenancy: Tenancy, batches: Tokens, count: int, steps: int) -> None:
        self._tenancy, self._batches = tenancy, batches
        self._count, self._steps = count, steps
        self.cpu_s = 0.0

    async def turn(self) -> float:
        """Tokens in a second."""
        before_s = self._tenancy.cpu_s()
        seconds, _ = await asyncio.to_thread(self._tenancy.train, self._batches, self._count, self._steps)
        self.cpu_s += self._tenancy.cpu_s() - before_s
        return self._steps * documents_of(self._batches, 0)[:, :-1].size / seconds


class _Bench:
    def __init__(self, report: Report, turns: Turns, work: Work, about: str, tenancies: Sequence[Tenancy]) -> None:
        self._report, self._turns, self._work = report, turns, work
        self._packed, self._narrow, self._sliced, self._guarded = tenancies
        self._batches = draw(work)
        documents = work.ranks * work.documents
        self._about = f"{work.ranks} ranks, {about}, {documents} documents of {work.length} tokens a step"

    async def run(self) -> None:
        await asyncio.to_thread(self._check)
        for count in TENANTS:
            self._report.progress(f"{count} tenants, {self._about}")
            goal = GOAL if count == GOAL_TENANTS else None
            await self._beside_one(f"tenants.{count}", self._packed, count, LORA_RANK, goal)
            if count > 1:
                ours, slices = self._side(self._packed, count), self._side(self._sliced, count)
                await self._compare(f"slices.{count}", ours, slices, None, "beside a pass for each operation")
        await self._beside_one(f"narrow.{GOAL_TENANTS}", self._narrow, GOAL_TENANTS, NARROW_RANK, GOAL)
        await self._snapshots()

    async def _beside_one(self, case: str, tenancy: Tenancy, count: int, rank: int, goal: float | None) -> None:
        ours, one = self._side(tenancy, count), self._side(tenancy, 1)
        await self._compare(case, ours, one, goal, f"rank {rank}; {self._about}")

    async def _compare(self, case: str, ours: _Side, bare: _Side, goal: float | None, note: str) -> None:
        found = await interleave(ours.turn, bare.turn, self._turns.rounds, warm_up=False)
        cpu = f"{ours.cpu_s / bare.cpu_s:.2f} of its processor time"
        self._report.add(case, "tokens/s", found, goal=goal, note=f"{cpu}; {note}")

    async def _snapshots(self) -> None:
        turns, guarded = self._turns, self._guarded
        self._report.progress("with snapshots and without")
        with_them = self._side(guarded, GOAL_TENANTS, turns.snapshot_steps)
        without = self._side(self._packed, GOAL_TENANTS, turns.snapshot_steps)
        taken: set[int] = set()

        async def watched() -> float:
            rate = await with_them.turn()
            taken.add(await asyncio.to_thread(guarded.snapshots))
            return rate

        found = await interleave(watched, without.turn, turns.snapshot_rounds, warm_up=False)
        apart_s = turns.snapshot_steps * self._work.step_tokens / sorted(found.bare)[len(found.bare) // 2]
        seen = len(taken - {0})
        note = f"at least {seen} snapshots in {turns.snapshot_rounds} turns of about {apart_s:.1f} s"
        self._report.add("snapshots", "tokens/s", found, goal=SNAPSHOT_GOAL, note=note)

    def _side(self, tenancy: Tenancy, count: int, steps: int | None = None) -> _Side:
        return _Side(tenancy, self._batches, count, steps or self._turns.steps)

    def _check(self) -> None:
        """Before anything is trained all models are the base: however the work is cut, the loss is the same."""
        alone = self._packed.untrained_loss(self._batches, 1)
        cut = [
            self._packed.untrained_loss(self._batches, MOST),
            self._narrow.untrained_loss(self._batches, GOAL_TENANTS),
            self._sliced.untrained_loss(self._batches, MOST),
            self._guarded.untrained_loss(self._batches, GOAL_TENANTS),
        ]
        if not all(math.isclose(each, alone, rel_tol=SAME_LOSS) for each in cut):
            raise RuntimeError(f"all should have the same loss: one tenant has {alone}, many have {cut}")


async def _tenancy(
    stack: AsyncExitStack, folder: Path, work: Work, ranks: Sequence[int], *, pack: bool, snapshots: int
) -> Tenancy:
    """`ranks` are those of the adapters, one of each tenant."""
    await asyncio.to_thread(folder.mkdir)
    settings = SETTINGS.format(
        folder=folder,
        model=folder.parent / "model",
        name=MODEL,
        row_tokens=work.row_tokens,
        slots=len(ranks),
        ranks=work.ranks,
        pack=str(pack).lower(),
        snapshots=snapshots,
    )
    server = await stack.enter_async_context(served(folder, settings))
    keys = await asyncio.to_thread(_keys, folder / "d", len(ranks))
    tenants = [msgspec.structs.replace(server, key=key) for key in keys]
    made = [partial(Wire, tenant, "lora", rank) for tenant, rank in zip(tenants, ranks, strict=True)]
    wires = await asyncio.to_thread(lambda: [make() for make in made])
    for wire in wires:
        wire.rest()
    return Tenancy(wires, folder / "d")


def _keys(data: Path, count: int) -> list[str]:
    token = (data / TOKEN_FILE).read_text(encoding="utf-8").strip()
    transport = httpx.HTTPTransport(uds=str(data / "run" / "api"))
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url="http://server", headers=headers, transport=transport) as http:
        replies = [
            http.post("/v1/keys", json={"name": f"tenant-{number}", "role": "researcher"}).raise_for_status()
            for number in range(count)
        ]
    return [str(reply.json()["secret"]) for reply in replies]
