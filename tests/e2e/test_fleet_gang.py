"""A gang that the fleet places: from a manifest, over a hub and three agents in network namespaces, to the processes.

The hosts read one corpus and share no checkpoints: each uploads the parts of its own ranks as an artifact, and gets
those of the others from the hub. One of the two that train is cut off in mid-epoch: the other goes on from the
committed checkpoint, and when the lost host is back it goes on with its member, and the gang grows.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from examples.elastic_sft.corpus import write_corpus
from strata.base.atomic import write_file
from tests.e2e.nodes import Machine, Task, network
from tests.e2e.test_gang_nodes import CUT, EPOCHS, EVERY, PROGRAM, SAMPLES, WITH_NETWORKS, WITHIN_S, Line, Log
from tests.shell.coord.test_access import certificate, tls_files

NEEDS: Final = ("root", "ip", "nft")
HEAD: Final = "10.0.0.9"
HOSTS: Final = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
MANIFEST: Final = """
[trainers.sft]
command = ["python", "{program}", "--corpus", "{folder}/corpus.jsonl", "--out", "{folder}",
           "--epochs", "{epochs}", "--checkpoint-every", "{every}"]
directory = "code"
env = {{ OMP_NUM_THREADS = "1", GLOO_SOCKET_IFNAME = "eth0" }}

[trainers.beside]
command = ["python", "wait.py", "{folder}/gate"]
directory = "code"

[[jobs]]
name = "sft"
model = "tiny"
trainer = "sft"
workers = 4
workers_per_host = 2
min_workers = 2
allowed_hosts = ["host-1", "host-2"]

[[jobs]]
name = "alone"
model = "script"
trainer = "beside"
allowed_hosts = ["host-3"]
"""
WAIT: Final = """
import sys, time
from pathlib import Path

while Path(sys.argv[1]).exists():
    time.sleep(0.2)
"""

pytestmark = pytest.mark.timeout(2 * WITHIN_S)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: the path of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="strata-") as folder:
        yield Path(folder)


class Fleet(Log):
    """A coordinator and a hub on the first machine, an agent on each of the others, and an operator."""

    def __init__(self, folder: Path, head: Machine, hosts: list[Machine]) -> None:
        super().__init__(folder)
        self.head = head
        self.hosts = {f"host-{number}": host for number, host in enumerate(hosts, start=1)}
        self.tasks: dict[str, Task] = {}
        authority = certificate("authority")
        tls_files(folder, certificate("coordinator", authority, HEAD))
        (folder / "ca.pem").write_bytes(authority.pem)
        write_file(folder / "token.secret", b"s" * 32, mode=0o600)
        for machine in (head, *hosts):
            machine.environ["HOME"] = str(folder / "home")
        head.environ |= {
            "STRATA_COORDINATOR_TOKEN_SECRET_FILE": str(folder / "token.secret"),
            "STRATA_COORDINATOR_PING_TIMEOUT_S": "2",
            "STRATA_HUB_COORDINATOR_ADDRESS": f"{HEAD}:7070",
            "STRATA_HUB_COORDINATOR_TOKEN_SECRET_FILE": str(folder / "token.secret"),
            "STRATA_HUB_COORDINATOR_CA": str(folder / "ca.pem"),
            "STRATA_HUB_STALE_AFTER_S": "15",
            "STRATA_HUB_KEEP_FREE_BYTES": "0",
        }

    def start(self) -> None:
        serving = "--tls-certificate server.pem --tls-key server.key --database sqlite:coordinator.db"
        self._start("coordinator", self.head, f"strata coordinator --listen {HEAD}:7070 {serving}", ":7070")
        self._start("hub", self.head, f"strata hub --listen {HEAD}:8443 --tls --name {HEAD} --data hub", "listening on")
        self.head.run("strata login unix:hub/hub.sock --token-file hub/operator.token", self.folder)
        for name, host in self.hosts.items():
            host.environ |= {
                "STRATA_AGENT_STATE": str(self.folder / name / "state"),
                "STRATA_AGENT_WORK": str(self.folder / name / "work"),
                "STRATA_AGENT_SLOTS": "1",
                "STRATA_AGENT_MIN_FREE_GIB": "0",
                "STRATA_AGENT_GRACE_S": "1",
                "STRATA_AGENT_POLL_S": "2",
                # Corpus and checkpoints lie below /tmp, which it would hide.
                "STRATA_AGENT_SANDBOX_MODE": "off",
            }
            invite = self.knows("invite")["token"]
            write_file(self.folder / f"{name}.invite", invite.encode(), mode=0o600)
            join = f"strata join https://{HEAD}:8443 --name {name} --token-file {name}.invite"
            host.run(join, self.folder)
            self._start(name, host, "strata agent --log-format json", "host_registered")

    def _start(self, name: str, machine: Machine, command: str, ready: str) -> None:
        self.tasks[name] = machine.start(command, self.folder, self.folder / f"{name}.log")
        self.tasks[name].until_it_says(ready)

    def knows(self, command: str) -> Any:
        return json.loads(self.head.run(f"strata {command} -o json", self.folder))

    def members(self) -> list[dict[str, Any]]:
        """By index, each with its attempts."""
        found: list[dict[str, Any]] = self.knows("show sft")["members"]
        return found

    def reached(self, step: int, world_size: int, after: int = 0) -> int:
        """Wait until all ranks of a generation later than `after` have done a step: that generation."""

        def done(said: list[Line]) -> set[int]:
            ranks: dict[int, set[int]] = {}
            for each in said:
                if each["event"] == "step" and each["step"] == step and each["generation"] > after:
                    ranks.setdefault(each["generation"], set()).add(each["rank"])
            return {generation for generation, found in ranks.items() if found == {*range(world_size)}}

        return max(done(self.wait(lambda said: bool(done(said)), f"step {step} of {world_size} ranks after {after}")))

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a condition on the second member."""
        until_s = time.monotonic() + WITHIN_S / 3
        while not condition(member := self.members()[1]):
            self.check()
            assert time.monotonic() < until_s, f"not in time: {member}"
            time.sleep(1.0)

    def check(self) -> None:
        for name, task in self.tasks.items():
            assert task.running, f"{name} ended: {task.said()[-3000:]}"


