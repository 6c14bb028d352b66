"""A training server that is a job on another machine than its hub, and moves when that machine is lost.

The machines are network namespaces with addresses of their own: the hub's, and two hosts.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from soak.train.server import make_model
from strata.base.secret import read_secret
from strata.fleet.client.hub_client import HubClient
from strata.fleet.wire.artifacts import ArtifactReply
from strata.fleet.wire.jobs import JobReply, JobsReply
from tests.e2e.nodes import Machine, Task, network
from tests.shell.fleet_agent.waiting import eventually

pytestmark = pytest.mark.timeout(400)
HUB: Final = "10.78.9.1"
URL: Final = f"https://{HUB}:8443"
CLIENT: Final = Path(__file__).with_name("moving_client.py")
WITHIN_S: Final = 150.0
SETTINGS: Final = """
[server]
poll_s = 0.3
copy_every_s = 2

[model]
path = "model"
name = "tiny"
"""
MANIFEST: Final = """
[trainers.server]
command = ["strata", "serve", "train.toml"]
directory = "{folder}"

[[jobs]]
name = "tiny-server"
kind = "server"
model = "tiny"
trainer = "server"
"""


class Lab:
    """The hub's machine, whose user is the operator, and the hosts that have joined."""

    def __init__(self, folder: Path, hub: Machine) -> None:
        self.folder = folder
        self._hub = hub
        self._home = f"HOME={folder} XDG_CONFIG_HOME={folder}/c XDG_DATA_HOME={folder}/d"
        settings = "STRATA_HUB_KEEP_FREE_BYTES=0 STRATA_HUB_STALE_AFTER_S=8"
        listen = f"--listen {HUB}:8443 --data {folder}/hub --tls --name {HUB}"
        task = hub.start(f"{settings} strata hub {listen}", folder, folder / "hub.log")
        task.until_it_says("listening on")
        found = re.search(r"pin ([0-9a-f]{64})", task.said())
        assert found is not None
        token = folder / "hub" / "operator.token"
        self.operator(f"login {URL} --ca-pin {found[1]} --name lab --token-file {token}")
        # A file, and so the same one for all machines of this test.
        self._api = HubClient(f"unix:{folder}/hub/hub.sock", bearer=read_secret(token))

    def operator(self, command: str) -> Any:
        printed = self._hub.run(f"{self._home} strata {command}", self.folder)
        return json.loads(printed) if command.endswith("json") else printed

    def join(self, machine: Machine, name: str) -> Callable[[], Task]:
        """Join a host; what starts its agent."""
        (self.folder / "token").write_text(self.operator("invite -o json")["token"])
        machine.run(f"strata join {URL} --name {name} --state {self.folder}/{name} < token", self.folder)
        settings = f"STRATA_AGENT_MIN_FREE_GIB=0 STRATA_AGENT_SANDBOX_MODE=off STRATA_AGENT_WORK={self.folder}/w{name}"
        command = f"{settings} strata agent --state {self.folder}/{name}"
        return lambda: machine.start(command, self.folder, self.folder / f"{name}.log")

    def server(self) -> JobReply:
        (job,) = self._api.call("GET", "/v1/jobs", JobsReply).jobs
        return self._api.call("GET", f"/v1/job/{job.id}", JobReply)

    def serves(self, epoch: int) -> bool:
        job = self.server().job
        return (job.serving, job.epoch) == ("serving", epoch)

    def files(self, artifact: str) -> str:
        manifest = self._api.call("GET", f"/v1/artifact/{artifact}", ArtifactReply).manifest
        return " ".join(file.path for file in manifest.files)

    def close(self) -> None:
        self._api.close()

    def client(self) -> Task:
        key = self.operator("keys create alice --role researcher -o json")["secret"]
        trust = f"SSL_CERT_FILE={self.folder}/hub/ca/ca.pem TINKER_API_KEY={key} TINKER_TELEMETRY=0 HOME={self.folder}"
        command = f"{trust} {sys.executable} {CLIENT} {URL} {self.folder}"
        return self._hub.start(command, self.folder, self.folder / "client.log")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one, for sockets."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as name:
        yield Path(name)


def said(client: Task, number: int) -> dict[str, Any]:
    """The line of this number that the client has printed."""

    def look() -> list[dict[str, Any]] | None:
        lines = [json.loads(line) for line in client.said().splitlines() if line.startswith("{")]
        assert client.running or len(lines) >= number, f"it ended: {client.said()[-3000:]}"
        return lines if len(lines) >= number else None

    return eventually(look, WITHIN_S)[number - 1]


def test_a_server_on_another_machine_moves_when_that_is_lost(folder: Path) -> None:
    make_model(folder / "t" / "model")
    (folder / "t" / "train.toml").write_text(SETTINGS)
    (folder / "manifest.toml").write_text(MANIFEST.format(folder=folder / "t"))
    with network(HUB, "10.78.9.2", "10.78.9.3") as (hub, one, two):
        lab = Lab(folder, hub)
        start_one, start_two = lab.join(one, "one"), lab.join(two, "two")
        start_one()
        lab.operator("apply manifest.toml --no-describe")
        eventually(lambda: lab.serves(1), WITHIN_S)
        client = lab.client()
        before = said(client, 1)
        assert (before["models"], before["losses"][-1] < before["losses"][0]) == (["tiny"], True)

        def copied() -> bool:
            copy = lab.server().attempts[0].checkpoint
            return bool(copy) and "/weights/kept@" in lab.files(copy)

        eventually(copied, WITHIN_S)
        start_two()
        one.close()
        shutil.rmtree(folder / "wone")
        eventually(lambda: lab.serves(2), WITHIN_S)
        (folder / "moved").touch()
        losses = said(client, 2)["losses"]
        assert losses[0] == pytest.approx(before["following"], rel=1e-4), "from the saved state"
        assert losses[1] < losses[0]
        assert client.end() == 0
        lab.close()
