"""What survives what: agents that are killed, hubs that are away, hosts that are wanted back, leases that are lost."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from pathlib import Path

import pytest

from strata.fleet.core.job import Cause
from strata.fleet.wire.events import EventsQuery, EventsReply
from strata.fleet.wire.hosts import Host, HostStateRequest
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually, is_alive

pytestmark = pytest.mark.timeout(300)

MOST_GIB = 0.75 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
"""Of this machine's memory: two jobs that take so much do not fit beside each other."""
WHOLE = [f"before {line}" for line in range(1000)] + ["held"] + [f"after {line}" for line in range(1000)]


def test_an_agent_that_was_killed_finds_its_child_and_the_log_has_every_line(hub: HubProcess, tmp_path: Path) -> None:
    release = tmp_path / "release"
    with agent(hub, tmp_path, "anna") as anna:
        job = hub.submit("anna", "held", release=str(release))
        hub.says(job, "held")
        pid = anna.child()
        anna.end(signal.SIGKILL)
        assert is_alive(pid)
        anna.start()
        eventually(lambda: "attempt_resumed" in anna.said())
        assert anna.child() == pid
        release.touch()
        seen = hub.until(job, "completed", "failed")
        assert seen.job.status == "completed"
        assert [attempt.epoch for attempt in seen.attempts] == [1]
        assert hub.log(job).splitlines() == WHOLE


