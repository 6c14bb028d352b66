"""Queries `nvidia-smi` for GPUs and for the processes on them, and shows jobs their cards. Without it: no GPUs."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.fleet.core.capability import Gpu

MIB: Final = 1024 * 1024
NVIDIA_SMI_TIMEOUT_S: Final = 20.0
_AMD_UUID: Final = re.compile(r"GPU-[0-9a-f]{16}")
"""How ROCm writes one; NVIDIA's have dashes."""
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


def visible_devices(cards: Sequence[int | str]) -> dict[str, str]:
    """The variables that show a job just these cards: by UUID, which stays the same when another card is lost."""
    amd = [str(card) for card in cards if _AMD_UUID.fullmatch(str(card))]
    others = [str(card) for card in cards if str(card) not in amd]
    variables = {"ROCR_VISIBLE_DEVICES": ",".join(amd)} if amd or not cards else {}
    return variables | ({"CUDA_VISIBLE_DEVICES": ",".join(others)} if others or not cards else {})


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
