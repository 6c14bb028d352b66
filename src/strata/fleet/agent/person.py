"""Whether somebody wants this machine back: a person at it, or programs on its cards that are not ours."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from strata.fleet.agent import gpu
from strata.fleet.agent.waiter import descendants


@dataclass(frozen=True, slots=True)
class Use:
    """What was seen."""

    strangers: tuple[int, ...] = ()
    """Processes on a card that this agent did not start."""
    sessions: tuple[str, ...] = ()
    """Who is logged in, as `user terminal`."""


def wanted_back(use: Use) -> str:
    """Why the machine is wanted back; empty if it is not."""
    if use.strangers:
        return f"process {use.strangers[0]} uses a GPU and is not ours"
    if use.sessions:
        return f"{use.sessions[0]} is logged in"
    return ""


def observe(environ: Mapping[str, str], ours: Collection[int]) -> Use:
    """`ours` are waiters: all below them is ours too."""
    known = set(ours)
    for pid in ours:
        known.update(descendants(pid))
    return Use(tuple(sorted(gpu.users(environ) - known)), sessions(environ))


def sessions(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        done = subprocess.run(
            ["who"], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=10.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_who(done.stdout.decode(errors="replace"))


def parse_who(printed: str) -> tuple[str, ...]:
    return tuple(" ".join(line.split()[:2]) for line in printed.splitlines() if len(line.split()) >= 2)
