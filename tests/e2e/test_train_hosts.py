"""One training server on three hosts without a folder that they share: as docs/how-to has it, and with a host that is
killed, cut off and frozen."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from soak.train.server import make_model
from strata.train.launch.supervised_process import descendants
from tests.e2e.blocks import blocks
from tests.e2e.nodes import Machine, Task, network
from tests.shell.fleet_agent.waiting import eventually, is_alive
from tests.support.kernel import lets_make_networks

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not lets_make_networks(), reason="the kernel lets this process make no network namespaces"),
]
PAGES: Final = Path(__file__).parents[2] / "docs" / "how-to"
FIRST, SECOND, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"
READY: Final = "http://127.0.0.1:5555 is ready: model tiny, 3 ranks"
PATIENCE_S: Final = 180.0
STEPS: Final = 4
MORE: Final = """
grow_after_s = 1.0

[limits]
pack_tenants = false
"""
CLIENT: Final = """
import json, sys, time
from pathlib import Path
from strata.sdk.train import Datum, TrainingServer

key = Path("strata-train/api.key").read_text().strip()
texts = ["one", "two ranks", "and each of them has a part of the batch", "or three", "x" * 60, "the end"]
batch = [Datum(list(text.encode())[:-1], list(text.encode())[1:]) for text in texts]
with TrainingServer("http://127.0.0.1:5555", key) as server:
    model = server.create_model("tiny", rank=None if sys.argv[3] == "full" else 8, seed=1)
    for part in range(int(sys.argv[1])):
        while not Path(f"go-{part}").exists():
            time.sleep(0.02)
        for step in range(int(sys.argv[2])):
            computed = model.forward_backward(batch)
            stepped = model.optim_step(learning_rate=5e-3)
            loss = computed.result().loss
            stepped.result()
            print(json.dumps({"part": part, "step": step, "loss": loss, "at_s": time.time()}), flush=True)
    saved = model.save("trained").result()
    model.load(saved).result()
    last = model.forward(batch).result()
    print(json.dumps({"logprobs": [list(row) for row in last.logprobs]}), flush=True)
