"""Reads memory of this process: free bytes of CUDA, machine and control group, the peak, and kills by the kernel for
lack of memory; pins memory, and gives it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

import msgspec
import torch

from strata.base import log
from strata.train.runner.collectives import RankGroup

_log = log.get(__name__)


class KernelKills(msgspec.Struct, frozen=True, array_like=True):
    """How many processes the kernel has killed for lack of memory."""

    group: str
    """The control group of this process."""
    in_group: int | None
    """None: the group has no counter."""
    on_machine: int

    def may_be_since(self, before: KernelKills) -> bool:
        """Says whether a process of the same group may have been killed since then.

        On the machine other jobs run out of memory too, within limits of their own. That counts only where nothing
        better is known: without a counter, and when a group was killed as a whole and this is the next one.
        """
        if self.group == before.group and self.in_group is not None and before.in_group is not None:
            return self.in_group > before.in_group
        return self.on_machine > before.on_machine


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU allocator has no exception type of its own.
    phrases = ("DefaultCPUAllocator", "can't allocate memory", "bad_alloc", "not enough memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def reset_peak(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return process_bytes("VmHWM")


def release_memory() -> None:
    """Return freed memory to the system: the allocator keeps it, and it would count as used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()


def pinned_bytes(size: int) -> torch.Tensor:
    """Returns memory of the host from which and to which a CUDA device copies by itself."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        # The host limits what may be pinned. Copies are slower then, and give the same.
        _log.warning("memory_not_pinned", size=size, reason=str(error).partition("\n")[0])
        return torch.empty(size, dtype=torch.uint8)


def trim_heap() -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(ranks: RankGroup) -> int | None:
    """Free memory for this rank: of its device, or the least of the limits of process, control group and machine."""
    if ranks.device.type == "cuda":
        return _cuda_bytes(ranks.device)
    available = [free for free in (_machine_bytes(), _cgroup_bytes()) if free is not None]
    shares = [free // ranks.local_size for free in available]
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            shares.append(max(soft - process_bytes(used), 0))
    return min(shares, default=None)


def _cuda_bytes(device: torch.device) -> int:
    """Memory that torch's allocator holds without using it is free too: a pass leaves all that it needed there."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - used
    return max(min(free + torch.cuda.memory_reserved(device) - used, allowed), 0)


def _machine_bytes() -> int | None:
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _cgroup_bytes() -> int | None:
    """Returns what the control group of this process still allows, in cgroup version 1 or 2."""
    free: int | None = None
    for group in _memory_groups():
        is_v2 = (group / "memory.max").exists()
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with contextlib.suppress(OSError, ValueError, KeyError):
            # "max" is not a number: there is no limit then.
            limit, used = (int((group / name).read_text(encoding="ascii")) for name in names)
            left = max(limit - used + _cached_bytes(group), 0)
            free = left if free is None else min(free, left)
    return free


def _memory_groups() -> list[Path]:
    """The control groups of this process that may limit its memory, in cgroup version 1 or 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append(Path("/sys/fs/cgroup") / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            found.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/"))
    return found


def _cached_bytes(group: Path) -> int:
    """File cache of a control group, which the kernel reclaims when memory is needed."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    prefix = "total_" if "total_active_file" in stat else ""
    return int(stat[f"{prefix}active_file"]) + int(stat[f"{prefix}inactive_file"])


def process_bytes(name: str) -> int:
    return _field(Path("/proc/self/status"), name) or 0


def _field(file: Path, name: str) -> int | None:
    """A number of kilobytes, in bytes."""
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return None


def kernel_kills() -> KernelKills:
    for group in _memory_groups():
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            if (count := _count_kills(group / name)) is not None:
                return KernelKills(str(group), count, _count_kills(Path("/proc/vmstat")) or 0)
    return KernelKills("", None, _count_kills(Path("/proc/vmstat")) or 0)


def _count_kills(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
