"""Every test has an id of its own: of several with one id, pytest-xdist runs one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TWICE = "def pytest_collection_modifyitems(items):\n    items.append(items[0])\n"


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_with_two_tests_of_one_id_is_refused(tmp_path: Path, workers: str) -> None:
    (tmp_path / "conftest.py").write_text(TWICE)
    (tmp_path / "test_planted.py").write_text("def test_it() -> None: ...\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", workers]
    run = subprocess.run([*command, tmp_path], cwd=ROOT, capture_output=True, check=False, text=True, timeout=110)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR, run.stdout + run.stderr
    assert "test_planted.py::test_it (2 tests)" in run.stdout + run.stderr
