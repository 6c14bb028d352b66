"""Control groups, versions 1 and 2: reads the limits of this process, and makes, fills and removes a group with limits
for each job.

Of the limits of its own group and of the groups above it, the tightest counts. Standard library only, because the
supervisor loads this file by its path. As a program it joins groups: `python -I -S cgroup.py GROUP… -- COMMAND…`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")
AGENT_GROUP: Final = "strata-agent"
CONTROLLERS: Final = ("cpu", "memory", "pids")
_PERIOD_US: Final = 100_000
_SHARES: Final = 1024
"""Shares of one core in version 1; version 2 has 100."""
_MAX_WEIGHT: Final = 10_000
_REMOVE_ROUNDS: Final = 50
_REMOVE_S: Final = 0.02


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


# The groups of jobs: one in every hierarchy that has a limit for them


@dataclass(frozen=True)
class JobParents:
    """The groups below which each job gets a group of its own, one for each hierarchy."""

    groups: tuple[Path, ...] = ()
    limits: frozenset[str] = frozenset()
    """Those of `memory`, `processes` and `cpu` that they can limit."""


def job_parents(root: Path = ROOT, own: Path = OWN) -> JobParents:
    """Returns the groups below which those of jobs are made; without permission to create groups none.

    Version 1 has a hierarchy for each controller, and beside them version 2 may have one without controllers, which is
    still good for finding and killing all processes of a job.
    """
    unified = root if (root / "cgroup.controllers").exists() else root / "unified"
    parents, limits = [], set()
    for mount, controller in (*((root / name, name) for name in CONTROLLERS), (unified, "")):
        parent = mount / next(_groups(controller, own)).relative_to("/")
        parent = parent if parent.is_dir() else mount
        if not controller and unified == root:
            parent = _delegate(parent)
        found = _limits_below(parent)
        if found is not None:
            parents.append(parent)
            limits |= found
    return JobParents(tuple(parents), frozenset(limits))


def groups_of(pid: int, root: Path = ROOT) -> list[str]:
    """The groups of another process that limit its CPU, its memory and its processes, and the one of version 2.

    OSError if one cannot be found: what joins the others alone would not have its limit.
    """
    unified = root if (root / "cgroup.controllers").exists() else root / "unified"
    groups = []
    for controller, mount in (*((name, root / name) for name in CONTROLLERS), ("", unified)):
        if (mount / "cgroup.procs").exists():
            group = mount / next(_groups(controller, Path(f"/proc/{pid}/cgroup"))).relative_to("/")
            (group / "cgroup.procs").stat()
            groups.append(str(group))
    return groups


def create_groups(
    groups: Sequence[Path], *, memory_bytes: int, processes: int, cores: float = 0.0, cpu_weight: float = 0.0
) -> None:
    """Create the groups of one job with its limits; 0 is no limit. OSError if a limit cannot be set.

    `cores` are the most that the job gets, and `cpu_weight`, in cores, its share while all jobs want more.
    """
    for group in groups:
        group.mkdir(exist_ok=True)
        if cores:
            quota_us = round(cores * _PERIOD_US)
            _write_limit(group / "cpu.cfs_period_us", _PERIOD_US)
            _write_limit(group / "cpu.cfs_quota_us", quota_us)
            _write_limit(group / "cpu.max", f"{quota_us} {_PERIOD_US}")
        if cpu_weight:
            _write_limit(group / "cpu.shares", round(cpu_weight * _SHARES))
            _write_limit(group / "cpu.weight", min(_MAX_WEIGHT, round(cpu_weight * 100)))
        if memory_bytes:
            _write_limit(group / "memory.limit_in_bytes", memory_bytes)
            _write_limit(group / "memory.memsw.limit_in_bytes", memory_bytes)
            _write_limit(group / "memory.max", memory_bytes)
            _write_limit(group / "memory.swap.max", 0)
            _write_limit(group / "memory.oom.group", 1)
        if processes:
            _write_limit(group / "pids.max", processes)


def join_groups(groups: Sequence[Path]) -> None:
    """Move this process, and what it will start, into the groups."""
    for group in groups:
        (group / "cgroup.procs").write_text("0")


def oom_kills(groups: Sequence[Path]) -> int:
    """Returns how many processes the kernel killed in these groups because they were out of memory."""
    for group in groups:
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, ValueError):
                for line in (group / name).read_text().splitlines():
                    key, _, count = line.partition(" ")
                    if key == "oom_kill":
                        return int(count)
    return 0


def kill_groups(groups: Sequence[Path]) -> bool:
    """Kill every process in the groups; whether there was one."""
    found = False
    for group in groups:
        pids = _words(group / "cgroup.procs")
        found = found or bool(pids)
        with suppress(OSError):
            (group / "cgroup.kill").write_text("1")
            continue
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
    return found


def remove_groups(groups: Sequence[Path]) -> None:
    """Remove the groups of a job that has ended. One that is still in use for a moment is left to the next agent."""
    for group in groups:
        for _ in range(_REMOVE_ROUNDS):
            try:
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(_REMOVE_S)
            else:
                break


def _delegate(parent: Path) -> Path:
    """Let groups below `parent` have limits. Version 2 allows that only to a group without processes of its own."""
    if parent.name == AGENT_GROUP:
        parent = parent.parent
    control = parent / "cgroup.subtree_control"
    offered = set(_words(parent / "cgroup.controllers")).intersection(CONTROLLERS)
    if not offered <= set(_words(control)):
        with suppress(OSError):
            if (parent / "cgroup.type").exists():
                (parent / AGENT_GROUP).mkdir(exist_ok=True)
                (parent / AGENT_GROUP / "cgroup.procs").write_text("0")
            # Those that were delegated, and no other: one that is not would make the kernel refuse them all.
            control.write_text(" ".join(f"+{name}" for name in sorted(offered)))
    return parent


def _limits_below(parent: Path) -> set[str] | None:
    """Returns what a group below this one can limit; None if this process cannot create one."""
    probe = parent / f"strata-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return None
    files = {
        "memory.max": "memory",
        "memory.limit_in_bytes": "memory",
        "pids.max": "processes",
        "cpu.max": "cpu",
        "cpu.cfs_quota_us": "cpu",
    }
    limits = {limit for name, limit in files.items() if os.access(probe / name, os.W_OK)}
    # A process moves only if this one may write to the group that both have in common as well.
    joinable = os.access(probe / "cgroup.procs", os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK)
    probe.rmdir()
    return limits if joinable else None


def _write_limit(path: Path, value: int | str) -> None:
    # A hierarchy of version 1 has the files of its own controller only, and few systems account for swap.
    if path.exists():
        path.write_text(str(value))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _run_in_groups(words: Sequence[str]) -> None:
    """Join the groups before `--`, and become the command behind it."""
    end = words.index("--")
    join_groups([Path(word) for word in words[:end]])
    os.execv(words[end + 1], list(words[end + 1 :]))  # noqa: S606 - that is its task


if __name__ == "__main__":
    _run_in_groups(sys.argv[1:])
