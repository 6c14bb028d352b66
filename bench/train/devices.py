"""CUDA devices of the machine, as the driver reports them: their data sheets, and the memory of processes."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]
import torch

PEAK_TFLOPS: Final[Mapping[str, float]] = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
}
"""Of dense products in bfloat16, by what is in a device's name. The first that fits counts."""


def cuda_devices() -> int:
    return torch.cuda.device_count()


def peak_flops() -> float | None:
    """Of one device; None on CPUs and for devices that are not in the table."""
    names = [name for (name,) in _query("--query-gpu=name")] if cuda_devices() else []
    return next((1e12 * peak for name in names[:1] for part, peak in PEAK_TFLOPS.items() if part in name), None)


def largest_memory(pids: Iterable[int]) -> int | None:
    """Bytes of the process with most: on its device, which keeps what it once needed, or the peak in the host's memory.
    None if the driver knows none of these processes, as in a container with process ids of its own."""
    if cuda_devices():
        used = {int(pid): int(mebibytes) << 20 for pid, mebibytes in _query("--query-compute-apps=pid,used_memory")}
        return max((used[pid] for pid in pids if pid in used), default=None)
    return max(_peak_rss(pid) for pid in pids)


def _query(question: str) -> list[list[str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, question, "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return [[field.strip() for field in row] for row in csv.reader(output.splitlines())]


def _peak_rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def process_tree(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
