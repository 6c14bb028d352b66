"""The pool of pytest processes: nothing that was to run is left out without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.pool import Batch, Pool, judge
from tests.tiers.table import FileTests

GOOD = "def test_one(): pass\n\ndef test_two(): pass\n"
DEADLY = "import os\n\ndef test_one(): pass\n\ndef test_two(): os._exit(0)\n\ndef test_three(): pass\n"
LATE = "import atexit, os\n\ndef test_one(): atexit.register(os._exit, 1)\n"
BROKEN = "import no_such_module\n\ndef test_one(): pass\n"


class Planted:
    """A pool, and a file of tests that it runs."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "test_planted.py"
        self.pool = Pool(folder / "runs", "", arguments=["-p", "no:cacheprovider", f"--rootdir={folder}"])

    def run(self, source: str, **selected: frozenset[str]) -> tuple[dict[str, str], bool]:
        """The result of each test, and whether the run is green."""
        self._file.write_text(source)
        tests = FileTests(str(self._file), 1.0, **selected)
        results = self.pool.run([Batch("pr", (tests,))], workers=1)
        outcomes, good = judge(self.pool, results)
        return {outcome.test_id.partition("::")[2]: outcome.result for outcome in outcomes}, good


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def test_tests_that_pass_are_a_green_run(planted: Planted) -> None:
    assert planted.run(GOOD) == ({"test_one": "passed", "test_two": "passed"}, True)


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


def test_tests_of_other_tiers_are_left_to_them(planted: Planted) -> None:
    assert planted.run(GOOD, without=frozenset({"test_planted.py::test_two"})) == ({"test_one": "passed"}, True)
