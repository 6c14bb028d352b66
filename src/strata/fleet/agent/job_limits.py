"""Enforces the limits of one job (CPU, memory, processes, disk, network): how often they are measured, the tolerance of
CPU (1.2), and the network rules by `nft`.

Standard library only, because the supervisor loads this file by its path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

MEASURE_S: Final = 1.0
"""Seconds between two measurements."""
CPU_WINDOW_S: Final = 3.0
"""The use of cores is a mean over so long: less is a peak, and more would be noticed too late."""
CPU_TOLERANCE: Final = 1.2
"""Tolerated excess over a watched limit of cores: the processes of a job are not measured at one moment."""


class TreeUsage(NamedTuple):
    """What all processes of a job have and have used."""

    rss_bytes: int = 0
    """Memory that several of them share counts for each."""
    threads: int = 0
    cpu_s: float = 0.0
    """Also of processes that have ended."""


class JobLimits:
    """The limits of the job: control groups and rules for the network, and watchers for what the kernel does not limit.

    Without control groups the supervisor measures what the job takes and ends it if that is too much, and the number of
    processes is limited for the whole user.
    """

    def __init__(self, limits: Mapping[str, Any], cgroup: Any, oom_kills: Callable[[], int]) -> None:
        """`limits` as the agent wrote them, `cgroup` the module, `oom_kills` counts in the supervisor's own group."""
        self._memory_bytes: int = limits.get("memory_bytes", 0)
        self._processes: int = limits.get("processes", 0)
        self._cores: float = limits.get("cores", 0.0)
        self._cpu_weight: float = limits.get("cpu_weight", 0.0)
        self._disk_bytes: int = limits.get("disk_bytes", 0)
        self._disk_folders = [Path(folder) for folder in limits.get("disk_folders", ())]
        self._network_rules: str = limits.get("network_rules", "")
        self._network_table: str = limits.get("network_table", "")
        self._watch_memory: bool = limits.get("watch_memory", False) and self._memory_bytes > 0
        self._watch_processes: bool = limits.get("watch_processes", False) and self._processes > 0
        self._watch_cpu: bool = limits.get("watch_cpu", False) and self._cores > 0
        self._cpu_points: list[tuple[float, float]] = []
        """When it had used how many seconds of CPU time, for the last `CPU_WINDOW_S`."""
        self._limit_user: bool = limits.get("limit_user", False)
        self._groups = [Path(group) for group in limits.get("groups", ())]
        self._cgroup = cgroup if self._groups else None
        self._watched_kills = 0
        self._count_kills = oom_kills
        self._kills_before = oom_kills()
        self._measure_at_s = 0.0
        self._disk_watcher: threading.Thread | None = None
        self._disk_reason: dict[str, Any] = {}
        self._ended = threading.Event()

    def apply(self) -> None:
        """Applies the limits before the child starts. OSError: the host cannot limit it, and it must not start."""
        if self._cgroup is not None:
            self._cgroup.create_groups(
                self._groups,
                memory_bytes=self._memory_bytes,
                processes=self._processes,
                cores=self._cores,
                cpu_weight=self._cpu_weight,
            )
        if self._network_rules:
            run_nft(self._network_rules)

    def enter(self) -> None:
        """Enters the groups in the child, before it executes its program and before it becomes another user."""
        if self._cgroup is not None:
            self._cgroup.join_groups(self._groups)
        if self._limit_user and self._processes:
            import resource

            resource.setrlimit(resource.RLIMIT_NPROC, (self._processes, self._processes))

    def exceeded(
        self, now_s: float, measure: Callable[[], TreeUsage], measure_memory: Callable[[], int]
    ) -> dict[str, Any]:
        """Returns what the child exceeds, for `exit.json`; empty if nothing.

        `measure_memory` counts shared memory once. It takes longer, so it is called only when that matters.
        """
        if now_s < self._measure_at_s:
            return {}
        if self._disk_bytes and self._disk_watcher is None:
            self._disk_watcher = threading.Thread(target=self._watch_disk, name="disk", daemon=True)
            self._disk_watcher.start()
        reason = self._disk_reason
        if self._watch_memory or self._watch_processes or self._watch_cpu:
            reason = self._watched(now_s, measure(), measure_memory) or reason
        # A measurement takes at most a tenth of the time.
        self._measure_at_s = now_s + max(MEASURE_S, 10 * (time.monotonic() - now_s))
        return reason

    def _watched(self, now_s: float, usage: TreeUsage, measure_memory: Callable[[], int]) -> dict[str, Any]:
        if self._watch_memory and usage.rss_bytes > self._memory_bytes:
            used = measure_memory()
            if used > self._memory_bytes:
                self._watched_kills = 1
                return {"exceeded": "memory", "exceeded_bytes": used}
        if self._watch_processes and usage.threads > self._processes:
            return {"exceeded": "processes", "exceeded_count": usage.threads}
        if self._watch_cpu:
            self._cpu_points.append((now_s, usage.cpu_s))
            since_s, before_s = self._cpu_points[0]
            if now_s - since_s >= CPU_WINDOW_S:
                del self._cpu_points[0]
                cores = (usage.cpu_s - before_s) / (now_s - since_s)
                if cores > CPU_TOLERANCE * self._cores:
                    return {"exceeded": "cpu", "exceeded_count": round(cores, 2)}
        return {}

    def _watch_disk(self) -> None:
        """Measures in a thread: a job may have so many files that it takes minutes, and the job is stopped
        meanwhile."""
        took_s = 0.0
        while not self._ended.wait(max(MEASURE_S, 9 * took_s) if took_s else 0.0):
            began_s = time.monotonic()
            used = disk_usage(*self._disk_folders)
            if used is None or used > self._disk_bytes:
                self._disk_reason = {"exceeded": "disk", "exceeded_bytes": -1 if used is None else used}
                return
            took_s = time.monotonic() - began_s

    def kill(self) -> bool:
        """Kill every process in the groups; whether there was one."""
        return self._cgroup is not None and bool(self._cgroup.kill_groups(self._groups))

    def remove(self) -> int:
        """Removes the groups after the child. Returns how many of its processes were killed because they were out of
        memory."""
        self._ended.set()
        if self._cgroup is None:
            kills = self._watched_kills or self._count_kills() - self._kills_before
        else:
            kills = self._watched_kills or self._cgroup.oom_kills(self._groups)
            self._cgroup.remove_groups(self._groups)
        if self._network_table:
            with contextlib.suppress(OSError):
                run_nft(f"delete table inet {self._network_table}")
        return int(kills)


def disk_usage(*folders: Path) -> int | None:
    """Bytes on the disk below the folders; None if they are nested so deeply that they cannot be measured. A file with
    several names in them counts once."""
    total = 0
    linked: set[tuple[int, int]] = set()
    to_visit = [str(folder) for folder in folders]
    while to_visit:
        try:
            with os.scandir(to_visit.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            to_visit.append(entry.path)
                        elif status.st_nlink > 1:
                            if (status.st_dev, status.st_ino) in linked:
                                continue
                            linked.add((status.st_dev, status.st_ino))
                        total += status.st_blocks * 512
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
    return total


def run_nft(rules: str) -> None:
    """OSError if the rules are not in force."""
    done = subprocess.run(
        ["nft", "-f", "-"],
        input=rules.encode(),
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"the network rules of the job cannot be set: {done.stderr.decode(errors='replace').strip()}")
