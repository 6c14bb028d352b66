"""A pytest plugin that runs the selected tests of its process and records what each did, test by test.

`python -m tests.tiers` loads it with `-p`. The record is written as the tests end, so that what a process that dies has
not run is known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest


class Selection(msgspec.Struct, frozen=True):
    """What a process runs of the files that it collects."""

    only: dict[str, list[str]] = {}
    """By file: these test ids alone."""
    without: list[str] = []
    named: list[str] = []
    """Test ids that the durations have: a file that does not have one of them any more says so."""
    shuffle: int | None = None
    """The seed of a random order: of the files, and of the tests of each."""


class Outcome(msgspec.Struct, frozen=True):
    """One test that has ended."""

    test_id: str
    result: str
    seconds: float


class Collected(msgspec.Struct, frozen=True, tag=True):
    """What a process is about to run."""

    test_ids: list[str]
    gone: list[str]
    """What the selection named and no file has: a test that was renamed or removed."""
    processor_s: float
    """What the imports and the collection cost."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--selection", type=Path, help="a file of JSON: which tests to run")
    parser.addoption("--record", type=Path, help="the file to write what each test did to")


def pytest_configure(config: pytest.Config) -> None:
    selection = msgspec.json.decode(config.getoption("selection").read_bytes(), type=Selection)
    config.pluginmanager.register(Recorder(selection, config.getoption("record")), "strata-recorder")


def shuffle(items: Iterable[pytest.Item], rng: random.Random) -> list[pytest.Item]:
    """The files in a random order, and the tests of each: what a module sets up, as an engine, is set up once."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    tests = list(files.values())
    rng.shuffle(tests)
    for each in tests:
        rng.shuffle(each)
    return [item for each in tests for item in each]


class Recorder:
    """Counts set-up, call and tear-down of a test as one."""

    def __init__(self, selection: Selection, record: Path) -> None:
        self._selection = selection
        self._record = record
        self._seconds: dict[str, float] = {}
        self._results: dict[str, str] = {}
        self._found: set[str] = set()
        self._all_collected = True

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._found.add(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._all_collected = self._all_collected and report.passed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
        if self._selection.shuffle is not None:
            # Before pytest puts the tests together that share a fixture with parameters.
            items[:] = shuffle(items, random.Random(self._selection.shuffle))
        yield
        kept = [item for item in items if self._is_selected(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if not self._is_selected(item.nodeid)])
        items[:] = kept
        gone = sorted(set(self._selection.named) - self._found) if self._all_collected else []
        self._write(Collected([item.nodeid for item in items], gone, round(time.process_time(), 2)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test_id = report.nodeid
        self._seconds[test_id] = self._seconds.get(test_id, 0.0) + report.duration
        if report.outcome != "passed" or test_id not in self._results:
            self._results[test_id] = report.outcome
        if report.when == "teardown":
            self._write(Outcome(test_id, self._results.pop(test_id), round(self._seconds.pop(test_id), 3)))

    def _is_selected(self, test_id: str) -> bool:
        only = self._selection.only.get(test_id.partition("::")[0])
        return test_id not in self._selection.without and (only is None or test_id in only)

    def _write(self, entry: Collected | Outcome) -> None:
        with self._record.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
