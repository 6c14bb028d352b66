"""What a job loses to the one beside it, where both declared a core and a GiB: a hog of memory, or a bomb of processes.

Bare is the same job beside one that keeps to what it declared. Both have the limits that an agent would give them, in
control groups of their own; so it needs permission to create these, and two cores. The hog takes at most 4 GiB and the
bomb at most 300 processes at a time, whatever limits them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.interleave import interleave
from bench.report import Report
from strata.base.errors import Code, StrataError
from strata.fleet.agent import cgroup, supervised
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.sandbox import DeclaredAmounts, HostSandbox
from strata.fleet.agent.settings import SandboxSettings

DECLARED: Final = DeclaredAmounts(cores=1, ram_gib=1.0, cpu_weight=1)
PROCESSES: Final = 100
GOAL: Final = 0.9
STEPS: Final = """
import json, statistics, time
times = []
for _ in range({steps}):
    began = time.perf_counter()
    sum(number * number for number in range(200_000))
    times.append(time.perf_counter() - began)
print(json.dumps(statistics.median(times) * 1000), flush=True)
"""
CALM: Final = """
print("up", flush=True)
block = bytearray(256 << 20)
while True:
    sum(number * number for number in range(200_000))
"""
HOG: Final = """
import os
print("up", flush=True)
while True:
    if os.fork() == 0:
        blocks = []
        for _ in range(64):
            blocks.append(bytearray(64 << 20))
            for at in range(0, 64 << 20, 4096):
                blocks[-1][at] = 1
        os._exit(0)
    os.wait()
"""
"""The kernel kills its child at the limit, and it starts another one."""
BOMB: Final = """
import os, time
print("up", flush=True)
while True:
    children = 0
    for _ in range(300):
        try:
            if os.fork() == 0:
                until = time.monotonic() + 0.5
                while time.monotonic() < until:
                    pass
                os._exit(0)
            children += 1
        except OSError:
            time.sleep(0.001)
    for _ in range(children):
        os.wait()
"""


async def run(report: Report, *, quick: bool) -> None:
    sandbox = HostSandbox(settings=SandboxSettings(mode="auto", processes=PROCESSES), parents=cgroup.job_parents())
    if sandbox.limits != "enforced":
        raise StrataError(Code.PRECONDITION, f"no control group of this host limits jobs: {'; '.join(sandbox.lacks)}")
    steps, rounds = (40, 4) if quick else (100, 10)

    async def step_ms(neighbour: str) -> float:
        with _job(sandbox, neighbour) as beside:
            await _output(beside)
            with _job(sandbox, STEPS.format(steps=steps)) as job:
                return float(json.loads(await _output(job)))

    for name, code in (("a memory hog", HOG), ("a fork bomb", BOMB)):
        found = await interleave(lambda code=code: step_ms(code), lambda: step_ms(CALM), rounds, better="lower")  # type: ignore[misc]
        report.add(f"median step beside {name}", "ms", found, goal=GOAL)


@contextmanager
def _job(sandbox: HostSandbox, code: str) -> Iterator[Path]:
    """A job under its supervisor, for so long; its folder."""
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        folder = Path(name)
        spec = supervised.SupervisorSpec(
            command=[sys.executable, "-I", "-c", code],
            cwd=os.sep,
            env={},
            max_log_bytes=1 << 20,
            timeout_s=0.0,
            grace_s=0.0,
        )
        supervised.write_spec(folder, sandbox.confine(spec, AttemptPaths(folder), declared=DECLARED))
        supervisor = supervised.start_supervisor(folder)
        try:
            yield folder
        finally:
            supervised.request_stop(folder, 0.0)
            supervisor.wait()


async def _output(folder: Path) -> str:
    """The first line that the job wrote."""
    while True:
        log = folder / supervised.LOG
        text = log.read_text() if log.exists() else ""
        if "\n" in text:
            return text
        if (folder / "exit.json").exists():
            raise StrataError(Code.INTERNAL, f"the job ended: {(folder / 'exit.json').read_text()}")
        await asyncio.sleep(0.02)
