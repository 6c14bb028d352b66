"""CPU and memory limits of this process's control group and of its ancestors: the tightest counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """The CPU quota in CPUs; None without a limit."""
    limits = []
    for path in _files("cpu.max", root, own):
        with suppress(OSError, ValueError):
            quota, period = path.read_text().split()
            if quota != "max":
                limits.append(int(quota) / int(period))
    for path in _files("cpu/cpu.cfs_quota_us", root, own):
        with suppress(OSError, ValueError):
            limit = int(path.read_text())
            if limit > 0:
                limits.append(limit / int(path.with_name("cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """The memory limit in bytes. Version 1 reports no limit as a huge number, which is harmless in a minimum."""
    limits = []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        for path in _files(name, root, own):
            with suppress(OSError, ValueError):
                limits.append(int(path.read_text()))
    return min(limits, default=None)


def _files(name: str, root: Path, own: Path) -> Iterator[Path]:
    """The file in the group of this process and in every group above; `controller/file` for version 1."""
    controller, _, file = name.rpartition("/")
    for group in _groups(controller, own):
        for ancestor in (group, *group.parents):
            yield root / controller / ancestor.relative_to("/") / file


def _groups(controller: str, own: Path) -> Iterator[PurePosixPath]:
    lines: list[str] = []
    with suppress(OSError):
        lines = own.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and path.startswith("/"):
            yield PurePosixPath(path)
    # In a container the groups may have the names of the host, while the files are the container's own.
    yield PurePosixPath("/")
