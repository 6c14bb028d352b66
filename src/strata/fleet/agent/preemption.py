"""Detects local use of this machine (logins, foreign GPU processes), for which `yield_to_people` preempts jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from strata.fleet.agent import gpu
from strata.fleet.agent.supervisor import descendants


@dataclass(frozen=True, slots=True)
class LocalUse:
    """What `observe_local_use` saw."""

    foreign_pids: tuple[int, ...] = ()
    """Processes on a GPU that this agent did not start."""
    sessions: tuple[str, ...] = ()
    """Logins, as `user terminal`."""


def local_use_reason(use: LocalUse) -> str:
    """The reason to yield the machine; empty if it is not in local use."""
    if use.foreign_pids:
        return f"process {use.foreign_pids[0]} uses a GPU and is not ours"
    if use.sessions:
        return f"{use.sessions[0]} is logged in"
    return ""


def observe_local_use(environ: Mapping[str, str], supervisors: Collection[int]) -> LocalUse:
    """`supervisors` are pids of this agent: all their descendants are its own too."""
    own_pids = set(supervisors)
    for pid in supervisors:
        own_pids.update(descendants(pid))
    return LocalUse(tuple(sorted(gpu.compute_pids(environ) - own_pids)), login_sessions(environ))


def login_sessions(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        done = subprocess.run(
            ["who"], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=10.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_who(done.stdout.decode(errors="replace"))


def parse_who(printed: str) -> tuple[str, ...]:
    return tuple(" ".join(line.split()[:2]) for line in printed.splitlines() if len(line.split()) >= 2)
