"""`strata hub` as a process: it starts once, ends gracefully, refuses to be exposed, and unpickles nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from strata.fleet.wire.artifacts import CommitReply
from strata.fleet.wire.events import EventsReply
from strata.fleet.wire.hosts import Host, HostsReply, RegisterReply
from strata.fleet.wire.identities import HubKeyReply, LocalHostReply
from strata.fleet.wire.jobs import Job, SubmitReply
from strata.fleet.wire.leases import ClaimReply
from tests.shell.fleet_agent.waiting import eventually
from tests.shell.fleet_http.running import STRATA, Process, ok, process, refused
from tests.support.feed import ARRIVES_S

HOOKED = """
import sys

def watch(event, arguments):
    if event in ("pickle.find_class", "marshal.load"):
        sys.stderr.write(f"UNPICKLED {event} {arguments}\\n")
        sys.stderr.flush()

from strata.cli.main import main
from strata.hub import server
sys.addaudithook(watch)
main()
"""


@contextmanager
def host_client(hub: Process, operator: httpx.Client) -> Iterator[httpx.Client]:
    made = ok(operator.post("/v1/hosts/local", json={"name": "anna"}), LocalHostReply)
    headers = {"Authorization": f"Bearer {made.secret}"}
    with httpx.Client(base_url="http://hub", headers=headers, timeout=30, transport=hub.transport()) as client:
        ok(client.post("/v1/host/register", json={"capability": {"hostname": "anna"}}), RegisterReply)
        yield client


def test_a_second_hub_on_the_same_file_says_so_in_a_sentence(tmp_path: Path) -> None:
    with process(tmp_path) as first, first.client() as client:
        second = subprocess.run(
            [STRATA, "hub", "--listen", "127.0.0.1:0", "--data", str(tmp_path)],
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )
        assert second.returncode == 100
        assert "in use by another process" in second.stderr
        assert "Traceback" not in second.stderr
        assert client.get("/v1/health").json()["status"] == "ok"


def test_a_hub_that_others_could_reach_in_the_clear_does_not_start(tmp_path: Path) -> None:
    run = subprocess.run(
        [STRATA, "hub", "--listen", "0.0.0.0:0", "--data", str(tmp_path / "new")],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2
    assert "in the clear" in run.stderr
    assert not (tmp_path / "new").exists()


def test_a_stopping_hub_tells_those_who_wait_to_ask_again_and_loses_nothing(tmp_path: Path) -> None:
    with process(tmp_path) as hub, hub.client() as operator, host_client(hub, operator) as host:
        replies: list[httpx.Response] = []

        def wait() -> None:
            replies.append(host.post("/v1/job/claim", json={"claim_id": "c1", "wait_s": 60}))

        asked_s = time.time()
        waiting = threading.Thread(target=wait)
        waiting.start()
        # The hub has heard of the host again, so it has the claim.
        eventually(lambda: ok(operator.get("/v1/host/anna"), Host).seen_at_s >= asked_s)
        status, said = hub.end()
        waiting.join(30)
        assert status == 0, said
        assert refused(replies[0]) == (503, "unavailable")
        assert replies[0].headers["retry-after"] == "1"
        token = hub.token
    with process(tmp_path) as hub, hub.client() as operator:
        assert hub.token == token
        assert [each.name for each in ok(operator.get("/v1/workers"), HostsReply).hosts] == ["anna"]
        assert hub.end()[0] == 0


def test_no_request_makes_the_hub_unpickle_anything_and_no_secret_reaches_its_log(tmp_path: Path) -> None:
    python = [sys.executable, "-c", HOOKED]
    evil = b"cposix\nsystem\n(S'id'\ntR."
    with process(tmp_path, python=python) as hub, hub.client() as operator, host_client(hub, operator) as host:
        trainer = {"name": "t", "command": ["x"], "directory": "/d"}
        body = {"spec": {"model": "m", "trainer": "t"}, "trainer": trainer}
        job = ok(operator.post("/v1/jobs", json=body), SubmitReply).job
        ok(host.post("/v1/job/claim", json={"claim_id": "c"}), ClaimReply)
        for path in ("log", "metrics"):
            host.put(f"/v1/job/{job.id}/{path}", params={"epoch": 1, "offset": 0}, content=evil)
            operator.get(f"/v1/job/{job.id}/{path}")
        for path in ("/v1/jobs", "/v1/manifest", "/v1/join", "/v1/keys"):
            operator.post(path, content=evil, headers={"Content-Type": "application/json"})
        sha = hashlib.sha256(evil).hexdigest()
        ok(host.put(f"/v1/model/{sha}", params={"job_id": job.id, "epoch": 1}, content=evil), CommitReply)
        assert operator.get(f"/v1/model/{sha}").content == evil
        key = ok(operator.post("/v1/keys", json={"name": "k", "role": "viewer"}), HubKeyReply)
        secrets = [hub.token, key.secret, host.headers["Authorization"].removeprefix("Bearer ")]
        cmdline = Path(f"/proc/{hub.pid}/cmdline").read_bytes() + Path(f"/proc/{hub.pid}/environ").read_bytes()
        status, said = hub.end()
        assert status == 0
        assert "UNPICKLED" not in said
        for secret in secrets:
            assert secret not in said
            assert secret.encode() not in cmdline


def test_the_hook_of_these_tests_would_notice(tmp_path: Path) -> None:
    script = HOOKED.replace("main()\n", "import pickle\npickle.loads(pickle.dumps(ValueError))\n").replace(
        "from strata.cli.main import main\nfrom strata.hub import server\n", ""
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, text=True, timeout=60)
    assert "UNPICKLED pickle.find_class" in run.stderr


def test_a_hub_keeps_its_tables_in_postgresql(tmp_path: Path, postgres_url: str) -> None:
    with process(tmp_path, "--database", postgres_url) as hub, hub.client() as operator:
        with host_client(hub, operator) as host:
            trainer = {"name": "t", "command": ["x"], "directory": "/d"}
            body = {"spec": {"model": "m", "trainer": "t"}, "trainer": trainer}
            job = ok(operator.post("/v1/jobs", json=body), SubmitReply).job
            claimed = ok(host.post("/v1/job/claim", json={"claim_id": "c", "wait_s": 10}), ClaimReply)
            assert [lease.job_id for lease in claimed.leases] == [job.id]
            ok(host.post(f"/v1/job/{job.id}/complete", json={"epoch": 1}), Job)
            params: dict[str, str | float] = {"subject": job.id, "wait_s": ARRIVES_S}
            kinds = [each.kind for each in ok(operator.get("/v1/events", params=params), EventsReply).events]
            assert kinds[:1] == ["job.created"]
        status, said = hub.end()
        assert status == 0, said
