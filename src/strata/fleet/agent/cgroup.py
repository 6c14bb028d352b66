"""The limits of the control group this process is in, and of those above it: the tightest counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """CPUs; None without a limit."""
    found = []
    for path in _files("cpu.max", root, own):
        with suppress(OSError, ValueError):
            quota, period = path.read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
    for path in _files("cpu/cpu.cfs_quota_us", root, own):
        with suppress(OSError, ValueError):
            limit = int(path.read_text())
            if limit > 0:
                found.append(limit / int(path.with_name("cpu.cfs_period_us").read_text()))
    return min(found, default=None)


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes. Version 1 says "no limit" as a number beyond any memory, which harms nobody in a minimum."""
    found = []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        for path in _files(name, root, own):
            with suppress(OSError, ValueError):
                found.append(int(path.read_text()))
    return min(found, default=None)


def _files(name: str, root: Path, own: Path) -> Iterator[Path]:
    """The file in the group of this process and in every group above; `controller/file` for version 1."""
    controller, _, file = name.rpartition("/")
    for group in _groups(controller, own):
        for each in (group, *group.parents):
            yield root / controller / each.relative_to("/") / file


def _groups(controller: str, own: Path) -> Iterator[PurePosixPath]:
    lines: list[str] = []
    with suppress(OSError):
        lines = own.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and path.startswith("/"):
            yield PurePosixPath(path)
    # In a container the names of the groups may be those outside of it, while the files are its own.
    yield PurePosixPath("/")
