"""The training server against a bare torch loop: `python -m bench train`.

The server runs as `strata serve` starts it: API server, orchestrator with its journal, ranks under torchrun. A bare
torchrun loop (`bench.train.bare`) runs as many ranks of the same model. Both stay alive for the whole run and
alternate, so that only one of them computes at a time. On a machine with CUDA devices there is a rank on each that
`CUDA_VISIBLE_DEVICES` shows, in bfloat16, and the note has the model FLOPs utilisation (MFU). Files are in the system's
temporary directory; set TMPDIR to the disk that is to be measured.

- `op.latency`: an operation that computes nothing (discard gradients), submitted over HTTP until its result is there.
  Bare is a message to rank 0, a broadcast to all ranks, an all-reduce and the reply. The ratio is bare by ours, so
  higher is better. The goal is that ours adds at most 5 ms: that is the limit in the line, and as a ratio its goal.
- `op.pass`: the same with a forward and backward over one token on both sides. It has no goal: what the ranks compute
  varies by more than what the server may add.
- `sft.tokens`: fine-tuning with every step submitted before waiting for the first, by a minimal client
  (`bench.train.wire`). `sft.tinker` is the same with the `tinker` SDK, in its own process.
- `sft.experts`: full fine-tuning of a mixture of experts, beside the grouped matrix multiplication of transformers.
- `sft.memory`: the peak memory of a rank of both sides, on its CUDA device or in the host's memory.
- `packing`, `decode`: see `bench.train.packing` and `bench.train.decode`.

Beside an older commit there are other cases: see `bench.train.commits`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Final

import msgspec

from bench.interleave import Comparison, Side, interleave
from bench.percentiles import percentile
from bench.report import Report
from bench.train import commits, decode, packing
from bench.train.devices import cuda_devices, peak_flops
from bench.train.processes import Sides, sides, tinker_client
from bench.train.protocol import BenchCommand, BenchResult, Tokens, Work, load
from bench.train.wire import Wire, train

Client = Callable[[BenchCommand], Awaitable[BenchResult]]

MAY_ADD_MS: Final = 5.0
SFT_GOAL: Final = 0.97
SAME_LOSS: Final = {"float32": 1e-4, "bfloat16": 1e-2}
"""How far the losses of both sides may be apart before anything was trained, relatively: they do the same work."""


@dataclass(frozen=True)
class Turns:
    operations: int
    """In a round."""
    passes: int
    """Over one token, in a round."""
    operation_rounds: int
    steps: int
    """In a round."""
    step_rounds: int
    decode_rounds: int
    packing_batches: int


SMALL: Final = Work(layers=4, hidden=256, vocabulary=2048, documents=8, length=256)
"""About 3 million parameters and 4 thousand tokens in a step: what `--quick` has the time for."""
LARGE: Final = Work(layers=11, hidden=640, vocabulary=8192, documents=8, length=512)
"""About 50 million parameters and 8 thousand tokens in a step."""
ON_CUDA: Final = Work(layers=24, hidden=2048, vocabulary=32768, documents=8, length=2048, dtype="bfloat16")
"""About a billion parameters and 16 thousand tokens in a step of each device."""
EXPERTS: Final = Work(layers=4, hidden=256, vocabulary=2048, documents=8, length=256, training="full", experts=32)
"""About 27 million parameters, of which a token uses about 4 million."""
QUICK: Final = Turns(
    operations=25, passes=6, operation_rounds=6, steps=2, step_rounds=5, decode_rounds=20, packing_batches=40
)
LONG: Final = Turns(
    operations=100, passes=20, operation_rounds=20, steps=2, step_rounds=6, decode_rounds=100, packing_batches=400
)


async def run_against(report: Report, program: str, *, quick: bool) -> None:
    """The server of an older commit in the place of the bare loop."""
    await commits.run(report, program, commits.QUICK if quick else commits.LONG)


async def run(report: Report, *, quick: bool) -> None:
    turns = QUICK if quick else LONG
    packing.run(report, batches=turns.packing_batches)
    await decode.run(report, rounds=turns.decode_rounds)
    report.progress("both groups of ranks start")
    devices = cuda_devices()
    async with sides(on_devices(SMALL, devices)) as both:
        await operations(report, both, turns)
        if quick:
            await fine_tuning(report, both, turns)
    report.progress("both groups of ranks start, with a mixture of experts")
    async with sides(on_devices(EXPERTS, devices)) as both:
        await fine_tune_experts(report, both, turns)
    if not quick:
        report.progress("both groups of ranks start, with the large model")
        async with sides(on_devices(ON_CUDA if devices else LARGE, devices)) as both:
            await fine_tuning(report, both, turns)


def on_devices(work: Work, devices: int) -> Work:
    """With a rank on each of so many CUDA devices; as it is if there are none."""
    return msgspec.structs.replace(work, ranks=devices) if devices else work


async def operations(report: Report, both: Sides, turns: Turns) -> None:
    token: Tokens = load(both.batches)[0, 0, :1, :2]
    with closing(await asyncio.to_thread(Wire, both.server, both.work.training)) as wire:

        def empty() -> None:
            wire.result(wire.abort_gradients())

        def one_token() -> None:
            wire.loss(wire.forward_backward(token))

        report.progress("operations that compute nothing")
        bare, rounds = both.bare, turns.operation_rounds
        found = await one_by_one(
            empty, lambda: bare.carry_out(BenchCommand(kind="empty")), count=turns.operations, rounds=rounds
        )
        found.add(report, "op.latency", f"{both.work.ranks} ranks", judged=True)
        report.progress("passes over one token")
        found = await one_by_one(
            one_token, lambda: bare.carry_out(BenchCommand(kind="pass")), count=turns.passes, rounds=rounds
        )
        note = f"{both.work.ranks} ranks, {both.parameters / 1e6:.1f} M parameters"
        found.add(report, "op.pass", note, judged=False)


@dataclass(frozen=True)
class Latencies:
    """In milliseconds. The figure of a round is its middle; the tail is that of all operations together."""

    middles: Comparison
    tails: Mapping[Side, float]

    def add(self, report: Report, case: str, note: str, *, judged: bool) -> None:
        bare = median(self.middles.bare)
        added = median([ours - bare for ours, bare in zip(self.middles.ours, self.middles.bare, strict=True)])
        note = f"adds {added:.2f} ms; p99 {self.tails['ours']:.1f} beside {self.tails['bare']:.1f} ms; {note}"
        goal, limit = round(bare / (bare + MAY_ADD_MS), 3), round(bare + MAY_ADD_MS, 2)
        wanted = {"goal": goal, "limit": limit} if judged else {}
        report.add(case, "ms", self.middles, note=note, **wanted)


async def one_by_one(ours: Callable[[], object], bare: Callable[[], object], *, count: int, rounds: int) -> Latencies:
    seen: dict[Side, list[float]] = {"ours": [], "bare": []}

    def turn(side: Side, act: Callable[[], object]) -> float:
        took_ms = []
        for _ in range(count):
            started = perf_counter()
            act()
            took_ms.append((perf_counter() - started) * 1e3)
        seen[side] += took_ms
        return median(took_ms)

    found = await interleave(
        lambda: asyncio.to_thread(turn, "ours", ours),
        lambda: asyncio.to_thread(turn, "bare", bare),
        rounds,
        better="lower",
    )
    return Latencies(found, {side: percentile(values, 99) for side, values in seen.items()})


async def fine_tuning(report: Report, both: Sides, turns: Turns) -> None:
    untrained = await asyncio.to_thread(both.bare.carry_out, BenchCommand(kind="train", steps=turns.steps))
    found, note = await by_wire(report, both, turns, untrained)
    report.add("sft.tokens", "tokens/s", found, goal=SFT_GOAL, note=f"{utilisation(both, found)}{note}")
    ours, bare = both.memory_bytes("ours"), both.memory_bytes("bare")
    if ours is None or bare is None:
        report.progress("the driver does not report the memory of these processes")
    else:
        memory = Comparison([ours / 2**20], [bare / 2**20], "lower")
        report.add("sft.memory", "MiB", memory, note="peak of the process with most")
    report.progress("the same by the tinker SDK")
    async with tinker_client(both) as client:
        found, cpu = await in_turns(both, client.carry_out, turns, untrained)
        report.add("sft.tinker", "tokens/s", found, goal=SFT_GOAL, note=f"{cpu}; by the tinker SDK")


async def fine_tune_experts(report: Report, both: Sides, turns: Turns) -> None:
    untrained = await asyncio.to_thread(both.bare.carry_out, BenchCommand(kind="train", steps=turns.steps))
    found, note = await by_wire(report, both, turns, untrained)
    report.add("sft.experts", "tokens/s", found, goal=SFT_GOAL, note=f"{both.work.experts} experts; {note}")


async def by_wire(report: Report, both: Sides, turns: Turns, untrained: BenchResult) -> tuple[Comparison, str]:
    """Tokens a second by the minimal client, and a word about them."""
    work = both.work
    note = f"{both.parameters / 1e6:.1f} M parameters, {work.training}, {work.step_tokens} tokens a step"
    batches = load(both.batches)
    report.progress(f"fine-tuning, {note}")
    with closing(await asyncio.to_thread(Wire, both.server, work.training)) as wire:

        async def act(order: BenchCommand) -> BenchResult:
            return await asyncio.to_thread(train, wire, order, batches)

        found, cpu = await in_turns(both, act, turns, untrained)
        return found, f"{cpu}; {note}"


def utilisation(both: Sides, found: Comparison) -> str:
    """Model FLOPs utilisation: two FLOPs for each parameter and token forward, twice as many backward, of which frozen
    weights need half. Attention and the lookup of embeddings do not count."""
    peak = peak_flops()
    if peak is None:
        return ""
    work = both.work
    per_token = (4 if work.training == "lora" else 6) * (both.parameters - work.vocabulary * work.hidden)
    ours, bare = (median(rates) * per_token / (peak * work.ranks) for rates in (found.ours, found.bare))
    return f"MFU {ours:.1%} beside {bare:.1%}; "


async def in_turns(both: Sides, ours: Client, turns: Turns, untrained: BenchResult) -> tuple[Comparison, str]:
    """The first turn of ours warms it up, and shows that both sides do the same: from the same start the same loss.

    With the rates comes a word about the processor time of both, client and loop left out: on a machine that others
    use it says more than the time on the clock.
    """
    tokens = turns.steps * both.work.step_tokens
    first = await ours(BenchCommand(kind="train", steps=turns.steps))
    if not math.isclose(first.loss, untrained.loss, rel_tol=SAME_LOSS[both.work.dtype]):
        raise RuntimeError(f"both sides should have the same loss: ours is {first.loss}, the other {untrained.loss}")
    order = BenchCommand(kind="train", first=turns.steps, steps=turns.steps)
    cpu_s: dict[Side, float] = {"ours": 0.0, "bare": 0.0}

    async def turn(side: Side, act: Client) -> float:
        before_s = both.cpu_s(side)
        found = await act(order)
        cpu_s[side] += both.cpu_s(side) - before_s
        return tokens / found.seconds

    async def by_loop(order: BenchCommand) -> BenchResult:
        return await asyncio.to_thread(both.bare.carry_out, order)

    found = await interleave(
        lambda: turn("ours", ours), lambda: turn("bare", by_loop), turns.step_rounds, warm_up=False
    )
    return found, f"{cpu_s['ours'] / cpu_s['bare']:.2f} of its processor time"
