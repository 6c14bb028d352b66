"""Queries `nvidia-smi` for GPUs and for the processes on them, and assigns GPUs to jobs. Without it: no GPUs."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.fleet.core.capability import Gpu
from strata.fleet.core.requirement import Needs

MIB: Final = 1024 * 1024
NVIDIA_SMI_TIMEOUT_S: Final = 20.0
_CUDA: Final = re.compile(r"CUDA Version:\s*([0-9.]+)")


@dataclass(frozen=True, slots=True)
class GpuInventory:
    gpus: tuple[Gpu, ...] = ()
    driver_cuda: str = ""
    """The newest CUDA version that the driver supports."""
    problem: str = ""


def query_gpus(environ: Mapping[str, str]) -> GpuInventory:
    listing, problem = _run_nvidia_smi(["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"], environ)
    gpus = parse_gpus(listing)
    if not gpus:
        return GpuInventory(problem=problem)
    banner, _ = _run_nvidia_smi([], environ)
    match = _CUDA.search(banner)
    return GpuInventory(gpus, match[1] if match else "")


def compute_pids(environ: Mapping[str, str]) -> frozenset[int]:
    """Processes that compute on a GPU."""
    listing, _ = _run_nvidia_smi(["--query-compute-apps=pid", "--format=csv,noheader,nounits"], environ)
    return frozenset(int(line) for line in listing.split() if line.isdecimal())


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    rows = csv.reader(listing.splitlines(), skipinitialspace=True)
    return tuple(
        Gpu(name=row[0].strip()[:256], vram_bytes=int(row[1]) * MIB)
        for row in rows
        if len(row) == 2 and row[1].strip().isdecimal()
    )


def assign_gpus(
    gpus: Sequence[Gpu], held: Collection[Sequence[int]], needs: Needs, *, slots: int
) -> tuple[int, ...] | None:
    """The GPUs for a job: those that the fewest other jobs hold. None: all GPUs, on a host with one job at a time.

    On a host with several slots a job that neither needs nor prefers a GPU gets none.
    """
    if slots <= 1 or not gpus:
        return None
    # A GPU that is sold as 24 GiB reports a little less, so matching has rounded already.
    use = [sum(number in devices for devices in held) for number in range(len(gpus))]
    fits = [number for number, gpu in enumerate(gpus) if gpu.vram_bytes >= (needs.min_vram_gib - 0.5) * 1024**3]
    fits.sort(key=lambda number: (use[number], number))
    return tuple(sorted(fits[: _wanted_gpus(needs)]))


def _wanted_gpus(needs: Needs) -> int:
    one = needs.require_cuda or needs.prefer_cuda or needs.min_vram_gib > 0
    return needs.min_gpus or int(one)


def _run_nvidia_smi(args: list[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Its output, and the problem if it failed. A hung driver must not hang the agent."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *args],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return "", ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi: {error}"
    if done.returncode:
        message = (done.stdout or done.stderr).decode(errors="replace").strip()
        return "", f"nvidia-smi: {message[:200] or done.returncode}"
    return done.stdout.decode(errors="replace"), ""
