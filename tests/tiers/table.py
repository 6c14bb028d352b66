"""Which tier a test belongs to, by its folder and its measured time, and what a slice of the tier `merge` holds.

Nothing here starts a process. A tier is run whole; of `merge` each landing runs a slice, whole within a cycle.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).parents[2]
DURATIONS: Final = Path(__file__).with_name("durations.json")
LEDGER: Final = Path(__file__).with_name("ledger.json")
WORKERS: Final = 3
"""The processes of the pool on two cores: much of their time the tests wait for processes and servers."""
SLICE: Final = "slice"
"""What a landing runs of `merge`."""
SLICE_S: Final = 600
"""How long the slice of a landing may take, with all workers."""
LONG_S: Final = 5.0
"""Tests of at least this are recorded one by one."""
UNMEASURED_S: Final = 8.0
"""A new file counts so until it is measured."""
UNMEASURED_MERGE_S: Final = 120.0
"""And so does a file of `merge`."""
UNMEASURED_LONG_S: Final = 60.0
"""And so does a test that is known to be long."""
PART_S: Final = 600.0
"""A file that takes longer in `merge` is cut into its functions, and a function into its cases."""


class Tier(enum.Enum):
    """How often a test is run. The values are in the order of the tiers."""

    CHECK = "check"
    UNIT = "unit"
    PR = "pr"
    MERGE = "merge"
    WEEKLY = "weekly"


FOLDERS: Final = {
    "tests/rules": Tier.CHECK,
    "tests/core": Tier.UNIT,
    "tests/wire": Tier.UNIT,
    "tests/e2e": Tier.MERGE,
    "tests/engines": Tier.WEEKLY,
    "tests/cuda_lane": Tier.WEEKLY,
}
"""All other folders are in `pr`."""

LIMITS_S: Final = {Tier.CHECK: 60.0, Tier.UNIT: 5.0, Tier.PR: 30.0, Tier.MERGE: 900.0}
"""A test that took longer is in the next tier that allows it, but for those of `PROMOTED` and `WHOLE`."""

PROMOTED: Final = (
    "tests/e2e/test_base_install.py",
    "tests/e2e/test_quickstart.py",
    "tests/e2e/test_readme.py",
    "tests/e2e/test_starts.py",
    "tests/e2e/test_tinker_sdk.py",
    "tests/e2e/test_up.py",
)
"""End-to-end tests of `pr`: the documented starts and pages."""

WHOLE: Final = ("tests/abuse", "tests/conformance")
"""Every change has to pass all attacks and all adapters: their tests stay in `pr` as well."""
WHOLE_S: Final = 120.0
"""Only one that takes longer than this leaves, as the time of a landing is bounded."""

TIMED: Final = ("tests/e2e/test_quickstart.py", "tests/e2e/test_starts.py")
"""A stranger's first minutes are measured, so nothing runs beside these files."""


class Durations(msgspec.Struct, forbid_unknown_fields=True):
    """What was measured, in seconds of one process."""

    files: dict[str, float] = {}
    """A file's tests together, without those of `long`."""
    long: dict[str, float | None] = {}
    """By test id; None for a test of `merge` that was not measured yet."""


class LedgerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run."""

    commit: str
    date: str
    result: str
    """`passed` or `failed`."""


class Ledger(msgspec.Struct, forbid_unknown_fields=True):
    """The last runs. A tier that is run whole has one row, a file of `merge` or `weekly`, or a part of it, its own."""

    tiers: dict[str, LedgerRow] = {}
    parts: dict[str, LedgerRow] = {}


class FileTests(msgspec.Struct, frozen=True):
    """What a tier runs of one file."""

    name: str
    """The file, or its part that the ledger has a row for."""
    seconds: float
    only: frozenset[str] | None = None
    """The test ids, or all of them."""
    without: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    """All test ids of the file that `Durations.long` has."""

    @property
    def path(self) -> str:
        return self.name.partition("::")[0]


def read_durations() -> Durations:
    return msgspec.json.decode(DURATIONS.read_bytes(), type=Durations)


def read_ledger() -> Ledger:
    return msgspec.json.decode(LEDGER.read_bytes(), type=Ledger)


def list_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def base_tier(path: str) -> Tier:
    """The tier of a file's tests that are as short as the tier demands."""
    if path in PROMOTED:
        return Tier.PR
    return next((tier for folder, tier in FOLDERS.items() if path.startswith(f"{folder}/")), Tier.PR)


