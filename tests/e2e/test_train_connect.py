"""Ranks on two nodes that torchrun starts, and a launcher that connects to them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from soak.train.server import make_model
from strata.train.launch.supervised_process import descendants
from tests.e2e.blocks import blocks
from tests.e2e.nodes import Machine, Task, network
from tests.shell.fleet_agent.waiting import is_alive
from tests.support.kernel import lets_make_networks

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not lets_make_networks(), reason="the kernel lets this process make no network namespaces"),
]
ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ROOT / "docs" / "how-to"
HEAD, FIRST, SECOND = "10.0.0.9", "10.0.0.1", "10.0.0.2"
ANNOUNCED: Final = "strata serve: http://127.0.0.1:5555"
CLIENT: Final = """
import json
from pathlib import Path
from strata.sdk.train import Datum, TrainingServer

key = Path("strata-train/api.key").read_text().strip()
texts = ["one", "two ranks", "and each of them has a part of the batch", "or three", "x" * 60, "the end"]
batch = [Datum(list(text.encode())[:-1], list(text.encode())[1:]) for text in texts]
with TrainingServer("http://127.0.0.1:5555", key) as server:
    model = server.create_model("tiny", rank=8, seed=1)
    passes = []
    for _ in range(8):
        passes.append(model.forward_backward(batch))
        model.optim_step(learning_rate=5e-3)
    saved = model.save("trained")
    passes.append(model.forward(batch))
    done = [each.result() for each in passes]
    print(json.dumps({
        "saved": saved.result(),
        "losses": [each.loss for each in done],
        "logprobs": [list(row) for row in done[-1].logprobs],
    }))
"""


NODES: Final = """
[server]
data = "strata-train"

[model]
path = "model"
name = "tiny"

[ranks]
mode = "connect"
rank0 = "file:strata-train/rank0.address"
"""


def node(address: str, *, is_host: bool) -> str:
    return (
        "GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "
        f"torchrun --nnodes=2 --nproc-per-node=1 --max-restarts=0 --local-addr={address} "
        f"--rdzv-backend=c10d --rdzv-endpoint={FIRST}:29400 --rdzv-id=tiny "
        f"--rdzv-conf=is_host={int(is_host)},read_timeout=10,join_timeout=600 "
        "-m strata.train.runner --settings nodes.toml"
    )


class Page(NamedTuple):
    files: dict[str, str]
    make_keys: str
    first: str
    second: str
    serve: str


@pytest.fixture(scope="module")
def page() -> Page:
    on_one_machine = (PAGES / "train-by-api.md").read_text(encoding="utf-8")
    files = {block.title: block.body for block in blocks(on_one_machine) if block.title}
    return Page(
        files | {"nodes.toml": NODES},
        "strata serve nodes.toml --make-keys",
        node(FIRST, is_host=True),
        node(SECOND, is_host=False),
        "strata serve nodes.toml",
    )


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    with network(HEAD, FIRST, SECOND) as made:
        yield made


def train(machine: Machine, folder: Path) -> dict[str, Any]:
    """What came of it. The checkpoint is told by the digests of its files, since its name has that of the session."""
    (folder / "client.py").write_text(CLIENT, encoding="utf-8")
    found: dict[str, Any] = json.loads(machine.run("python client.py", folder))
    assert found.pop("saved").endswith("/weights/trained")
    (manifest,) = (folder / "strata-train" / "checkpoints").rglob("trained@*/manifest.json")
    found["files"] = json.loads(manifest.read_bytes())["files"]
    return found


def on_one_machine(machine: Machine, folder: Path) -> dict[str, Any]:
    server = machine.start("strata serve train.toml", folder, folder / "serve.log")
    server.until_it_says(ANNOUNCED)
    found = train(machine, folder)
    assert server.stop() == 0
    return found


def start_nodes(page: Page, machines: list[Machine], folder: Path) -> list[Task]:
    _, first, second = machines
    return [
        first.start(page.first, folder, folder / "first.log"),
        second.start(page.second, folder, folder / "second.log"),
    ]


def prepared(page: Page, model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder / "model")
    for name, text in page.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_ranks_on_two_nodes_train_as_two_on_one_machine_hear_no_stranger_and_can_be_started_anew(
    page: Page, machines: list[Machine], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A path of a socket must be short, and the name of this test is not.
    place = tmp_path_factory.mktemp("n")
    make_model(place / "tiny")
    head = machines[0]
    folder = prepared(page, place / "tiny", place / "several")
    head.run(page.make_keys, folder)
    nodes = start_nodes(page, machines, folder)
    # While they load their model.
    alone = on_one_machine(head, prepared(page, place / "tiny", place / "one"))

    server = head.start(page.serve, folder, folder / "serve.log")
    server.until_it_says(ANNOUNCED)
    address = (folder / "strata-train" / "rank0.address").read_text(encoding="utf-8").strip()
    assert address.startswith(f"tcp://{FIRST}:")

    together = train(head, folder)
    assert together == alone
    assert together["losses"][-1] < together["losses"][0] / 2

    stranger = f"PYTHONPATH={ROOT} python -m tests.e2e.stranger {address} strata-train/link.keys"
    assert json.loads(head.run(stranger, folder)) == {
        "without keys": "refused",
        "with other keys": "refused",
        "knowing whom it speaks to": "refused",
        "with the keys": "answered",
    }

    assert server.stop() == 0
    assert all(node.running for node in nodes)
    server = head.start(page.serve, folder, folder / "again.log")
    server.until_it_says(ANNOUNCED)
    assert re.search(r'"event":"ranks_attached".*"applied":[1-9]', server.said())

    (rank,) = descendants(nodes[1].pid)
    os.kill(rank, signal.SIGKILL)
    client = head.start("python client.py", folder, folder / "client.log")
    # Rank 0 notices when it is asked for something that all ranks have to do.
    assert [node.end() for node in nodes] == [1, 1]
    nodes = start_nodes(page, machines, folder)
    assert client.end() == 0
    assert json.loads(client.said())["losses"] == alone["losses"]
    assert server.stop() == 0
    ranks = [pid for node in nodes for pid in descendants(node.pid)]
    assert len(ranks) == len(nodes)
    for node in nodes:
        node.stop()
    assert not any(is_alive(pid) for pid in ranks)
