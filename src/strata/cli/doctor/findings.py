"""What a look at something says: one line each, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

LOW_BYTES: Final = 2 << 30
"""Less room than this is worth a word, wherever it is."""


class FindingState(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class DoctorFinding(NamedTuple):
    check: str
    state: FindingState
    why: str
    fix: str = ""
    """Empty if there is nothing to do."""


def ok(check: str, why: str) -> DoctorFinding:
    return DoctorFinding(check, FindingState.OK, why)


def warning(check: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(check, FindingState.WARNING, why, fix)


def problem(check: str, why: str, fix: str) -> DoctorFinding:
    return DoctorFinding(check, FindingState.PROBLEM, why, fix)


def check_disk_space(check: str, folder: Path) -> DoctorFinding:
    import shutil

    from strata.cli.fleet.client import format_bytes

    free = shutil.disk_usage(folder).free
    told = f"{format_bytes(free)} free in {folder}"
    return ok(check, told) if free >= LOW_BYTES else warning(check, told, "free some space")


def check_private(check: str, paths: Sequence[Path]) -> DoctorFinding:
    """Whether nobody else can read what is there of these."""
    import os

    there = [path for path in paths if path.exists()]
    if os.name != "posix":
        return warning(check, "who can read them is not looked at on this system", "see to it that only you can")
    open_ = [path for path in there if path.stat().st_mode & 0o077]
    if open_:
        names = " ".join(map(str, open_))
        return problem(check, f"others can read {names}", f"chmod go= {names}")
    foreign = [path for path in there if path.stat().st_uid != os.geteuid()]
    if foreign and os.geteuid() != 0:
        return warning(check, f"{foreign[0]} belongs to another user", "run this as that user")
    return ok(check, f"{len(there)} of {len(paths)} are there, for their owner only")


def check_clock_skew(check: str, ahead_s: float, most_s: float) -> DoctorFinding:
    side = "ahead of" if ahead_s > 0 else "behind"
    told = f"this clock is {abs(ahead_s):.0f} s {side} the hub's"
    if abs(ahead_s) <= min(5.0, most_s):
        return ok(check, told)
    fix = "let NTP set both clocks (timedatectl set-ntp true)"
    return warning(check, told, fix) if abs(ahead_s) <= most_s else problem(check, told, fix)
