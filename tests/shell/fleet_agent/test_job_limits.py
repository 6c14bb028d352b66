"""The limits that a supervisor watches itself."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strata.fleet.agent.job_limits import JobLimits, disk_usage
from tests.shell.fleet_agent.waiting import eventually


def test_a_slow_measurement_of_the_disk_does_not_delay_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    scan, released = os.scandir, threading.Event()

    def slow_scan(path: Any) -> Any:
        released.wait(10.0)
        return scan(path)

    monkeypatch.setattr(os, "scandir", slow_scan)
    limits = JobLimits({"disk_bytes": 1000, "disk_folders": [str(tmp_path)]}, None, lambda: 0)
    began_s = time.monotonic()
    assert limits.exceeded(began_s, lambda: 0) == {}
    assert time.monotonic() - began_s < 5.0, "the loop that sees stops waits for the scan"
    released.set()
    reason = eventually(lambda: limits.exceeded(math.inf, lambda: 0))
    assert reason["exceeded"] == "disk"
    limits.remove()


def test_all_folders_of_a_job_count_and_a_file_with_two_names_once(tmp_path: Path) -> None:
    attempt, data = tmp_path / "attempt", tmp_path / "data"
    for folder in (attempt, data / "copies"):
        folder.mkdir(parents=True)
    (attempt / "a").write_bytes(b"x" * 100_000)
    (data / "b").write_bytes(b"x" * 200_000)
    alone = disk_usage(attempt)
    both = disk_usage(attempt, data)
    assert alone is not None
    assert both is not None
    assert both >= alone + 200_000
    (data / "copies" / "b").hardlink_to(data / "b")
    assert disk_usage(attempt, data) == both
