"""Finds the worker that hangs while the others wait in a collective, from two probes of stacks, collective numbers and
processor time (`IDLE_CPU_S`), and has the limits of reported stack frames.

The step tells nothing then: all ranks are at the same one. So the coordinator puts the same probe to all members,
twice, and every one of them reports what its training thread does. A worker is a suspect only if each of these holds:

- it began fewer collectives than the others, by the sequence number of the process group, at both probes;
- between the two probes its stack did not change, and no thread and no child of its process used processor time: a
  worker that moves may be late, but it does not hang;
- it neither writes a checkpoint, nor waits for its device, nor waits in a collective of some ranks;
- all others wait in a collective, and they are at least as many as the suspects.

Where one of them is open nobody is a suspect: to leave a hung job standing costs less than to end a healthy worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

IDLE_CPU_S: Final = 0.1
"""Processor time between two probes that does not count as moving: reading clocks takes some."""
FRAMES: Final = 16
"""The most frames that are reported of a stack."""
FRAMES_SHOWN: Final = 8


class HangReport(NamedTuple):
    """What a worker's training thread does."""

    waits: bool
    """Its stack is inside a collective."""
    busy: bool
    """It does something that may take long and is no hang: a checkpoint, its device, or what its status says."""
    collective: int | None
    """The sequence number of the last collective that it began; None: unknown."""
    cpu_s: float | None
    """Processor time of the whole process and of its children; None: unknown."""
    frames: tuple[str, ...] = ()
    """The stack, innermost frame first."""
    operation: str = ""
    """The last collective, as the flight recorder names it."""


@dataclass
class HangProbe:
    """A probe to all members. Each reports it once, however often the report arrives."""

    number: int
    sent_s: float
    reports: dict[str, HangReport] = field(default_factory=dict)
    before: dict[str, HangReport] | None = None
    """The reports to the first probe; None: this is the first."""
    closed: bool = False
    found: bool = False
    """It is known who the cause is: the others are not to be named too."""


@dataclass(frozen=True)
class HangDiagnosis:
    pending: bool = False
    """The members are being asked: no worker is judged to hang before they have reported."""
    reported: bool = False
    """All have reported twice: who is no suspect is not stopped."""
    suspects: Mapping[str, str] = field(default_factory=dict)
    """Where each suspect stands, by worker."""


def find_suspects(before: Mapping[str, HangReport], now: Mapping[str, HangReport]) -> dict[str, str]:
    """Returns where each suspect stands; empty unless it is certain. Both mappings have all members of the
    generation."""
    numbers = [report.collective for report in now.values() if report.collective is not None]
    if len(numbers) < len(now) or any(report.busy for report in now.values()):
        return {}
    least, newest = min(numbers), max(numbers)
    behind = {worker_id: report for worker_id, report in now.items() if report.collective == least < newest}
    if 2 * len(behind) > len(now):
        return {}
    for worker_id, report in now.items():
        known = stands(before[worker_id], report) if worker_id in behind else _waits(before[worker_id], report)
        if not known:
            return {}
    return {worker_id: _describe(report, newest) for worker_id, report in behind.items()}


def stands(before: HangReport, now: HangReport) -> bool:
    """Says whether nothing of a worker has moved between two looks at it; False if that cannot be known."""
    if before.cpu_s is None or now.cpu_s is None or not now.frames:
        return False
    return (
        before.frames == now.frames
        and before.collective == now.collective
        and 0 <= now.cpu_s - before.cpu_s <= IDLE_CPU_S
        and not (before.busy or now.busy)
        # In a collective of some ranks it waits for one of them itself.
        and not (before.waits or now.waits)
    )


def _waits(before: HangReport, now: HangReport) -> bool:
    return before.waits and now.waits and before.collective == now.collective


def _describe(report: HangReport, newest: int) -> str:
    last = f", the last one {report.operation}" if report.operation else ""
    return (
        f"it began {report.collective} collectives where others began {newest}{last}; it stands in"
        f" {' < '.join(report.frames[:FRAMES_SHOWN])}"
    )
