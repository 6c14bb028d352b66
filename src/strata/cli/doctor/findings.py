"""A finding of `strata doctor`, and the checks that hub and agent share: disk space (2 GiB), private files,
clock skew.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

LOW_BYTES: Final = 2 << 30
"""Less free disk space than this is a warning."""


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
    why = f"{format_bytes(free)} free in {folder}"
    return (
        ok(check, why) if free >= LOW_BYTES else warning(check, why, f"free at least {format_bytes(LOW_BYTES)} there")
    )


def check_private(check: str, paths: Sequence[Path]) -> DoctorFinding:
    """Returns whether only the owner can read those of the paths that exist."""
    import os

    existing = list(filter(Path.exists, paths))
    if os.name != "posix":
        return warning(
            check, "not checked: this system has no POSIX permissions", "make sure that only you can read them"
        )
    exposed = [path for path in existing if path.stat().st_mode & 0o077]
    if exposed:
        names = " ".join(map(str, exposed))
        return problem(check, f"other users can read {names}", f"chmod go= {names}")
    foreign = [path for path in existing if path.stat().st_uid != os.geteuid()]
    if foreign and os.geteuid() != 0:
        return warning(check, f"{foreign[0]} belongs to another user", "run this as that user")
    return ok(check, f"{len(existing)} of {len(paths)} exist, readable by their owner only")


def check_clock_skew(check: str, ahead_s: float) -> DoctorFinding:
    from strata.fleet.client.hub_client import MAX_SKEW_S

    side = "ahead of" if ahead_s > 0 else "behind"
    why = f"this clock is {abs(ahead_s):.0f} s {side} the hub's"
    if abs(ahead_s) <= 5.0:
        return ok(check, why)
    fix = "set both clocks by NTP: timedatectl set-ntp true"
    return warning(check, why, fix) if abs(ahead_s) <= MAX_SKEW_S else problem(check, why, fix)
