"""A fleet as its operator sets it up: a hub with TLS, two hosts that joined by invitation, fourteen jobs.

All of it is processes of the command line, once on SQLite and once on PostgreSQL. The jobs are those of
examples/tabular, with constraints added, so that each of them can be taken by one host, by the other, or by none.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.secret import read_secret
from strata.fleet.client.hub_client import HubClient, TlsFiles
from strata.fleet.wire.artifacts import ArtifactReply
from strata.fleet.wire.jobs import JobReply
from strata.http.zstd import zstd
from tests.e2e.machines import Agent, Person, SecureHub
from tests.support.postgres import PostgresDatabases

pytestmark = pytest.mark.timeout(240)

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "tabular"
TREES: Final = "trees-and-nets"
"""The host that the example has a policy for: it may take gbt and mlp and nothing else."""
DESK: Final = "desk"
"""One core, and the label of its room."""
CONSTRAINTS: Final = {
    "gbt": "min_cores = 2\nhyper = { max_iter = 15 }",
    "mlp": 'allowed_hosts = ["trees-*"]\nhyper = { max_iter = 15 }',
    "forest": 'require_labels = { room = "office" }',
    "bayes": f'allowed_hosts = ["{DESK}"]',
    "logistic": "min_cores = 1",
    "neighbours": 'require_labels = { room = "cellar" }',
    "svm": "min_cores = 2",
}
MODES: Final = ("oracle", "realistic")
OF_TREES: Final = {f"{model}-{mode}" for model in ("gbt", "mlp") for mode in MODES}
OF_DESK: Final = {f"{model}-{mode}" for model in ("forest", "bayes", "logistic") for mode in MODES}
OF_NOBODY: Final = {f"{model}-{mode}" for model in ("neighbours", "svm") for mode in MODES}
LACKS: Final = {
    "neighbours": f'{DESK} comes nearest: needs "cellar", has "office"',
    "svm": f"{DESK} comes nearest: needs 2, has 1",
}
FAILS: Final = "mlp-realistic"


@dataclass(frozen=True)
class Fleet:
    hub: SecureHub
    operator: Person
    agents: dict[str, Agent]
    states: dict[str, Path]
    applied: str
    rows: dict[str, dict[str, Any]]

    def hub_client(self) -> HubClient:
        folder = self.operator.home / "config" / "strata"
        return HubClient(
            self.hub.url, bearer=read_secret(folder / "tokens" / "lab"), tls=TlsFiles(ca=folder / "authorities/lab.pem")
        )


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresDatabases
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp(request.param)
    words = ("--database", postgres_server.create_database()) if request.param == "postgresql" else ()
    hub = SecureHub(folder / "hub", *words)
    agents: dict[str, Agent] = {}
    try:
        operator = logged_in(folder, hub)
        states = {name: joined(folder, hub, operator, name) for name in (TREES, DESK)}
        applied = operator.says("apply", str(written_manifest(folder / "project")))
        for name, state in states.items():
            agents[name] = Agent(folder / f"agent-{name}", state)
        operator.says("wait", *sorted(OF_TREES | OF_DESK), status=100)
        rows = {row["job"]: row for row in operator.knows("list")}
        yield Fleet(hub, operator, agents, states, applied, rows)
        assert [agent.stop() for agent in agents.values()] == [0, 0]
        assert hub.stop() == 0
    finally:
        for program in (*agents.values(), hub):
            program.close()


def logged_in(folder: Path, hub: SecureHub) -> Person:
    """Whoever set the hub up makes a key for the operator, who compares the pin and works with that key alone."""
    # From its first line, as the operator reads it, and not from the network.
    pin = hub.until_it_says(re.compile(r"pin ([0-9a-f]{64})"))[1]
    admin, operator = Person(folder / "admin"), Person(folder / "operator")
    login = ("login", hub.url, "--ca-pin", pin, "--name", "lab")
    admin.says(*login, "--token-file", str(hub.data / "operator.token"))
    key = admin.knows("keys", "create", "olga", "--role", "operator")
    operator.says(*login, stdin=key["secret"])
    return operator


def joined(folder: Path, hub: SecureHub, operator: Person, name: str) -> Path:
    """The state of a host whose machine knew nothing but the address and the token."""
    machine = Person(folder / f"machine-{name}")
    labels = ("--label", "room=office") if name == DESK else ()
    token = operator.knows("invite", *labels)["token"]
    state = machine.home / "state"
    machine.says("join", hub.url, "--name", name, "--state", str(state), stdin=token)
    return state


def written_manifest(folder: Path) -> Path:
    folder.mkdir()
    text = (EXAMPLE / "manifest.toml").read_text(encoding="utf-8")
    assert f"[hosts.{TREES}]" in text
    text = re.sub(r'(?m)^model = "(\w+)"$', lambda found: f"{found[0]}\n{CONSTRAINTS[found[1]]}", text)
    text = text.replace(f"[hosts.{TREES}]", f"[hosts.{DESK}]\ncores = 1\n\n[hosts.{TREES}]")
    (folder / "manifest.toml").write_text(text, encoding="utf-8")
    (folder / "train.py").write_bytes((EXAMPLE / "train.py").read_bytes())
    return folder / "manifest.toml"


def test_fourteen_jobs_are_queued_and_each_host_runs_exactly_those_it_may(fleet: Fleet) -> None:
    assert fleet.applied == "+14 new  ~1 trainer  ~2 hosts\n"
    assert fleet.rows.keys() == OF_TREES | OF_DESK | OF_NOBODY
    ran = {name: {job for job, row in fleet.rows.items() if row["host"] == name} for name in (TREES, DESK)}
    assert ran == {TREES: OF_TREES, DESK: OF_DESK}
    assert {job for job, row in fleet.rows.items() if row["status"] == "completed"} == (OF_TREES | OF_DESK) - {FAILS}
    with fleet.hub_client() as client:
        for job in sorted(OF_TREES | OF_DESK):
            attempts = client.call("GET", f"/v1/job/{fleet.rows[job]['id']}", JobReply).attempts
            assert [(each.epoch, each.host_id) for each in attempts] == [(1, fleet.rows[job]["host_id"])]


def test_a_job_that_no_host_may_take_says_what_each_of_them_lacks(fleet: Fleet) -> None:
    assert {job for job, row in fleet.rows.items() if row["status"] == "pending"} == OF_NOBODY
    for job in sorted(OF_NOBODY):
        text = " ".join(fleet.operator.says("why", job, status=6).split())
        assert "none of 2 hosts is eligible" in text
        model = job.partition("-")[0]
        assert f'fix: add "{model}" to allow_jobs of [hosts.{TREES}]' in text
        assert LACKS[model] in text


def test_the_job_that_fails_shows_the_words_of_its_trainer_in_status(fleet: Fleet) -> None:
    counts = {"pending": 4, "claimed": 0, "running": 0, "completed": 9, "failed": 1, "cancelled": 0}
    assert fleet.operator.knows("status")["jobs"] == counts
    shown = fleet.operator.says("status")
    assert re.search(rf"^\w+ +{FAILS} +1  ValueError: Input X contains NaN\.$", shown, re.MULTILINE)
    (attempt,) = fleet.operator.knows("show", FAILS)["attempts"]
    assert (attempt["outcome"], attempt["cause"]) == ("failed", "user_error")
    assert "Traceback" in fleet.operator.says("logs", FAILS)


def test_every_result_is_in_the_index_and_its_bytes_have_the_digests_they_are_named_by(fleet: Fleet) -> None:
    done = {job: row for job, row in fleet.rows.items() if row["status"] == "completed"}
    with fleet.hub_client() as client:
        lines = client.fetch("/v1/export/index.jsonl").content.splitlines()
        index = {(row := json.loads(line))["job_id"]: row for line in lines}
        assert len(lines) == len(done) == len(index)
        for job, row in done.items():
            line = index[row["id"]]
            assert (line["artifact"], line["host_id"], line["epoch"]) == (row["artifact"], row["host_id"], 1)
            place = line["artifact"].removeprefix("artifact1_")
            assert line["path"] == f"{row['model']}_{row['mode']}/{place}/bundle.tar.zst"
            assert line["metrics"]["test_auc"] > 0.9, job
            reply = client.call("GET", f"/v1/artifact/{line['artifact']}", ArtifactReply)
            assert reply.manifest.id == line["artifact"]
            fetched = client.fetch(f"/v1/export/{line['path']}").content
            assert hashlib.sha256(fetched).hexdigest() == line["sha256"]
            files = unpacked(fetched)
            assert {path: hashlib.sha256(content).hexdigest() for path, content in files.items()} == {
                file.path: file.sha256 for file in reply.manifest.files
            }
            assert json.loads(files["card.json"])["model"] == row["model"]
    fleet.operator.says("artifacts", "get", "gbt-oracle", "fetched")
    assert (fleet.operator.home / "fetched" / "model.npz").stat().st_size > 0


def test_a_host_connects_and_is_connected_to_by_nobody(fleet: Fleet) -> None:
    assert fleet.hub.listens()
    assert [name for name, agent in fleet.agents.items() if agent.listens()] == []


def unpacked(bundle: bytes) -> dict[str, bytes]:
    plain = zstd.decompress(bundle)
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        opened = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read() for name, file in opened.items() if file is not None}


def test_the_hosts_are_known_by_certificates_and_no_secret_is_written_anywhere_else(fleet: Fleet) -> None:
    hosts = {row["host"]: row for row in fleet.operator.knows("workers")}
    assert {name: (row["state"], row["presence"]) for name, row in hosts.items()} == {
        TREES: ("active", "online"),
        DESK: ("active", "online"),
    }
    assert hosts[DESK]["labels"] == {"room": "office"}
    secrets = [(fleet.hub.data / "operator.token").read_text().strip()]
    secrets.append((fleet.operator.home / "config/strata/tokens/lab").read_text().strip())
    for state in fleet.states.values():
        identity = state / "identity"
        assert not (identity / "secret").exists(), "a bearer secret is for loopback"
        assert stat.S_IMODE((identity / "host.key").stat().st_mode) == 0o600
    said = fleet.hub.said() + "".join(agent.said() for agent in fleet.agents.values())
    said += "".join(fleet.operator.says("logs", job) for job in ("gbt-oracle", "forest-oracle"))
    assert [secret for secret in secrets if secret in said] == []