"""


class Page(NamedTuple):
    """What stands on the page, in its order."""

    files: dict[str, str]
    serve: str
    join: str


@pytest.fixture
def page() -> Page:
    text = (PAGES / "train-on-several-nodes.md").read_text(encoding="utf-8")
    on_one_machine = (PAGES / "train-by-api.md").read_text(encoding="utf-8")
    commands = [block.body.strip() for block in blocks(text) if block.language == "bash"]
    return Page({block.title: block.body for block in blocks(text + on_one_machine) if block.title}, *commands)


class Trained(NamedTuple):
    losses: list[float]
    logprobs: list[list[float]]
    files: dict[str, Any]
    """What is in the files of the checkpoint."""


def content(file: Path) -> Any:
    """All of its bytes; of tensors those of the header in any order: safetensors writes metadata as a hash has it."""
    data = file.read_bytes()
    if file.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


class Client:
    """A client that trains in parts, each of which begins when it is told to."""

    def __init__(self, machine: Machine, folder: Path, parts: int) -> None:
        self._folder = folder
        self._parts = parts
        training = "full" if 'training = "full"' in (folder / "hosts.toml").read_text(encoding="utf-8") else "lora"
        (folder / "client.py").write_text(CLIENT, encoding="utf-8")
        self._task = machine.start(f"python client.py {parts} {STEPS} {training}", folder, folder / "client.log")
        self._part = 0

    def train(self) -> float:
        """Train the next part; returns when its first result came."""
        part, self._part = self._part, self._part + 1
        (self._folder / f"go-{part}").touch()
        eventually(lambda: len(self._of(part)) == STEPS or not self._task.running, PATIENCE_S)
        assert len(self._of(part)) == STEPS, self._task.said()[-2000:]
        first: float = self._of(part)[0]["at_s"]
        return first

    def end(self) -> Trained:
        assert self._task.end() == 0, self._task.said()[-2000:]
        said = self._said()
        (manifest,) = (self._folder / "strata-train" / "checkpoints").rglob("trained@*/manifest.json")
        losses = [each["loss"] for each in said if "loss" in each]
        # Nothing is lost, and nothing was computed for a client twice.
        assert len(losses) == self._parts * STEPS
        files = {path.name: content(path) for path in manifest.parent.iterdir() if path != manifest}
        return Trained(losses, said[-1]["logprobs"], files)

    def _of(self, part: int) -> list[dict[str, Any]]:
        return [each for each in self._said() if each.get("part") == part]

    def _said(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._task.said().splitlines() if line.startswith("{") and "}" in line]


class Host:
    """A host that joins: it does not see the folder of the first one."""

    def __init__(self, machine: Machine, address: str, folder: Path, hidden: Path, join: str) -> None:
        folder.mkdir()
        self.address = address
        self.folder = folder
        self._machine = machine
        self._command = f"unshare --mount sh -c 'mount -t tmpfs none {hidden} && exec {join}'"
        self._starts = 0
        self.task: Task

    def join(self, invite: Path) -> None:
        shutil.copy(invite, self.folder / "hosts.invite")
        self._starts += 1
        self.task = self._machine.start(self._command, self.folder, self.folder / f"join-{self._starts}.log")

    def signal(self, number: signal.Signals) -> None:
        for pid in [*descendants(self.task.pid), self.task.pid]:
            os.kill(pid, number)

    def link(self, state: str) -> None:
        self._machine.run(f"ip link set eth0 {state}", self.folder)


def joined(page: Page, machines: list[Machine], place: Path, hidden: Path, invite: Path) -> list[Host]:
    names = {SECOND: "second", THIRD: "third"}
    hosts = [
        Host(machine, address, place / name, hidden, page.join)
        for machine, (address, name) in zip(machines, names.items(), strict=True)
    ]
    for host in hosts:
        host.join(invite)
    return hosts


def kill_rank(host: Host) -> None:
    below = descendants(host.task.pid)
    (rank,) = [pid for pid in below if Path(f"/proc/{pid}/comm").read_text().startswith("strata-rank")]
    os.kill(rank, signal.SIGKILL)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    with network(FIRST, SECOND, THIRD) as made:
        yield made


def prepared(page: Page, model: Path, folder: Path, more: str = "") -> Path:
    folder.mkdir()
    shutil.copytree(model, folder / "model")
    (folder / "hosts.toml").write_text(page.files["hosts.toml"] + more, encoding="utf-8")
    return folder


def undisturbed(page: Page, machine: Machine, model: Path, folder: Path, parts: int) -> Trained:
    """What three ranks of one machine make of it."""
    prepared(page, model, folder)
    text = page.files["hosts.toml"].partition("[hosts]")[0].replace("nproc = 1", "nproc = 3")
    (folder / "hosts.toml").write_text(f"{text}\n[limits]\npack_tenants = false\n", encoding="utf-8")
    server = machine.start(page.serve, folder, folder / "serve.log")
    server.until_it_says(re.escape(READY))
    client = Client(machine, folder, parts)
    for _ in range(parts):
        client.train()
    found = client.end()
    assert server.stop() == 0
    return found


def generations(server: Task) -> list[int]:
    """How many hosts each generation of the ranks had that was attached."""
    found: list[int] = []
    hosts = 0
    for line in server.said().splitlines():
        if '"generation_started"' in line:
            hosts = len(json.loads(line)["hosts"])
        elif '"ranks_attached"' in line:
            found.append(hosts)
    return found


def test_three_hosts_serve_as_one_and_one_may_be_killed_cut_off_or_frozen(
    page: Page, machines: list[Machine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A path of a socket must be short, and the name of this test is not.
    place = tmp_path_factory.mktemp("h")
    make_model(place / "tiny")
    first, *others = machines
    parts = 8
    alone = undisturbed(page, first, place / "tiny", place / "one", parts)

    folder = prepared(page, place / "tiny", place / "first", MORE)
    server = first.start(page.serve, folder, folder / "serve.log")
    invite = folder / "strata-train" / "hosts.invite"
    eventually(invite.exists, PATIENCE_S)
    second, third = joined(page, others, place, folder, invite)
    server.until_it_says(re.escape(f"{READY} of 3 hosts"))
    # What they have of the model came from the first host.
    assert (place / "third" / "strata-host" / "model" / "model.safetensors").is_file()

    client = Client(first, folder, parts)
    client.train()
    measured = {}

    def disturb(what: str, away: Callable[[], object], back: Callable[[], object]) -> None:
        before = len(generations(server))
        began_s = time.time()
        away()
        on_two_s = client.train() - began_s
        assert generations(server)[before:] == [2], what
        began_s = time.time()
        back()
        eventually(lambda: generations(server)[before:] == [2, 3], PATIENCE_S)
        on_three_s = client.train() - began_s
        measured[what] = round(on_two_s, 1), round(on_three_s, 1)

    # A rank alone: the same hosts go on.
    kill_rank(second)
    client.train()
    assert generations(server) == [3, 3]

    disturb("killed", lambda: third.signal(signal.SIGKILL), lambda: third.join(invite))
    disturb("cut off", lambda: second.link("down"), lambda: second.link("up"))
    frozen = descendants(third.task.pid)
    disturb("frozen", lambda: third.signal(signal.SIGSTOP), lambda: third.signal(signal.SIGCONT))
    # Those of the older generation have ended by themselves.
    assert sum(map(is_alive, frozen)) < len(frozen)

    together = client.end()
    print("seconds to the first result on two hosts, then on three:", json.dumps(measured))
    assert max(on_two_s for on_two_s, _ in measured.values()) < 120
    # On two hosts sums have another order.
    assert together.losses[: 2 * STEPS] == alone.losses[: 2 * STEPS]
    assert together.losses == pytest.approx(alone.losses, rel=1e-4)
    for one, other in zip(together.logprobs, alone.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    assert server.stop() == 0
    for host in (second, third):
        assert host.task.running
        host.task.stop()


def test_shards_of_three_hosts_are_saved_restored_and_loaded_as_those_of_one(
    page: Page, machines: list[Machine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("h")
    make_model(place / "tiny")
    first, *others = machines
    parts = 3
    page.files["hosts.toml"] = page.files["hosts.toml"].replace('name = "tiny"', 'name = "tiny"\ntraining = "full"')
    alone = undisturbed(page, first, place / "tiny", place / "one", parts)

    folder = prepared(page, place / "tiny", place / "first", f"{MORE}\n[snapshots]\nevery_dispatches = 3\n")
    server = first.start(page.serve, folder, folder / "serve.log")
    invite = folder / "strata-train" / "hosts.invite"
    eventually(invite.exists, PATIENCE_S)
    hosts = joined(page, others, place, folder, invite)
    server.until_it_says(re.escape(READY))
    client = Client(first, folder, parts)
    client.train()
    server.until_it_says("model_snapshot_committed")
    kill_rank(hosts[0])
    client.train()
    server.until_it_says("model_snapshot_restored")
    kill_rank(hosts[1])
    client.train()
    together = client.end()
    assert generations(server) == [3, 3, 3]
    assert sum(name.startswith("shard-") for name in together.files) == 3
    assert [name for name, file in together.files.items() if file != alone.files[name]] == []
    assert together.losses == alone.losses
    assert together.logprobs == alone.logprobs
    assert server.stop() == 0
    for host in hosts:
        host.task.stop()
        kept = (host.folder / "strata-host").rglob("*.safetensors")
        assert not [path for path in kept if {"snapshots", "checkpoints"}.intersection(path.parts)]
