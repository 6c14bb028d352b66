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

import msgspec
import pytest

from strata.fleet.agent.job_limits import JobLimits, TreeUsage, disk_usage
from strata.fleet.agent.sandbox import HostSandbox, declared_amounts
from strata.fleet.agent.settings import SandboxSettings
from strata.fleet.core.amounts import Taken
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.manifest import parse_manifest
from strata.fleet.core.requirement import Needs
from strata.fleet.core.why import Why
from strata.fleet.wire.hosts import Host, HostStateRequest
from strata.fleet.wire.manifests import ManifestReply, ManifestRequest
from tests.core.fleet_agent.leases import lease
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually

NEEDS = ("bwrap",)


def test_a_slow_measurement_of_the_disk_does_not_delay_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    scan, released = os.scandir, threading.Event()

    def slow_scan(path: Any) -> Any:
        released.wait(10.0)
        return scan(path)

    monkeypatch.setattr(os, "scandir", slow_scan)
    limits = JobLimits({"disk_bytes": 1000, "disk_folders": [str(tmp_path)]}, None, lambda: 0)
    began_s = time.monotonic()
    assert limits.exceeded(began_s, TreeUsage, lambda: 0) == {}
    assert time.monotonic() - began_s < 5.0, "the loop that sees stops waits for the scan"
    released.set()
    reason = eventually(lambda: limits.exceeded(math.inf, TreeUsage, lambda: 0))
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


def test_a_watched_job_is_ended_for_what_it_takes_and_not_for_what_it_shares() -> None:
    watched = {"memory_bytes": 1000, "processes": 10, "cores": 1, "watch_memory": True, "watch_processes": True}
    limits, later_s = JobLimits(watched, None, lambda: 0), time.monotonic() + 1000
    shared = TreeUsage(rss_bytes=4000, threads=4)
    assert limits.exceeded(later_s, lambda: shared, lambda: 900) == {}, "four processes share what they have"
    found = limits.exceeded(later_s + 1, lambda: shared, lambda: 1100)
    assert found == {"exceeded": "memory", "exceeded_bytes": 1100}
    found = limits.exceeded(later_s + 2, lambda: TreeUsage(threads=11), lambda: 0)
    assert found == {"exceeded": "processes", "exceeded_count": 11}


def test_cores_are_watched_by_their_mean_so_that_a_peak_ends_no_job() -> None:
    limits, began_s = JobLimits({"cores": 1, "watch_cpu": True}, None, lambda: 0), time.monotonic() + 1000

    def used(after_s: int, cpu_s: float) -> dict[str, Any]:
        return limits.exceeded(began_s + after_s, lambda: TreeUsage(cpu_s=cpu_s), lambda: 0)

    assert not any(used(second, cpu_s) for second, cpu_s in enumerate((0, 0.5, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)))
    found = [used(7 + second, 5.0 + 2 * second) for second in range(1, 6)]
    assert found[3], "two cores all the time are noticed within five seconds"
    assert found[3]["exceeded"] == "cpu"
    assert found[3]["exceeded_count"] > 1.2


