"""An agent whose time ends: its jobs go on elsewhere from their checkpoints, and its host is gone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.wire.hosts import HostsReply
from tests.shell.fleet_agent.running import TRAINER, AgentProcess, HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually

pytestmark = pytest.mark.timeout(240)


def make_ephemeral(host: AgentProcess) -> None:
    """As if it had joined with such a token, before its next start."""
    eventually(lambda: "host_registered" in host.said())
    assert host.end() == 0
    path = host.state / "identity" / "hub.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ephemeral": True}))


def submit(hub: HubProcess) -> str:
    """A job for any host, which counts from where it was stopped."""
    trainer = TrainerSpec(name="told", command=("python", TRAINER.name), directory=str(TRAINER.parent))
    return hub.submit_with(trainer, JobSpec(model="stepwise", hyper={"act": "stepwise"}, trainer="told"))


def test_an_ephemeral_host_preempts_its_job_and_leaves(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "node", on_stop="leave") as node:
        make_ephemeral(node)
        node.start(on_stop="preempt")
        job = submit(hub)
        hub.says(job, "counting")
        assert node.end() == 0
        attempt = hub.until_tried(job)
        assert (attempt.cause, attempt.checkpoint != "") == ("preempted", True)
        assert not (node.state / "identity").exists()
        assert [host.state for host in hub.operator.call("GET", "/v1/workers", HostsReply).hosts] == ["left"]
        with agent(hub, tmp_path, "desk"):
            seen = hub.until(job, "completed", "failed")
    assert (seen.job.status, hub.file(seen.job.artifact, "model.txt")) == ("completed", "resumed at 10")
    assert [each.outcome for each in seen.attempts] == ["retried", "completed"]


def test_a_host_that_stays_is_stopped_in_time_and_keeps_its_place(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "shelf", until="1s") as shelf:
        assert shelf.ended() == 0
        assert "host_time_over" in shelf.said()
        shelf.start(until="")
        eventually(lambda: "shelf" in hub.online())


def test_an_ephemeral_agent_that_hands_over_does_not_leave(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "rack", on_stop="leave") as node:
        make_ephemeral(node)
        node.start(on_stop="preempt")
        eventually(lambda: node.said().count("host_registered") == 2)
        assert node.end(signal.SIGUSR1) == 0
        assert (node.state / "identity").exists()


def test_a_time_that_is_none_is_refused(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "clock", until="tomorrow") as clock:
        for number, until in enumerate(("@", "2h30m", "-1s"), start=1):
            assert clock.ended() != 0
            assert clock.said().count("agent.until") == number
            clock.start(until=until)
        assert clock.ended() != 0