def tier_of(test_id: str, durations: Durations) -> Tier:
    path = test_id.partition("::")[0]
    base = base_tier(path)
    if test_id not in durations.long or path in PROMOTED:
        return base
    seconds = durations.long[test_id]
    if path.startswith(tuple(f"{folder}/" for folder in WHOLE)) and (seconds or 0.0) <= WHOLE_S:
        return base
    if seconds is None:
        return max(base, Tier.MERGE, key=list(Tier).index)
    return next(tier for tier in list(Tier)[list(Tier).index(base) :] if seconds <= LIMITS_S.get(tier, float("inf")))


def select_tier(tier: Tier, files: Iterable[str], durations: Durations) -> list[FileTests]:
    """Every test is in one tier: a file in its base tier without its long tests, these one by one in theirs."""
    long_of: dict[str, dict[str, Tier]] = {}
    for test_id in durations.long:
        long_of.setdefault(test_id.partition("::")[0], {})[test_id] = tier_of(test_id, durations)
    chosen = []
    for path in files:
        long = long_of.get(path, {})
        here = {test_id: seconds_of(test_id, durations) for test_id, its_tier in long.items() if its_tier is tier}
        rest_s = durations.files.get(path, UNMEASURED_MERGE_S if base_tier(path) is Tier.MERGE else UNMEASURED_S)
        if base_tier(path) is tier and (tier is not Tier.MERGE or rest_s + sum(here.values()) <= PART_S):
            elsewhere = frozenset(long.keys() - here.keys())
            chosen.append(FileTests(path, rest_s + sum(here.values()), None, elsewhere, frozenset(long)))
        elif base_tier(path) is tier:
            chosen += [FileTests(path, rest_s, None, frozenset(long), frozenset(long)), *cut(path, here)]
        elif here:
            chosen += cut(path, here)
    return chosen


def seconds_of(test_id: str, durations: Durations) -> float:
    return durations.long[test_id] or UNMEASURED_LONG_S


def cut(name: str, seconds: Mapping[str, float]) -> list[FileTests]:
    """The tests of a file or function as one part, or as several where one would be longer than a part may be."""
    if sum(seconds.values()) <= PART_S or "[" in name:
        return [FileTests(name, sum(seconds.values()), frozenset(seconds))]
    parts: dict[str, dict[str, float]] = {}
    for test_id, test_s in seconds.items():
        part = test_id if "::" in name else test_id.partition("[")[0]
        parts.setdefault(part, {})[test_id] = test_s
    if parts.keys() == {name}:
        return [FileTests(name, sum(seconds.values()), frozenset(seconds))]
    return [each for part, tests in parts.items() for each in cut(part, tests)]


def choose_slice(merge: Iterable[FileTests], ledger: Mapping[str, LedgerRow], *, within_s: float) -> list[FileTests]:
    """What failed comes first, then what was never run, then what has not run for longest."""

    def age(tests: FileTests) -> tuple[bool, str, str]:
        row = ledger.get(tests.name)
        failed = row is not None and row.result == "failed"
        return (not failed, row.date if row is not None else "", tests.name)

    chosen: list[FileTests] = []
    left_s = within_s
    for tests in sorted(merge, key=age):
        if tests.seconds <= left_s:
            chosen.append(tests)
            left_s -= tests.seconds
    return chosen


def landings_of_a_cycle(merge: Iterable[FileTests], *, within_s: float) -> int:
    """How many landings run the whole tier, each what has not run for longest."""
    waiting, count = list(merge), 0
    while waiting:
        chosen = choose_slice(waiting, {}, within_s=within_s)
        if not chosen:
            longest = max(waiting, key=lambda tests: tests.seconds)
            raise ValueError(f"{longest.name} takes {longest.seconds:.0f} s and fits no slice of {within_s:.0f} s")
        waiting = [tests for tests in waiting if tests not in chosen]
        count += 1
    return count


def is_in(test_id: str, part: str) -> bool:
    """Whether a file, a function or a case holds a test."""
    return test_id == part or test_id.startswith((f"{part}::", f"{part}["))
