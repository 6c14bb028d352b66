"""The pool of pytest processes: nothing that was to run is left out without a word."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import pool, table
from tests.tiers.__main__ import make_report
from tests.tiers.pool import Batch, BatchResult, Pool, judge
from tests.tiers.recorder import Outcome, shuffle
from tests.tiers.table import FileTests

GOOD = "def test_one(): pass\n\ndef test_two(): pass\n"
DEADLY = "import os\n\ndef test_one(): pass\n\ndef test_two(): os._exit(0)\n\ndef test_three(): pass\n"
LATE = "import atexit, os\n\ndef test_one(): atexit.register(os._exit, 1)\n"
BROKEN = "import no_such_module\n\ndef test_one(): pass\n"


class Planted:
    """A pool, and a file of tests that it runs."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "test_planted.py"
        self.pool = Pool(folder / "runs", "", arguments=["-p", "no:cacheprovider", f"--rootdir={folder}"])

    def run(self, source: str, **selected: frozenset[str]) -> tuple[dict[str, str], bool]:
        """The result of each test, and whether the run is green."""
        _, outcomes, good = self.judged(source, **selected)
        return {outcome.test_id.partition("::")[2]: outcome.result for outcome in outcomes}, good

    def judged(
        self, source: str, **selected: frozenset[str]
    ) -> tuple[Sequence[tuple[Batch, BatchResult]], list[Outcome], bool]:
        self.file.write_text(source)
        tests = FileTests(str(self.file), 1.0, **selected)
        results = self.pool.run([Batch("pr", (tests,))], workers=1)
        return results, *judge(self.pool, results)


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def test_tests_that_pass_are_a_green_run(planted: Planted) -> None:
    assert planted.run(GOOD) == ({"test_one": "passed", "test_two": "passed"}, True)


def test_a_slice_begins_last_and_only_while_there_is_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long, short = tmp_path / "test_long.py", tmp_path / "test_short.py"
    for file in (long, short):
        file.write_text(GOOD)
    batches = [Batch("slice", (FileTests(str(long), 9.0),)), Batch("pr", (FileTests(str(short), 1.0),))]
    options = ["-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    both = Pool(tmp_path / "runs", "", arguments=options).run(batches, workers=1)
    assert [batch.tier for batch, _ in both] == ["pr", "slice"]
    late = Pool(tmp_path / "runs", "", arguments=options, slice_within_s=-1.0)
    ((batch, result),) = late.run(batches, workers=1)
    assert (batch.tier, result.is_good) == ("pr", True)
    assert "test_long.py: no time is left, the next landing runs it" in capsys.readouterr().out


def test_a_process_that_ends_early_with_status_0_is_red(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    results, good = planted.run(DEADLY)
    assert results == {"test_one": "passed"}
    assert not good
    printed = capsys.readouterr().out
    assert "NOT RUN test_planted.py::test_two" in printed
    assert "NOT RUN test_planted.py::test_three" in printed


def test_an_error_after_the_last_test_is_red(planted: Planted) -> None:
    assert planted.run(LATE) == ({"test_one": "passed"}, False)


def test_a_file_that_cannot_be_collected_is_red(planted: Planted) -> None:
    assert planted.run(BROKEN) == ({}, False)


def test_a_failure_is_red_and_named(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert planted.run("def test_one(): assert False\n") == ({"test_one": "failed"}, False)
    assert "FAILED test_planted.py::test_one" in capsys.readouterr().out


@pytest.mark.parametrize(("tolerated", "result"), [(1, "passed"), (0, "failed")])
def test_a_flaky_test_counts_as_passed_while_so_many_are_tolerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tolerated: int, result: str
) -> None:
    class Alone(Pool):
        def passes_alone(self, test_id: str, *, limit_s: float) -> bool:
            return True

    monkeypatch.setattr(pool, "MOST_FLAKY_FILES", tolerated)
    failed = Outcome("test_a.py::test_one", "failed", 1.0)
    results = [(Batch("pr", (FileTests("test_a.py", 1.0),)), BatchResult([failed], [], [], "", 1.0, 0.0))]
    assert judge(Alone(tmp_path, ""), results) == ([Outcome("test_a.py::test_one", result, 1.0)], tolerated > 0)


def test_tests_of_other_tiers_are_left_to_them(planted: Planted) -> None:
    assert planted.run(GOOD, without=frozenset({"test_planted.py::test_two"})) == ({"test_one": "passed"}, True)


@pytest.mark.parametrize(("source", "gone"), [(GOOD, ["test_planted.py::test_renamed[1]"]), (BROKEN, [])])
def test_a_test_that_was_selected_and_does_not_exist_is_named(
    planted: Planted, capsys: pytest.CaptureFixture[str], source: str, gone: list[str]
) -> None:
    only = frozenset({"test_planted.py::test_one", "test_planted.py::test_renamed[1]"})
    results, outcomes, _ = planted.judged(source, only=only)
    assert make_report("pr", results, outcomes).gone == gone
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines() if "GONE" in line] == [
        f"GONE {test_id}" for test_id in gone
    ]


@pytest.mark.parametrize(("source", "complete"), [(GOOD, True), (DEADLY, False), (LATE, False)])
def test_the_report_says_of_which_file_a_test_was_not_run(planted: Planted, source: str, complete: bool) -> None:
    results, outcomes, _ = planted.judged(source)
    report = make_report("pr", results, outcomes)
    named = [str(planted.file)]
    assert (report.parts, report.incomplete) == ((named, []) if complete else ([], named))


@pytest.mark.parametrize(("arguments", "reports"), [("", ["paths.json"]), ("-k no_such_test", [])])
def test_a_run_with_arguments_for_pytest_is_not_recorded(tmp_path: Path, arguments: str, reports: list[str]) -> None:
    command = [sys.executable, "-m", "tests.tiers", "run", "tests/core/base/test_unix_socket.py", "--runs", tmp_path]
    subprocess.run([*map(str, command), f"--pytest={arguments}"], cwd=table.ROOT, capture_output=True, check=False)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == reports
    assert list(tmp_path.glob("*.log"))


def test_a_random_order_leaves_the_tests_of_a_file_together() -> None:
    items: list[Any] = [SimpleNamespace(path=Path(file), nodeid=f"{file}{n}") for file in "abc" for n in range(5)]
    orders = [[item.nodeid for item in shuffle(items, random.Random(seed))] for seed in range(20)]
    assert all(sorted(order) == sorted(item.nodeid for item in items) for order in orders)
    assert all(len({nodeid[0] for nodeid in order[at : at + 5]}) == 1 for order in orders for at in (0, 5, 10))
    assert {order[0][0] for order in orders} == set("abc")
    assert len({tuple(order) for order in orders}) == len(orders)
