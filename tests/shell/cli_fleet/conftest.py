"""A hub as a process, a person with a home of its own, and a manifest with a trainer that needs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.shell.fleet_agent.running import HubProcess

TRAIN = """\
from strata.fleet.trainer import handle_describe
properties = {"learning_rate": {"type": "number"}, "depth": {"type": "integer"}}
handle_describe({"type": "object", "properties": properties, "additionalProperties": False})
print("trained")
"""
MANIFEST = """\
[trainers.default]
command = ["python", "train.py"]
directory = "code"

[[jobs]]
model = "tree"
mode = "small"
max_attempts = 1
hyper = { depth = 3 }

[[jobs]]
model = "tree"
mode = "large"
allowed_hosts = ["elsewhere"]
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    folder = tmp_path / "site"
    folder.mkdir()
    process = HubProcess(folder)
    yield process
    process.close()


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Person:
    """Has logged in nowhere."""
    return Person(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture
def person(hub: HubProcess, stranger: Person) -> Person:
    stranger.logs_in(hub)
    return stranger


@pytest.fixture
def host(hub: HubProcess) -> Iterator[HostByHand]:
    made = HostByHand(hub, "here")
    yield made
    made.close()


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "train.py").write_text(TRAIN)
    path = folder / "manifest.toml"
    path.write_text(MANIFEST)
    return path
