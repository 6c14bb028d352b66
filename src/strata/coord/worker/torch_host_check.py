"""Measures a host before a generation starts: sizes and repetitions of the matrix product, the memory test and the
all-reduce with another host, and their timeouts. The verdict is in `core.host_check`.

Each host measures in a process of its own, because what is broken may hang or crash it: `python -m
strata.coord.worker.torch_host_check [GROUP]`. The hosts exchange what they measured over the store of their round, and
each of them comes to the same verdict (`core.host_check`).

On CPUs a product and a copy are measured by the time of the processor, in one thread: that of another program on the
same machine does not count. An all-reduce is measured by the clock.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from strata.base.errors import Code, StrataError
from strata.base.parent import TIED_COMMAND
from strata.coord.core.host_check import HostMeasurement, HostTrial

RUNS: Final = 9
"""The best of so many counts."""
SIDE: Final = 512
"""Side of the matrices; with whole numbers up to 8 every sum is exact in float32, in whatever order it is taken."""
MEMORY_BYTES: Final = 64 << 20
MESSAGE: Final = 1 << 19
"""Numbers in an all-reduce: 2 MiB."""
LINK_TIMEOUT: Final = timedelta(seconds=90)
MEASURE_S: Final = 600.0
"""How long the process that measures may take."""
COLLECT_S: Final = MEASURE_S + 30.0
LOOK_S: Final = 0.1


class HostGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that all-reduce with each other, as the process of one of them gets it."""

    host: str
    """The host of the store where they meet."""
    port: int
    prefix: str
    rank: int
    size: int


@dataclass(frozen=True)
class HostRound:
    """The hosts of one round of the rendezvous, as one of them sees it."""

    store: Store
    address: tuple[str, int]
    """The address of the store."""
    name: str
    """The name of the round."""
    rank: int
    size: int
    is_over: Callable[[], bool]
    """Whether hosts have come or gone meanwhile."""


def check_hosts(found: HostRound, factor: float) -> Mapping[int, str] | None:
    """Returns the hosts that are broken, by rank, and how. None: the round is over."""
    trial = HostTrial(found.size, factor)
    while not trial.is_over:
        own = next((group for group in trial.groups() if found.rank in group), None)
        group = None
        if own is not None:
            prefix = f"{found.name}/check-{trial.rounds}/{own[0]}"
            host, port = found.address
            group = HostGroup(host=host, port=port, prefix=prefix, rank=own.index(found.rank), size=len(own))
        found.store.set(_key(trial.rounds, found.rank), msgspec.json.encode(_measure_apart(group)).decode())
        measurements = _collect(found, trial.rounds)
        if measurements is None:
            return None
        trial.record(measurements)
    return trial.convicted


def _key(number: int, rank: int) -> str:
    return f"check-{number}/{rank}"


def _collect(found: HostRound, number: int) -> list[HostMeasurement] | None:
    """Collects the measurements of all hosts, in order of rank. Each of them measures for a limited time, or the round
    ends."""
    keys = [_key(number, rank) for rank in range(found.size)]
    until_s = time.monotonic() + COLLECT_S
    while not found.store.check(keys):
        if found.is_over():
            return None
        if time.monotonic() > until_s:
            absent = next(rank for rank, key in enumerate(keys) if not found.store.check([key]))
            raise StrataError(
                Code.DEADLINE,
                f"the host of node rank {absent} measured nothing in {COLLECT_S:g} s",
                hint="start all hosts with the same --check-hosts",
            )
        time.sleep(LOOK_S)
    return [msgspec.json.decode(found.store.get(key), type=HostMeasurement) for key in keys]


def _measure_apart(group: HostGroup | None) -> HostMeasurement:
    """Measures in a process of its own, with a limit."""
    arguments = () if group is None else (msgspec.json.encode(group).decode(),)
    command = [*TIED_COMMAND, sys.executable, "-P", "-m", __name__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=MEASURE_S, check=False)
    except subprocess.TimeoutExpired:
        return HostMeasurement(problem=f"its check did not end in {MEASURE_S:g} s")
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        return HostMeasurement(problem=f"its check ended with status {done.returncode}: {last[:300]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=HostMeasurement)


# In the process that measures


def measure(group: HostGroup | None) -> HostMeasurement:
    torch.set_num_threads(1)
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    matmul_s = memory_s = all_reduce_s = None
    problem = link_problem = ""
    try:
        matmul_s = max(map(_matmul_s, devices))
        memory_s = max(map(_memory_s, devices))
    except (RuntimeError, StrataError) as error:
        problem = str(error)
    # Also of a host that has failed: another one waits for it there.
    try:
        all_reduce_s = None if group is None else _all_reduce_s(group, devices[0])
    except (RuntimeError, StrataError) as error:
        link_problem = str(error).partition("\n")[0]
    return HostMeasurement(
        matmul_s=matmul_s, memory_s=memory_s, all_reduce_s=all_reduce_s, problem=problem, link_problem=link_problem
    )


def _matmul_s(device: torch.device) -> float:
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-8, 9, (SIDE, SIDE), generator=chance) for _ in range(2))
    expected = left @ right
    factors = [each.to(device, torch.float32) for each in (left, right)]
    times_s = []
    for _ in range(RUNS):
        seconds, product = _timed(device, lambda: torch.mm(*factors))
        if not torch.equal(product.to("cpu", torch.int64), expected):
            raise StrataError(Code.CORRUPT, f"its matrix product is wrong on {device}")
        times_s.append(seconds)
    return min(times_s)


def _memory_s(device: torch.device) -> float:
    times_s = []
    target = torch.empty(MEMORY_BYTES, dtype=torch.uint8, device=device)
    for number in range(RUNS):
        pattern = torch.arange(number, number + 251, device=device).to(torch.uint8)
        source = pattern.repeat(MEMORY_BYTES // len(pattern) + 1)[:MEMORY_BYTES]
        seconds, _ = _timed(device, partial(target.copy_, source))
        if not torch.equal(target, source):
            raise StrataError(Code.CORRUPT, f"memory of {device} does not keep what is written")
        times_s.append(seconds)
    return min(times_s)


def _timed(device: torch.device, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """The seconds of the processor, or of the device until it is done."""
    if device.type == "cpu":
        began_s = time.thread_time()
        result = run()
        return time.thread_time() - began_s, result
    torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    result = run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began_s, result


def _all_reduce_s(group: HostGroup, device: torch.device) -> float:
    store = PrefixStore(group.prefix, TCPStore(group.host, group.port, timeout=LINK_TIMEOUT))
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=LINK_TIMEOUT)
    try:
        times_s = []
        for number in range(RUNS):
            values = torch.full((MESSAGE,), float(number + group.rank), device=device)
            dist.barrier()
            began_s = time.perf_counter()
            dist.all_reduce(values)
            # Also waits for the device.
            is_right = bool((values == sum(number + rank for rank in range(group.size))).all())
            times_s.append(time.perf_counter() - began_s)
            if not is_right:
                raise StrataError(Code.CORRUPT, "its result is wrong")
        return min(times_s)
    finally:
        dist.destroy_process_group()


def main() -> None:
    group = msgspec.json.decode(sys.argv[1], type=HostGroup) if len(sys.argv) > 1 else None
    sys.stdout.buffer.write(msgspec.json.encode(measure(group)) + b"\n")


if __name__ == "__main__":
    main()
