"""Servers that are jobs, through a real hub and real agents: published, forwarded to, asleep, awake, ended."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.hosts import Host, HostsReply, HostStateRequest
from strata.fleet.wire.identities import HubKeyReply, HubKeyRequest, RoleName
from tests.shell.fleet_agent.running import AgentProcess, HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually, is_alive

SERVER: Final = Path(__file__).with_name("echo_server.py")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: a Unix socket's path has at most 107 characters, and a server's lies deep in its agent's folder."""
    with tempfile.TemporaryDirectory(prefix="strata-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """With short leases, so that a host soon learns of a cancelled job."""
    made = HubProcess(tmp_path_factory.mktemp("hub"), stale_after_s=8.0)
    yield made
    made.close()


def researcher(hub: HubProcess, name: str, role: RoleName = "researcher") -> httpx.Client:
    """A person with a key of the hub, at the hub's URL."""
    made = hub.operator.call("POST", "/v1/keys", HubKeyReply, body=HubKeyRequest(name=name, role=role))
    return httpx.Client(base_url=f"{hub.url}/api/v1", headers={"x-api-key": made.secret}, timeout=60.0)


def serve(hub: HubProcess, hosts: str, model: str, *, idle_s: float = 0.0, **hyper: Any) -> str:
    return hub.submit_with(
        TrainerSpec(name="echo", command=("python", SERVER.name), directory=str(SERVER.parent)),
        JobSpec(
            kind="server",
            model=model,
            trainer="echo",
            hyper=hyper,
            idle_s=idle_s,
            needs=Needs(allowed_hosts=tuple(hosts.split())),
            max_attempts=1000,
        ),
    )


def until_serving(hub: HubProcess, job: str) -> None:
    eventually(lambda: hub.job(job).job.serving == "serving")


def starts(host: AgentProcess, job: str) -> int:
    return len((host.work / "servers" / job.removeprefix("job1_")[:16] / "starts").read_text().splitlines())


def test_a_server_is_published_and_ends_when_it_is_cancelled(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "sara", grace_s="1") as sara:
        job = serve(hub, "sara", "echo-a")
        until_serving(hub, job)
        child = sara.child()
        hub.cancel(job)
        eventually(lambda: not is_alive(child), 40.0)
        assert (hub.job(job).job.status, hub.job(job).job.serving) == ("cancelled", "")


def test_a_server_that_dies_is_started_again_with_its_data(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "sepp", grace_s="1") as sepp:
        job = serve(hub, "sepp", "echo-b")
        until_serving(hub, job)
        os.kill(sepp.child(), signal.SIGTERM)
        hub.until_epoch(job, 2)
        until_serving(hub, job)
        assert starts(sepp, job) == 2
        first = hub.job(job).attempts[0]
        assert (first.cause, first.outcome) == ("user_error", "retried")
        hub.cancel(job)


def test_a_server_cannot_send_the_hub_to_a_socket_that_is_not_its_own(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "silo", grace_s="1") as silo:
        job = serve(hub, "silo", "echo-c", address=hub.address)
        eventually(lambda: "server_not_published" in silo.said())
        assert hub.job(job).job.serving == ""
        hub.cancel(job)


def test_one_url_forwards_to_several_servers_and_names_the_tenant(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "stan", grace_s="1", slots="2"), researcher(hub, "alice ä") as alice:
        jobs = {model: serve(hub, "stan", model) for model in ("echo-d", "echo-e")}
        for job in jobs.values():
            until_serving(hub, job)
        offered = alice.get("/get_server_capabilities").json()["supported_models"]
        assert {each["model_name"] for each in offered} >= {"echo-d", "echo-e"}
        session = alice.post("/create_session", json={"tags": ["t"]}).json()["session_id"]
        for model, job in jobs.items():
            made = alice.post("/create_model", json={"session_id": session, "base_model": model}).json()
            own = f"{session}.{job.removeprefix('job1_')[:12]}"
            assert (made["model"], made["tenant"], made["role"]) == (model, "alice%20%C3%A4", "researcher")
            assert (made["trusted"], made["credentials"]) == (True, [])
            assert json.loads(made["body"]) == {"session_id": own, "base_model": model}
            # From here on every id names the server, in JSON, in bytes and in a path.
            future = alice.post("/retrieve_future", json={"request_id": f"{own}:train:0:1"})
            assert (future.status_code, future.json()["model"]) == (408, model)
            batch = alice.post("/forward_backward", content=b"\x0a" + f"{own}:train:0".encode() + b"\xff" * 70_000)
            assert (batch.json()["model"], batch.json()["body"].count("\xff")) == (model, 70_000)
            run = alice.get(f"/training_runs/{own}:train:0", params={"limit": 3}).json()
            assert (run["model"], run["path"]) == (model, f"/api/v1/training_runs/{own}:train:0?limit=3")
        both = alice.get("/training_runs", params={"limit": 5}).json()
        assert [each["training_run_id"] for each in both["training_runs"]] == ["echo-e", "echo-d"], "the newest first"
        assert both["cursor"] == {"offset": 0, "limit": 5, "total_count": 14}
        assert sorted(alice.get(f"/sessions/{session}").json()["training_run_ids"]) == ["echo-d", "echo-e"]
        refused = alice.post("/create_model", json={"session_id": session, "base_model": "unheard"})
        assert refused.status_code == 404
        for job in jobs.values():
            hub.cancel(job)


def test_a_server_knows_people_by_their_keys_and_not_by_the_headers_they_send(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "sven", grace_s="1"), researcher(hub, "bob", "viewer") as bob:
        job = serve(hub, "sven", "echo-f")
        until_serving(hub, job)
        feigned = {
            "x-strata-tenant": "alice",
            "x-strata-role": "operator",
            "x-strata-front": "?",
            "x-strata-session": "s",
        }
        seen = bob.post("/get_info", json={"base_model": "echo-f"}, headers=feigned).json()
        assert (seen["tenant"], seen["role"], seen["trusted"], seen["session"]) == ("bob", "viewer", True, None)
        assert bob.post("/create_session", json={}).status_code == 403
        assert httpx.get(f"{hub.url}/api/v1/training_runs").status_code == 401
        hub.cancel(job)


def set_host(hub: HubProcess, host: str, state: str) -> None:
    hub.operator.call("POST", f"/v1/host/{host}/{state}", Host, body=HostStateRequest(reason="test"))


def host_of(hub: HubProcess, job: str) -> str:
    """The host that serves; empty if none does."""
    found = hub.job(job).job
    hosts = hub.operator.call("GET", "/v1/workers", HostsReply).hosts
    return next((each.name for each in hosts if each.id == found.host_id and found.serving == "serving"), "")


def test_an_idle_server_sleeps_and_wakes_on_another_host_with_its_state(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "siri", grace_s="1"), researcher(hub, "carl") as carl:
        job = serve(hub, "siri saul", "echo-g", idle_s=10.0)
        until_serving(hub, job)
        session = carl.post("/create_session", json={}).json()["session_id"]
        carl.post("/note", content=b"one")
        eventually(lambda: hub.job(job).job.serving == "asleep")
        assert hub.job(job).job.reason == "asleep: no request for 10 s; the next one wakes it"
        set_host(hub, "siri", "pause")
        with agent(hub, tmp_path, "saul", grace_s="1") as saul:
            eventually(lambda: "saul" in hub.online())
            wake = {"session_id": session, "base_model": "echo-g"}
            # A start that takes long is 503, and clients try again.
            woken = eventually(
                lambda: reply if (reply := carl.post("/create_model", json=wake)).status_code != 503 else None
            )
            assert (woken.status_code, woken.json().get("model")) == (200, "echo-g"), woken.text
            assert (woken.json()["notes"], woken.json()["lost"]) == (["one"], "")
            assert (host_of(hub, job), starts(saul, job)) == ("saul", 2)
            hub.cancel(job)
            gone = carl.post("/create_model", json={"session_id": session, "base_model": "echo-g"})
            assert gone.status_code == 404, "a person ended it"


def test_a_request_under_way_keeps_a_server_awake(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "suse", grace_s="1"), researcher(hub, "cora") as cora:
        job = serve(hub, "suse", "echo-h", idle_s=10.0)
        until_serving(hub, job)
        assert cora.post("/wait", content=b"16").status_code == 200
        assert (hub.job(job).job.serving, hub.job(job).job.epoch) == ("serving", 1)
        hub.cancel(job)


def test_the_server_of_a_drained_host_moves_and_moves_back_with_all_its_state(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "suna", grace_s="1") as suna, researcher(hub, "dora") as dora:
        job = serve(hub, "suna susi", "echo-i")
        until_serving(hub, job)
        dora.post("/note", content=b"one")
        with agent(hub, tmp_path, "susi", grace_s="1") as susi:
            set_host(hub, "suna", "drain")
            eventually(lambda: host_of(hub, job) == "susi")
            seen = dora.post("/note", content=b"two").json()
            assert (seen["notes"], seen["lost"], starts(susi, job)) == (["one", "two"], "", 2)
            first = hub.job(job).attempts[0]
            assert (first.cause, first.error) == ("preempted", "the host suna is drained")
            set_host(hub, "suna", "resume")
            set_host(hub, "susi", "drain")
            eventually(lambda: host_of(hub, job) == "suna")
            seen = dora.post("/note", content=b"three").json()
            assert (seen["notes"], seen["lost"]) == (["one", "two", "three"], ""), "not from what it left there"
            assert starts(suna, job) == 3
            hub.cancel(job)


def test_the_server_of_a_lost_host_continues_from_its_last_copy_and_says_so(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "sami", grace_s="1") as sami, researcher(hub, "emil") as emil:
        job = serve(hub, "sami sina", "echo-j")
        until_serving(hub, job)
        zombie = sami.child()
        emil.post("/note", content=b"one")
        emil.post("/copy")
        eventually(lambda: hub.job(job).attempts[0].checkpoint)
        copy = hub.job(job).attempts[0].checkpoint
        emil.post("/note", content=b"two")
        with agent(hub, tmp_path, "sina", grace_s="1"):
            sami.end(signal.SIGKILL)
            eventually(lambda: host_of(hub, job) == "sina")
            assert is_alive(zombie), "nobody has ended it"
            seen = emil.post("/note", content=b"three").json()
            assert seen["notes"] == ["one", "three"]
            assert seen["lost"].startswith("this server continues on another host from a copy of 2")
            assert seen["lost"].endswith(" UTC: what is newer is lost")
            sami.start()
            eventually(lambda: not is_alive(zombie))
            viewed = emil.get(f"{hub.url}/v1/artifact/{copy}", headers={"authorization": f"Bearer {key_of(emil)}"})
            assert viewed.status_code == 403, "it has the data of all tenants"
            assert hub.file(copy, "notes") == "one\n"
            hub.cancel(job)


def key_of(client: httpx.Client) -> str:
    return client.headers["x-api-key"]
