"""The limits that a supervisor watches itself."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strata.fleet.agent.job_limits import JobLimits
from tests.shell.fleet_agent.waiting import eventually


def test_a_slow_measurement_of_the_disk_does_not_delay_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    scan, released = os.scandir, threading.Event()

    def slow_scan(path: Any) -> Any:
        released.wait(10.0)
        return scan(path)

    monkeypatch.setattr(os, "scandir", slow_scan)
    limits = JobLimits({"disk_bytes": 1000, "disk_folder": str(tmp_path)}, None, lambda: 0)
    began_s = time.monotonic()
    assert limits.exceeded(began_s, lambda: 0) == {}
    assert time.monotonic() - began_s < 5.0, "the loop that sees stops waits for the scan"
    released.set()
    reason = eventually(lambda: limits.exceeded(math.inf, lambda: 0))
    assert reason["exceeded"] == "disk"
    limits.remove()
