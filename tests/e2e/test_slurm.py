"""Nodes of a Slurm cluster as hosts: a job is stopped when its allocation ends, and goes on elsewhere."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.wire.hosts import HostsReply
from strata.fleet.wire.identities import InviteReply, InviteRequest
from strata.fleet.wire.overview import OverviewReply
from tests.e2e.machines import ROOT, Program, clean_environment
from tests.shell.fleet_agent.running import STRATA, TRAINER, HubProcess
from tests.shell.fleet_agent.waiting import eventually
from tests.support.ports import port_of, reserve_port

NEEDS: Final = ("root", "slurmd")
SCRIPT: Final = ROOT / "deploy" / "slurm" / "strata-hosts.sbatch"
AGENT: Final[Mapping[str, str]] = {
    "STRATA_AGENT_MIN_FREE_GIB": "0",
    "STRATA_AGENT_SANDBOX_MODE": "off",
    "STRATA_AGENT_LOG_FORMAT": "json",
}
"""Trainers of these tests lie below /tmp, and their Python in the home of root."""
CONFIG: Final = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
SlurmUser=root
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP
"""
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.proves(
        "A job on a Slurm node is preempted before its allocation ends, and goes on from its checkpoint"
    ),
]


class Cluster:
    """A controller and a node of Slurm on this machine."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        with reserve_port() as controller, reserve_port() as node:
            ports = {"controller": port_of(controller), "node": port_of(node)}
        config = folder / "slurm.conf"
        config.write_text(CONFIG.format(host=socket.gethostname().partition(".")[0], folder=folder, **ports))
        own = {"SLURM_CONF": str(config), "HOME": str(folder), "PATH": f"{Path(STRATA).parent}:/usr/sbin:/usr/bin:/bin"}
        self.environ = clean_environment() | own
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("slurmctld", "slurmd"):
            with (self._folder / f"{name}.out").open("wb") as said:
                words = [f"/usr/sbin/{name}", "-D", "-f", self.environ["SLURM_CONF"]]
                self._daemons.append(subprocess.Popen(words, env=self.environ, stdout=said, stderr=said))
        eventually(lambda: self.says("sinfo", "-h", "-o", "%t") == "idle")

    def says(self, *words: str, **variables: str) -> str:
        environ = dict(self.environ) | variables
        done = subprocess.run(
            words, env=environ, cwd=self._folder, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else f"status {done.returncode}: {done.stderr}"

    def allocate(self, *options: str, **variables: str) -> str:
        words = ("sbatch", "--parsable", "--output", str(self._folder / "job-%j.out"), *options, str(SCRIPT))
        return self.says(*words, **variables)

    def state(self, job: str) -> str:
        return self.says("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def failed(self, job: str) -> bool:
        return self.state(job) == "FAILED"

    def close(self) -> None:
        self.says("scancel", "--user", "root")
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait(60)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "slurm")
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    made = HubProcess(tmp_path, tls=True)
    yield made
    made.close()


def invite(hub: HubProcess, file: Path, *, ephemeral: bool) -> Path:
    body = InviteRequest(ephemeral=ephemeral)
    file.touch(mode=0o600)
    file.write_text(hub.operator.call_once("POST", "/v1/invites", InviteReply, body=body).token)
    return file


def hosts(hub: HubProcess) -> Sequence[str]:
    return [host.name for host in hub.operator.call("GET", "/v1/workers", HostsReply).hosts]


@pytest.mark.parametrize("end", ["time", "scancel"])
def test_a_job_in_an_allocation_that_ends_goes_on_elsewhere_from_its_checkpoint(
    cluster: Cluster, hub: HubProcess, tmp_path: Path, end: str
) -> None:
    trainer = TrainerSpec(name="told", command=("python", TRAINER.name), directory=str(TRAINER.parent))
    job = hub.submit_with(trainer, JobSpec(model="stepwise", hyper={"act": "stepwise"}, trainer="told"))
    variables = {
        **AGENT,
        "STRATA_HUB": hub.url,
        "STRATA_TOKEN_FILE": str(invite(hub, tmp_path / "slurm.token", ephemeral=True)),
        "STRATA_FOLDER": str(tmp_path / "node"),
        # An allocation has whole minutes: with two, the job is stopped one minute after the start.
        "STRATA_MARGIN_S": "60" if end == "time" else "5",
    }
    allocation = cluster.allocate("--time=2", **variables)
    assert allocation.isdigit(), allocation
    hub.says(job, "counting", within_s=120.0)
    assert hosts(hub) == [f"{socket.gethostname().partition('.')[0]}-{allocation}"]
    if end == "scancel":
        assert cluster.says("scancel", allocation) == ""
    attempt = hub.until_tried(job, within_s=120.0)
    assert (attempt.cause, attempt.checkpoint != "") == ("preempted", True)
    eventually(lambda: cluster.state(allocation) == {"time": "COMPLETED", "scancel": "CANCELLED"}[end])
    assert hosts(hub) == []
    attention = hub.operator.call("GET", "/v1/overview", OverviewReply).attention
    assert "lost_host" not in {each.kind for each in attention}
    if end == "time":
        assert not (tmp_path / "node").exists()

    with ExitStack() as stack:
        desk, token = tmp_path / "desk", invite(hub, tmp_path / "desk.token", ephemeral=False)
        environ = dict(os.environ) | {"STRATA_AGENT_STATE": str(desk / "state")}  # noqa: TID251 - a process of its own
        subprocess.run([STRATA, "join", hub.url, "--token-file", str(token), "--name", "desk"], env=environ, check=True)
        agent = Program(desk, "agent", "--state", str(desk / "state"), **AGENT)
        stack.callback(agent.close)
        seen = hub.until(job, "completed", "failed")
    assert (seen.job.status, hub.file(seen.job.artifact, "model.txt")) == ("completed", "resumed at 10")
    assert seen.attempts[0].host_id != seen.attempts[1].host_id
    assert hosts(hub) == ["desk"]


def test_an_allocation_without_a_token_or_too_short_says_so(cluster: Cluster, tmp_path: Path) -> None:
    for variables, reason in (
        ({"STRATA_TOKEN_FILE": str(tmp_path / "none")}, "there is no token file"),
        ({"STRATA_TOKEN_FILE": str(SCRIPT)}, "the allocation is not longer than 300 s"),
    ):
        allocation = cluster.allocate("--time=1", STRATA_HUB="https://127.0.0.1:1", **variables)
        eventually(partial(cluster.failed, allocation))
        assert reason in (tmp_path / "slurm" / f"job-{allocation}.out").read_text()
