"""Waiting for other processes: they cannot be awaited, only looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def eventually(look: Callable[[], T | None], within_s: float = 60.0) -> T:
    """What `look` finds, as soon as it finds something true."""
    until_s = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < until_s, f"not within {within_s} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
