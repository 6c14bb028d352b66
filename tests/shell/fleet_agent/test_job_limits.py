"""The limits of jobs: those that a supervisor watches itself, and what becomes of a job that exceeds its memory."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strata.fleet import wire
from strata.fleet.agent.job_limits import JobLimits, disk_usage
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.manifest import parse_manifest
from tests.shell.fleet_agent.running import HubProcess, agent
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


ALLOCATES = (
    "import os; print(len(b'x' * (200 << 20)), flush=True); open(os.environ['STRATA_OUTPUT'] + '/m', 'w').close()"
)
HOSTS = """
[hosts.small]
ram_gib = 0.5
[hosts.large]
ram_gib = 1.0
"""


def test_a_job_that_runs_out_of_memory_is_moved_to_a_larger_host(hub: HubProcess) -> None:
    """Real agents, whose jobs have control groups with different limits."""
    assert os.geteuid() == 0, "only root can become another user: run this as root"
    folder = Path(tempfile.mkdtemp(prefix="strata-oom-"))
    folder.chmod(0o711)
    body = wire.ManifestRequest(manifest=parse_manifest(HOSTS, "m.toml").resolve())
    hub.operator.call("POST", "/v1/manifest", wire.ManifestReply, body=body)
    sandbox = {"sandbox_mode": "required", "grace_s": "0"}
    try:
        with (
            agent(hub, folder, "small", sandbox_memory_gib="0.125", **sandbox),
            agent(hub, folder, "large", sandbox_memory_gib="0.75", **sandbox),
        ):
            eventually(lambda: {"small", "large"} <= hub.online())
            paused = wire.HostStateRequest(reason="the small host goes first")
            hub.operator.call("POST", "/v1/host/large/pause", wire.Host, body=paused)
            trainer = TrainerSpec(name="greedy", command=("python", "-c", ALLOCATES), directory="/usr/share")
            job = hub.submit_with(trainer, JobSpec(model="greedy", trainer="greedy"))
            first = hub.until_tried(job)
            assert (first.cause, first.facts["out_of_memory"]) == (Cause.OOM, "host"), first
            hub.operator.call("POST", "/v1/host/large/resume", wire.Host, body=wire.HostStateRequest())
            seen = hub.until(job, "completed", "failed")
            assert (seen.job.status, len(seen.attempts)) == ("completed", 2), seen
            small, large = (each.host_id for each in seen.attempts)
            assert small != large, "it was given to the same host again"
            assert hub.log(job) == f"{200 << 20}\n"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
