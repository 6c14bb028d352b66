"""A gang of one member through a real hub, agent and coordinator, on one machine: from a manifest to its workers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from strata.base.atomic import write_file
from strata.base.secret import Secret
from strata.coord.server.tokens import Tokens
from strata.fleet.agent.gang_member import TOKEN_FILE
from strata.fleet.core.manifest import parse_manifest
from strata.fleet.wire.manifests import ManifestReply, ManifestRequest
from tests.shell.fleet_agent.running import STRATA, AgentProcess, HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually
from tests.support.ports import port_of, reserve_port

pytestmark = pytest.mark.timeout(240)
PROGRAM: Final = Path(__file__).parents[2] / "e2e" / "gang_program.py"
SECRET: Final = "s" * 32
MANIFEST: Final = """
[trainers.t]
command = ["python", "{program}", "{out}"]
directory = "{out}"

[[jobs]]
name = "sft"
model = "tiny"
workers = 2
workers_per_host = 2
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubProcess]:
    """With a coordinator that needs tokens."""
    write_file(tmp_path / "token.secret", SECRET.encode())
    with reserve_port() as guard:
        address = f"127.0.0.1:{port_of(guard)}"
        with (tmp_path / "coordinator.log").open("wb") as said:
            command = [STRATA, "coordinator", "--listen", address, "--database", f"sqlite:{tmp_path / 'c.db'}"]
            monkeypatch.setenv("STRATA_COORDINATOR_TOKEN_SECRET_FILE", str(tmp_path / "token.secret"))
            coordinator = subprocess.Popen(command, stdout=said, stderr=said)
        monkeypatch.setenv("STRATA_HUB_COORDINATOR_ADDRESS", address)
        monkeypatch.setenv("STRATA_HUB_COORDINATOR_TOKEN_SECRET_FILE", str(tmp_path / "token.secret"))
        made = HubProcess(tmp_path, stale_after_s=8.0)
        try:
            yield made
        finally:
            made.close()
            coordinator.terminate()
            coordinator.wait(30)


def apply(hub: HubProcess, out: Path) -> str:
    """The only member."""
    text = MANIFEST.format(program=PROGRAM, out=out)
    body = ManifestRequest(manifest=parse_manifest(text, "m.toml").resolve())
    (made,) = hub.operator.call("POST", "/v1/manifest", ManifestReply, body=body).new
    assert made.label == "sft/0"
    return made.id


def token_of(host: AgentProcess) -> str:
    (file,) = eventually(lambda: list((host.work / "attempts").glob(f"*/gang/{TOKEN_FILE}")))
    return file.read_text().strip()


def test_a_member_trains_renews_its_token_and_completes(hub: HubProcess, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "slow").touch()
    with agent(hub, tmp_path, "sara") as sara:
        job = apply(hub, out)
        hub.says(job, "the checkpoint of step 3 is committed", within_s=120.0)
        first = token_of(sara)
        issued_s = Tokens(Secret(SECRET)).read(first, 0.0).issued_s
        (record,) = (sara.state / "attempts").glob("*/record.json")
        given = msgspec.json.decode(record.read_bytes())["lease"]["gang"]["token"]
        # The age of a token is unknown to an agent at first, so the first heartbeat renews it.
        assert Tokens(Secret(SECRET)).read(given, 0.0).issued_s <= issued_s
        for process in Path("/proc").glob("[0-9]*"):
            try:
                shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            except OSError:
                continue
            assert first.encode() not in shown
            assert given.encode() not in shown
        (out / "slow").unlink()
        hub.until(job, "completed", within_s=120.0)
        assert first not in hub.log(job)
        samples = [sample for file in out.glob("model-*.json") for sample in json.loads(file.read_text("utf-8"))]
        assert sorted(samples) == list(range(40))
