"""The training servers of two commits, called by one client in turns of a few seconds.

Both train the same small model on two ranks and stay alive, so the one that does not have its turn is idle. The client
is that of this commit, so what it takes is the same for both.

- `op.latency`: an operation that computes nothing (discard gradients), from HTTP to the ranks and back.
- `pass.lora`, `pass.full`, `pass.experts`: steps of `forward_backward` and `optim_step`, two submitted at once. The
  model is small enough for the server to count; that with experts is trained in full.
- `sample.tokens`: requests that are sampled together from a snapshot of the adapter.
- `….cpu`: the processor time of all processes of a server for one operation, step or token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final, Literal

import msgspec

from bench.against import OLDER_GOAL
from bench.interleave import Better, Comparison, Measure, interleave
from bench.load_process import STRATA
from bench.report import Report
from bench.train.processes import served, settings_of, shape_of, tree_cpu_s
from bench.train.protocol import BenchCommand, Tokens, Work, draw
from bench.train.wire import Wire, train
from strata.train.runner.model.tiny import make

WORK: Final = Work(layers=4, hidden=256, vocabulary=2048, documents=8, length=64)
WORKS: Final = {
    "lora": WORK,
    "full": msgspec.structs.replace(WORK, training="full"),
    "experts": msgspec.structs.replace(WORK, training="full", experts=32),
}
CONTEXT: Final = 256
STEPS: Final = 2
"""Submitted at once."""
REQUESTS: Final = 8
"""Sampled together."""
PROMPT: Final = 32
SAMPLED: Final = 64
"""Tokens of each."""
SAME_LOSS: Final = 1e-4
"""How far the losses of both may be apart before anything was trained, relatively."""


@dataclass(frozen=True)
class Turns:
    rounds: int
    seconds: float


QUICK: Final = Turns(rounds=6, seconds=3.0)
LONG: Final = Turns(rounds=20, seconds=5.0)


@dataclass(frozen=True)
class Turn:
    """What a server did in a turn."""

    figure: float
    count: int
    """Operations, steps or tokens."""


@dataclass
class Commit:
    """The server of a commit with the client of its model, and where the client is."""

    wire: Wire
    pid: int
    sampler: str = ""
    batch: int = 0
    requests: itertools.count[int] = field(default_factory=itertools.count)


Act = Callable[[Commit, float], Turn]


async def run(report: Report, program: str, turns: Turns) -> None:
    for name, work in WORKS.items():
        report.progress(f"the ranks of both commits start, {name}")
        async with _commits(program, work) as both:
            await _compare_steps(report, name, both, work, turns)
            if name == "lora":
                report.progress("operations that compute nothing")
                await _compare(report, both, "op.latency", "ms", _discard, turns, of="operation", better="lower")
                await _compare_samples(report, both, work, turns)


@asynccontextmanager
async def _commits(program: str, work: Work) -> AsyncIterator[tuple[Commit, Commit]]:
    """The new one and the old one."""
    # A short path: Unix sockets lie below it.
    root = Path(tempfile.mkdtemp(prefix="strata-bench-"))
    try:
        await asyncio.to_thread(make, root / "model", shape_of(work, CONTEXT))
        async with _commit(root / "new", STRATA, work) as newer, _commit(root / "old", program, work) as older:
            yield newer, older
    finally:
        await asyncio.to_thread(shutil.rmtree, root)


@asynccontextmanager
async def _commit(folder: Path, program: str, work: Work) -> AsyncIterator[Commit]:
    await asyncio.to_thread(folder.mkdir)
    async with served(folder, settings_of(folder, folder.parent / "model", work), program) as server:
        with closing(await asyncio.to_thread(Wire, server, work.training)) as wire:
            wire.rest()
            yield Commit(wire, server.pid)


async def _compare_steps(report: Report, name: str, both: tuple[Commit, Commit], work: Work, turns: Turns) -> None:
    batches = draw(work)
    losses = [await asyncio.to_thread(_untrained_loss, commit, batches) for commit in both]
    if not math.isclose(*losses, rel_tol=SAME_LOSS):
        raise RuntimeError(f"both commits should have the same loss: the new one has {losses[0]}, the old {losses[1]}")

    def act(commit: Commit, seconds: float) -> Turn:
        started_s = perf_counter()
        steps = 0
        while perf_counter() < started_s + seconds:
            train(commit.wire, BenchCommand(kind="train", first=commit.batch, steps=STEPS), batches)
            commit.batch += STEPS
            steps += STEPS
        return Turn(steps * work.step_tokens / (perf_counter() - started_s), steps)

    report.progress(f"training passes, {name}")
    await _compare(report, both, f"pass.{name}", "tokens/s", act, turns, of="step")


def _untrained_loss(commit: Commit, batches: Tokens) -> float:
    loss = train(commit.wire, BenchCommand(kind="train"), batches).loss
    commit.wire.rest()
    return loss


async def _compare_samples(report: Report, both: tuple[Commit, Commit], work: Work, turns: Turns) -> None:
    for commit in both:
        published = await asyncio.to_thread(lambda wire: wire.result(wire.publish()), commit.wire)
        commit.sampler = published["sampling_session_id"]
        commit.wire.rest()
    prompts = draw(work).reshape(-1, work.length + 1)[:, :PROMPT].tolist()

    def act(commit: Commit, seconds: float) -> Turn:
        wire, started_s = commit.wire, perf_counter()
        tokens = 0
        while perf_counter() < started_s + seconds:
            numbers = itertools.islice(commit.requests, REQUESTS)
            sent = [wire.sample(commit.sampler, prompts[each % len(prompts)], SAMPLED, each) for each in numbers]
            for request in sent:
                (sequence,) = wire.result(request)["sequences"]
                assert len(sequence["tokens"]) == SAMPLED
                tokens += SAMPLED
        return Turn(tokens / (perf_counter() - started_s), tokens)

    report.progress("samples")
    await _compare(report, both, "sample.tokens", "tokens/s", act, turns, of="token")


def _discard(commit: Commit, seconds: float) -> Turn:
    """The figure is the middle one of the turn."""
    took_ms = []
    until_s = perf_counter() + seconds
    while (started_s := perf_counter()) < until_s:
        commit.wire.result(commit.wire.abort_gradients())
        took_ms.append((perf_counter() - started_s) * 1e3)
    return Turn(median(took_ms), len(took_ms))


async def _compare(
    report: Report,
    both: tuple[Commit, Commit],
    case: str,
    unit: str,
    act: Act,
    turns: Turns,
    *,
    of: Literal["operation", "step", "token"],
    better: Better = "higher",
) -> None:
    cpu_ms: dict[int, list[float]] = {commit.pid: [] for commit in both}

    def measured(commit: Commit) -> Measure:
        async def measure() -> float:
            before_s = tree_cpu_s(commit.pid)
            turn = await asyncio.to_thread(act, commit, turns.seconds)
            cpu_ms[commit.pid].append((tree_cpu_s(commit.pid) - before_s) * 1e3 / turn.count)
            commit.wire.rest()
            return turn.figure

        return measure

    newer, older = both
    found = await interleave(measured(newer), measured(older), turns.rounds, better=better)
    report.add(case, unit, found, goal=OLDER_GOAL, note=f"turns of {turns.seconds:g} s; bare: the older commit")
    # Without the turn that warms up.
    cost = Comparison(cpu_ms[newer.pid][1:], cpu_ms[older.pid][1:], "lower")
    report.add(f"{case}.cpu", "ms", cost, goal=OLDER_GOAL, note=f"processor time of all its processes for each {of}")