def test_a_child_that_ended_while_there_was_no_agent_is_reported_by_the_next_one(
    hub: HubProcess, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    with agent(hub, tmp_path, "bert") as bert:
        job = hub.submit("bert", "held", release=str(release))
        hub.says(job, "held")
        pid = bert.child()
        bert.end(signal.SIGKILL)
        release.touch()
        eventually(lambda: not is_alive(pid))
        assert hub.job(job).job.status == "running"
        bert.start()
        seen = hub.until(job, "completed", "failed")
        assert seen.job.status == "completed"
        assert hub.log(job).splitlines() == WHOLE
        assert hub.file(seen.job.artifact, "model.txt") == "held"


def test_what_happens_while_the_hub_is_away_is_told_when_it_is_back(own_hub: HubProcess, tmp_path: Path) -> None:
    hub = own_hub
    release = tmp_path / "release"
    with agent(hub, tmp_path, "cleo") as cleo:
        job = hub.submit("cleo", "held", release=str(release))
        hub.says(job, "held")
        pid = cleo.child()
        hub.kill()
        release.touch()
        eventually(lambda: not is_alive(pid))
        # The report survives the agent too.
        eventually(lambda: '"phase":"ended"' in next((cleo.state / "attempts").glob("*/record.json")).read_text())
        cleo.end(signal.SIGKILL)
        hub.start()
        cleo.start()
        seen = hub.until(job, "completed", "failed")
        assert seen.job.status == "completed"
        assert [attempt.epoch for attempt in seen.attempts] == [1]
        assert hub.log(job).splitlines() == WHOLE


def test_a_host_that_is_stopped_gives_its_job_back_and_another_goes_on_from_the_checkpoint(
    hub: HubProcess, tmp_path: Path
) -> None:
    with agent(hub, tmp_path, "dora-1") as first:
        job = hub.submit("dora-*", "stepwise")
        hub.says(job, "counting")
        assert first.end() == 0
        attempt = hub.until_tried(job)
        assert attempt.cause is Cause.PREEMPTED
        assert attempt.checkpoint
        with agent(hub, tmp_path, "dora-2"):
            seen = hub.until(job, "completed", "failed")
            assert seen.job.status == "completed"
            assert hub.file(seen.job.artifact, "model.txt") == "resumed at 10"
            assert "starts at 10" in hub.log(job)


def test_a_host_that_is_told_to_finish_finishes_and_takes_nothing_new(hub: HubProcess, tmp_path: Path) -> None:
    release = tmp_path / "release"
    with agent(hub, tmp_path, "emil", on_stop="finish") as emil:
        job = hub.submit("emil", "held", release=str(release))
        hub.says(job, "held")
        emil.send(signal.SIGTERM)
        eventually(lambda: "agent_stopping" in emil.said())
        later = hub.submit("emil", "complete")
        release.touch()
        assert emil.end(0) == 0
        assert hub.job(job).job.status == "completed"
        assert hub.job(later).job.status == "pending"


@pytest.mark.parametrize("on_stop", ["preempt", "finish"])
def test_a_job_that_comes_to_a_host_that_stops_is_given_back(hub: HubProcess, tmp_path: Path, on_stop: str) -> None:
    """The claim waited at the hub when the host was told to stop."""
    release = tmp_path / "release"
    name = f"emma-{on_stop}"
    with agent(hub, tmp_path, name, on_stop=on_stop, slots="2", poll_s="50", grace_s="60") as emma:
        first = hub.submit(name, "stubborn" if on_stop == "preempt" else "held", release=str(release))
        hub.says(first, "counting" if on_stop == "preempt" else "held")
        emma.send(signal.SIGTERM)
        eventually(lambda: "agent_stopping" in emma.said())
        later = hub.submit(name, "held", seed=1, release=str(tmp_path / "never"))
        assert hub.until_tried(later).cause is Cause.PREEMPTED
        release.touch()
        assert emma.end(signal.SIGTERM if on_stop == "preempt" else 0) == 0
        assert hub.job(later).job.status == "pending"


def test_a_host_that_is_told_twice_stops_at_once(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "fred", grace_s="3600") as fred:
        job = hub.submit("fred", "stubborn")
        hub.says(job, "counting")
        pid = fred.child()
        fred.send(signal.SIGTERM)
        eventually(lambda: "agent_stopping" in fred.said())
        assert is_alive(pid)
        assert fred.end() == 0
        assert not is_alive(pid)
        assert hub.until_tried(job).cause is Cause.PREEMPTED


def test_a_host_can_leave_its_job_to_the_next_agent(hub: HubProcess, tmp_path: Path) -> None:
    release = tmp_path / "release"
    with agent(hub, tmp_path, "gina", on_stop="leave") as gina:
        job = hub.submit("gina", "held", release=str(release))
        hub.says(job, "held")
        pid = gina.child()
        assert gina.end() == 0
        assert is_alive(pid)
        gina.start()
        release.touch()
        assert hub.until(job, "completed", "failed").job.status == "completed"


def test_a_host_that_lost_its_lease_ends_its_child_and_the_successor_wins(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path, stale_after_s=3.0)
    try:
        with agent(hub, tmp_path, "hugo-1") as first:
            job = hub.submit("hugo-*", "stepwise")
            hub.says(job, "counting")
            pid = first.child()
            first.send(signal.SIGSTOP)
            with agent(hub, tmp_path, "hugo-2", on_stop="leave") as second:
                hub.until_epoch(job, 2)
                hub.says(job, "counting", epoch=2)
                first.send(signal.SIGCONT)
                eventually(lambda: not is_alive(pid))
                eventually(lambda: not list((first.state / "attempts").iterdir()))
                assert is_alive(second.child())
                assert [attempt.epoch for attempt in hub.job(job).attempts] == [1, 2]
                assert hub.job(job).job.status == "running"
    finally:
        hub.close()


def test_a_host_whose_state_folder_was_copied_is_quarantined_with_the_names_of_both_agents(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path, stale_after_s=3.0)
    try:
        with agent(hub, tmp_path, "karl") as karl:
            eventually(lambda: "karl" in hub.online())
            clone = copy.copy(karl)
            clone.folder = tmp_path / "clone"
            clone.state, clone.work = clone.folder / "state", clone.folder / "work"
            shutil.copytree(karl.state, clone.state)
            clone.start()
            try:
                found = eventually(lambda: each if (each := _host(hub, "karl")).state == "quarantined" else None, 90.0)
            finally:
                clone.end(signal.SIGTERM)
            assert found.state_reason.startswith("two agents work as this host at once: ")
            for process in (karl, clone):
                assert f"process {process.pid} " in found.state_reason
            events = hub.operator.call("GET", "/v1/events", EventsReply, query=EventsQuery()).events
            assert any(found.state_reason in str(each) for each in events), events
            hub.operator.call("POST", "/v1/host/karl/resume", Host, body=HostStateRequest())
            assert hub.until(hub.submit("karl", "complete"), "completed", "failed").job.status == "completed"
    finally:
        hub.close()


def _host(hub: HubProcess, name: str) -> Host:
    return hub.operator.call("GET", f"/v1/host/{name}", Host)


def test_a_host_that_somebody_wants_back_gives_its_job_back(hub: HubProcess, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    used = tmp_path / "used"
    smi = programs / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$1" in --query-compute-apps*) cat {used} 2>/dev/null || true ;; esac\n')
    smi.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"  # noqa: TID251 - for a process of its own
    with agent(hub, tmp_path, "ines", yield_to_people="jobs", variables={"PATH": path}) as ines:
        job = hub.submit("ines", "stepwise")
        hub.says(job, "counting")
        used.write_text(f"{os.getpid()}\n")
        attempt = hub.until_tried(job)
        assert attempt.cause is Cause.PREEMPTED
        assert f"process {os.getpid()} uses a GPU and is not ours" in attempt.error
        assert "claims_paused" in ines.said()


def test_a_job_yields_to_a_higher_priority_with_a_last_checkpoint_and_resumes(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path, stale_after_s=8.0, reserve_after_s=1.0)
    try:
        with agent(hub, tmp_path, "mara"):
            low = hub.submit("mara", "stepwise", early=True, ram_gib=MOST_GIB)
            hub.says(low, "counting")
            high = hub.submit("mara", "complete", priority=5, ram_gib=MOST_GIB)
            assert hub.until(high, "completed", "failed").job.status == "completed"
            resumed = hub.until(low, "completed", "failed")
    finally:
        hub.close()
    assert [each.outcome for each in resumed.attempts] == ["retried", "completed"]
    assert resumed.attempts[0].cause is Cause.PREEMPTED
    assert resumed.attempts[0].error == f"yields to {high}, which has priority 5"


def test_what_a_cancelled_job_had_is_given_to_the_next_when_its_child_has_ended(
    hub: HubProcess, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    with agent(hub, tmp_path, "kai", grace_s="6") as kai:
        first = hub.submit("kai", "stubborn", ram_gib=MOST_GIB)
        hub.says(first, "counting")
        pid = kai.child()
        second = hub.submit("kai", "held", ram_gib=MOST_GIB, release=str(release))
        hub.cancel(first)
        eventually(lambda: "attempt_waits_for_room" in kai.said())
        # The order to stop comes with a heartbeat that does not wait for its time.
        eventually(lambda: "lease_lost" in kai.said(), 4.0)
        kai.end(signal.SIGKILL)
        kai.start()
        hub.says(second, "held")
        assert not is_alive(pid)
        release.touch()
        assert hub.until(second, "completed", "failed").job.status == "completed"


def test_a_job_waits_for_a_child_that_cannot_be_ended_until_the_host_is_to_blame(
    hub: HubProcess, tmp_path: Path
) -> None:
    with agent(hub, tmp_path, "lena", grace_s="0") as lena:
        first = hub.submit("lena", "stubborn", ram_gib=MOST_GIB)
        hub.says(first, "counting")
        lena.child()
        (pids,) = lena.children().values()
        try:
            # A supervisor that sleeps ends no child, as little as one whose child hangs in a driver.
            os.kill(pids["supervisor"], signal.SIGSTOP)
            second = hub.submit("lena", "complete", ram_gib=MOST_GIB)
            hub.cancel(first)
            attempt = hub.until_tried(second)
        finally:
            os.kill(pids["supervisor"], signal.SIGCONT)
        assert (attempt.cause, attempt.error) == (Cause.INFRA, "jobs that the hub has ended still run on this host")
        assert hub.until(second, "completed", "failed").job.status == "completed"