@WITH_NETWORKS
def test_a_gang_of_a_manifest_outlives_a_host_takes_it_back_and_sees_every_sample_once(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", SAMPLES)
    (tmp_path / "cut.nft").write_text(CUT, encoding="utf-8")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "wait.py").write_text(WAIT, encoding="utf-8")
    values = {"folder": tmp_path, "program": PROGRAM, "epochs": EPOCHS, "every": EVERY}
    (tmp_path / "manifest.toml").write_text(MANIFEST.format(**values), encoding="utf-8")
    with network(HEAD, *HOSTS) as (head, *hosts):
        fleet = Fleet(tmp_path, head, hosts)
        try:
            fleet.start()
            fleet.hold_at(EVERY + 2)
            assert fleet.head.run("strata apply manifest.toml", tmp_path).startswith("+3 new")
            both = fleet.reached(EVERY + 2, world_size=4)
            placed = [each["host"] for each in fleet.members()]
            assert sorted(placed) == ["host-1", "host-2"], "one member on each"

            fleet.until(lambda member: bool(member["attempts"][-1]["checkpoint"]))
            lost = placed[1]
            fleet.hosts[lost].run("nft -f cut.nft", tmp_path)
            fleet.hold_at(2 * EVERY + 1)
            alone = fleet.reached(2 * EVERY + 1, world_size=2, after=both)
            fleet.until(lambda member: member["status"] == "pending")

            fleet.hosts[lost].run("nft delete table inet cut", tmp_path)
            fleet.until(lambda member: member["status"] == "running" and member["host"] == lost)
            fleet.hold_at(2 * EVERY + 2)
            again = fleet.reached(2 * EVERY + 2, world_size=4, after=alone)
            fleet.let_go()
            fleet.head.run("strata wait sft alone", tmp_path)
            ends = [each["attempts"][-1] for each in fleet.members()]
            assert [(each["host"], each["outcome"]) for each in ends] == [(host, "completed") for host in placed]
            assert all(each["checkpoint"].startswith("artifact1_") for each in ends), "of each member its own parts"
            assert not (tmp_path / "checkpoints").exists(), "no part on storage that the hosts share"
            fetched = {host: fleet.tasks[host].said().count("checkpoint_fetched") for host in placed}
            assert all(fetched.values()), f"both recovered with the parts of the other: {fetched}"
        finally:
            for task in fleet.tasks.values():
                print(task.said()[-3000:])
            for log in sorted(tmp_path.glob("hub/streams/**/*log*")):
                print(log, log.read_text("utf-8", errors="replace")[-3000:] if log.is_file() else "")
    fleet.is_right((both, alone, again))