def test_a_job_that_declares_nothing_keeps_the_limits_of_the_host(tmp_path: Path) -> None:
    spec = JobSpec(model="mlp")
    nothing = lease(trainer=None)
    memory = msgspec.structs.replace(nothing, spec=msgspec.structs.replace(spec, needs=Needs(min_ram_gib=1)))
    both = msgspec.structs.replace(nothing, spec=msgspec.structs.replace(spec, needs=Needs(min_cores=2, min_ram_gib=1)))
    settings = SandboxSettings(mode="auto")
    host = HostSandbox(memory_bytes=7 << 30, settings=settings)
    capped = HostSandbox(memory_bytes=1 << 29, settings=SandboxSettings(mode="auto", memory_gib=0.5))
    for sandbox, granted, taken, limits in (
        (host, nothing, Taken(whole=True, cores=4, ram_gib=8.0), (7 << 30, "nine tenths of the host's memory", 0, 0)),
        (host, nothing, Taken(slots=1), (7 << 30, "nine tenths of the host's memory", 0, 0)),
        # It is not throttled, and has its share of the cores beside others.
        (host, memory, Taken(cores=1, ram_gib=1.0), (1 << 30, "min_ram_gib of the job", 0, 1)),
        (host, both, Taken(cores=2, ram_gib=1.0), (1 << 30, "min_ram_gib of the job", 2, 2)),
        # After it ran out of memory the hub grants more than the job declared.
        (host, both, Taken(cores=2, ram_gib=2.0), (2 << 30, "min_ram_gib of the job", 2, 2)),
        (capped, both, Taken(cores=2, ram_gib=1.0), (1 << 29, "sandbox.memory_gib of the host", 2, 2)),
        (capped, nothing, Taken(slots=1), (1 << 29, "sandbox.memory_gib of the host", 0, 0)),
    ):
        declared = declared_amounts(msgspec.structs.replace(granted, taken=taken))
        found = sandbox.limits_of(tmp_path, declared=declared)
        assert (found.memory_bytes, found.memory_set_by, found.cores, found.cpu_weight) == limits


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
    body = ManifestRequest(manifest=parse_manifest(HOSTS, "m.toml").resolve())
    hub.operator.call("POST", "/v1/manifest", ManifestReply, body=body)
    sandbox = {"sandbox_mode": "required", "grace_s": "0"}
    try:
        with (
            agent(hub, folder, "small", sandbox_memory_gib="0.125", **sandbox),
            agent(hub, folder, "large", sandbox_memory_gib="0.75", **sandbox),
        ):
            eventually(lambda: {"small", "large"} <= hub.online())
            paused = HostStateRequest(reason="the small host goes first")
            hub.operator.call("POST", "/v1/host/large/pause", Host, body=paused)
            trainer = TrainerSpec(name="greedy", command=("python", "-c", ALLOCATES), directory="/usr/share")
            job = hub.submit_with(trainer, JobSpec(model="greedy", trainer="greedy"))
            first = hub.until_tried(job)
            assert (first.cause, first.facts["out_of_memory"]) == (Cause.OOM, "host"), first
            hub.operator.call("POST", "/v1/host/large/resume", Host, body=HostStateRequest())
            seen = hub.until(job, "completed", "failed")
            assert (seen.job.status, len(seen.attempts)) == ("completed", 2), seen
            small, large = (each.host_id for each in seen.attempts)
            assert small != large, "it was given to the same host again"
            assert hub.log(job) == f"{200 << 20}\n"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_that_declared_too_little_memory_gets_more_on_the_same_host_and_each_limit_is_told(
    hub: HubProcess,
) -> None:
    assert os.geteuid() == 0, "only root can become another user: run this as root"
    folder = Path(tempfile.mkdtemp(prefix="strata-oom-"))
    folder.chmod(0o711)
    trainer = TrainerSpec(name="modest", command=("python", "-c", ALLOCATES), directory="/usr/share")
    try:
        with agent(hub, folder, "lena", sandbox_mode="required", sandbox_memory_gib="1.5", grace_s="0"):
            eventually(lambda: "lena" in hub.online())
            needs = Needs(min_ram_gib=0.125, min_cores=1, allowed_hosts=("lena",), require_limits="enforced")
            job = hub.submit_with(trainer, JobSpec(model="modest", trainer="modest", needs=needs))
            seen = hub.until(job, "completed", "failed", within_s=120.0)
            greedy = msgspec.structs.replace(needs, min_ram_gib=2)
            never = hub.submit_with(trainer, JobSpec(model="too-large", trainer="modest", needs=greedy))
            answer = hub.operator.call("GET", f"/v1/job/{never}/why", Why)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert seen.job.status == "completed", seen
    assert [each.cause for each in seen.attempts] == [Cause.OOM, None]
    assert "its limit is 0.125 GiB (min_ram_gib of the job)" in (seen.attempts[0].error or "")
    assert any("has 1.5 GiB for one job (sandbox.memory_gib)" in each.detail for each in answer.obstacles), answer
