"""Metrics as Prometheus gets them: every name is documented, and dashboards and alerts use only those.

The page is compared with what the endpoints serve, promtool checks the files, and a real Prometheus scrapes real
processes. The training server's table is compared in tests/shell/train_api/test_status.py.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.base.clock import SystemClock
from strata.base.secret import Secret
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.authenticator import TokenAuthenticator
from strata.coord.server.process import expose_metrics
from strata.coord.server.tokens import Claims, TokenRole, Tokens
from strata.coord.settings import CoordinatorSettings
from strata.fleet.agent import metrics as agent_metrics
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.samples import CardSample, HostSample
from strata.fleet.wire.identities import HubKeyReply, HubKeyRequest
from tests.shell.coord.running import STRATA, as_worker, in_process
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually
from tests.shell.fleet_http.running import running
from tests.shell.train_api.processes import serving
from tests.support.ports import port_of, reserve_port

ROOT: Final = Path(__file__).parents[3]
DEPLOY: Final = ROOT / "deploy"
PAGE: Final = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
SECRET: Final = Secret("0123456789abcdef0123456789abcdef")


class Documented(NamedTuple):
    kind: str
    labels: frozenset[str]
    text: str


def documented() -> dict[str, Documented]:
    rows = re.findall(r"(?m)^\| `(strata_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", PAGE)
    return {
        name: Documented(kind, frozenset(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows
    }


def assert_as_documented(text: str, prefix: str, unlabelled: Sequence[str] = ()) -> dict[str, Any]:
    """Compare the exposition text with the page. `unlabelled`: series of which nothing has been counted yet."""
    families = {
        each.name: each for each in text_string_to_metric_families(text) if not each.name.startswith("process_")
    }
    served = {f"{name}_total" if each.type == "counter" else name: each for name, each in families.items()}
    page = {name: row for name, row in documented().items() if name.startswith(prefix)}
    assert {name: (each.type, each.documentation) for name, each in served.items()} == {
        name: (row.kind, row.text) for name, row in page.items()
    }
    for name, each in served.items():
        if name in unlabelled:
            assert not each.samples
        else:
            assert {label for sample in each.samples for label in sample.labels} - {"le"} == page[name].labels, name
    return families


def value(families: dict[str, Any], name: str, **labels: str) -> float:
    return next(float(each.value) for each in families[name].samples if each.labels == labels)


async def test_the_hub_serves_what_the_page_lists(tmp_path: Path) -> None:
    async with running(tmp_path / "hub") as hub:
        host = await hub.host("anna")
        await hub.add(JobSpec(model="m", trainer="t"))
        assert [len(await host.claim(name)) for name in ("c1", "c2")] == [1, 0]
        beat = {"leases": [], "sample": {"cpu_use": 0.5, "cards": [{"card": "0", "use": 0.25}]}}
        assert (await host.http.post("/v1/heartbeats", json=beat)).status_code == 200
        await hub.hub.context.fleet.hosts.flush_heartbeats()
        viewer = await hub.with_role("viewer")
        assert (await (await hub.client()).get("/metrics")).status_code == 401
        families = assert_as_documented((await viewer.get("/metrics")).text, "strata_hub_")
        assert value(families, "strata_hub_claims", outcome="granted") == 1
        assert value(families, "strata_hub_claims", outcome="empty") == 1
        assert value(families, "strata_hub_leases_granted") == 1
        assert value(families, "strata_hub_heartbeats") == 1
        assert value(families, "strata_hub_jobs", status="claimed") == 1
        assert value(families, "strata_hub_hosts", state="online") == 1
        assert value(families, "strata_hub_gpu_use_ratio") == 0.25
        assert value(families, "strata_hub_auth_failures") == 1
        assert value(families, "strata_hub_backup_max_age_seconds") == 0
        asked = {"method": "POST", "route": "/v1/job/claim"}
        assert value(families, "strata_hub_http_requests", **asked, status="200") == 2
        timed = {
            each.name: each.value
            for each in families["strata_hub_http_request_seconds"].samples
            if asked.items() <= each.labels.items()
        }
        assert timed["strata_hub_http_request_seconds_count"] == 2
        lag = {each.name: each.value for each in families["strata_hub_event_lag_seconds"].samples}
        assert lag["strata_hub_event_lag_seconds_count"] >= 1
        # The counts of a scrape are kept for the next ones.
        await hub.add(JobSpec(model="n", trainer="t"))
        again = {each.name: each for each in text_string_to_metric_families((await viewer.get("/metrics")).text)}
        assert value(again, "strata_hub_jobs", status="pending") == 0
        hub.hub.context.hub_metrics.read_at_s = float("-inf")
        later = {each.name: each for each in text_string_to_metric_families((await viewer.get("/metrics")).text)}
        assert value(later, "strata_hub_jobs", status="pending") == 1


async def test_the_coordinator_serves_what_the_page_lists_to_operators() -> None:
    clock, tokens = SystemClock(), Tokens(SECRET)
    settings = CoordinatorSettings(metrics_listen="127.0.0.1:0", token_secret=SECRET)
    expires_s = round(clock.wall_s()) + 600
    operator = tokens.issue(Claims(job="j", role=TokenRole.OPERATOR, expires_s=expires_s))
    worker = tokens.issue(Claims(job="j", role=TokenRole.WORKER, expires_s=expires_s))
    async with in_process() as coordinator, httpx.AsyncClient() as client:
        service, stub = coordinator.service, coordinator.stub
        config = await stub.RegisterWorker(pb.WorkerInfo(job_id="j", worker_id="w0"))
        await stub.Heartbeat(pb.HeartbeatRequest(job_id="j", worker_id="w0", incarnation=config.incarnation))
        arrival = pb.BarrierRequest(job_id="j", worker_id="w0", barrier_id="b", generation=config.generation)
        await stub.Barrier(arrival, metadata=as_worker("w0"))
        async with expose_metrics(settings, service, TokenAuthenticator(tokens, clock)) as url:

            async def scrape(token: str) -> httpx.Response:
                return await client.get(url, headers={"Authorization": f"Bearer {token}"})

            assert (await client.get(url)).status_code == 401
            assert (await scrape("no.token")).status_code == 401
            assert (await scrape(worker)).status_code == 403
            families = assert_as_documented((await scrape(operator)).text, "strata_coordinator_")
    assert value(families, "strata_coordinator_heartbeats") == 1
    assert value(families, "strata_coordinator_workers") == 1
    assert value(families, "strata_coordinator_leader") == 1
    assert value(families, "strata_coordinator_generations") == 1
    assert value(families, "strata_coordinator_barriers", verdict="released") == 1
    assert value(families, "strata_coordinator_rpcs", rpc="Heartbeat", status="OK") == 1


async def test_the_agent_serves_what_the_page_lists_on_loopback(tmp_path: Path) -> None:
    card = CardSample(card="GPU-1", use=0.5, vram_used_gib=2.0, temperature_c=60.0, power_w=100.0)
    sample = HostSample(
        cpu_use=0.1, ram_used_gib=1.0, disk_free_gib=3.0, environments_gib=0.5, data_gib=0.0, cards=(card,)
    )
    counts = agent_metrics.AgentCounts(leases=2, running=1, sample=sample)
    counts.attempts["completed"] += 1
    settings = AgentSettings(state=tmp_path, metrics_listen="127.0.0.1:0")
    async with agent_metrics.expose_metrics(settings, counts) as url, httpx.AsyncClient() as client:
        token = tmp_path / "metrics.token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert (await client.get(url)).status_code == 401
        reply = await client.get(url, headers={"Authorization": f"Bearer {token.read_text().strip()}"})
    families = assert_as_documented(reply.text, "strata_agent_")
    assert value(families, "strata_agent_gpu_memory_used_bytes", gpu="GPU-1") == 2 * 1024**3
    assert value(families, "strata_agent_attempts", outcome="completed") == 1


async def test_the_token_of_the_agents_metrics_may_be_set(tmp_path: Path) -> None:
    settings = AgentSettings(state=tmp_path, metrics_listen="127.0.0.1:0", metrics_token=Secret("one-of-ours"))
    async with (
        agent_metrics.expose_metrics(settings, agent_metrics.AgentCounts()) as url,
        httpx.AsyncClient() as client,
    ):
        assert (await client.get(url)).status_code == 401
        assert (await client.get(url, headers={"Authorization": "Bearer one-of-ours"})).status_code == 200
    assert not (tmp_path / "metrics.token").exists()


def named_in(text: str) -> set[str]:
    """The series that an expression of Prometheus names, as the page has them."""
    page = documented()
    found = set()
    for name in re.findall(r"\b(?:strata|process)_\w+", text):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        found.add(base if base in page and page[base].kind in ("histogram", "summary") else name)
    return found


def test_dashboards_and_alerts_name_only_series_of_the_page() -> None:
    known = documented().keys() | {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
    shipped = [*sorted((DEPLOY / "grafana").glob("*.json")), DEPLOY / "prometheus" / "alerts.yml"]
    assert [each.name for each in shipped] == ["coordinator.json", "hub.json", "training.json", "alerts.yml"]
    for file in shipped:
        named = named_in(file.read_text("utf-8"))
        assert named - known == set(), file.name
        assert len(named) > 15, file.name


@pytest.mark.parametrize("name", ["coordinator", "hub", "training"])
def test_a_dashboard_has_titles_units_and_texts_and_its_panels_do_not_overlap(name: str) -> None:
    board = json.loads((DEPLOY / "grafana" / f"{name}.json").read_text("utf-8"))
    panels = board["panels"]
    assert len({each["id"] for each in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all(each["datasource"]["uid"] == "${datasource}" for each in panel["targets"])


def example(folder: Path, **credentials: str) -> Path:
    """The example of a configuration in a folder of its own, with files for what it names."""
    shutil.copytree(DEPLOY / "prometheus", folder)
    for name in ("hub.key", "coordinator.token", "agent.token", "training.key", "hub-ca.pem"):
        (folder / name).write_text(credentials.get(name, "nothing"))
    return folder / "prometheus.yml"


def test_promtool_accepts_the_example_and_the_rules(tmp_path: Path) -> None:
    config = example(tmp_path / "p")
    for words in (("check", "rules", str(config.with_name("alerts.yml"))), ("check", "config", str(config))):
        ended = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "SUCCESS" in ended.stdout


def test_a_backup_that_is_too_old_or_was_never_made_alerts_and_none_does_that_is_not_scheduled(tmp_path: Path) -> None:
    """Time begins at 0: the limit is an hour, and the old backup was made after half an hour."""
    config = example(tmp_path / "p")
    made = {"never": (3600, 0), "old": (3600, 1800), "unscheduled": (0, 0)}
    series = [
        {"series": f'strata_hub_backup_{name}_seconds{{instance="{hub}"}}', "values": f"{number}x120"}
        for hub, numbers in made.items()
        for name, number in zip(("max_age", "timestamp"), numbers, strict=True)
    ]
    firing = 'ALERTS{alertname="StrataHubBackupOld", alertstate="firing"}'
    labels = 'alertname="StrataHubBackupOld", alertstate="firing", severity="critical"'
    expected = [("59m", ()), ("70m", ("never",)), ("100m", ("never", "old"))]
    cases = [
        {
            "expr": firing,
            "eval_time": at,
            "exp_samples": [{"labels": f'ALERTS{{{labels}, instance="{hub}"}}', "value": 1} for hub in hubs],
        }
        for at, hubs in expected
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": cases}
    file = config.with_name("test.yml")
    # YAML of a test is JSON too.
    file.write_text(json.dumps({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": [test]}), "utf-8")
    command = ["promtool", "test", "rules", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@contextmanager
def process(command: Sequence[str], **environ: str) -> Iterator[None]:
    child = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin", **environ}, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(30)


@pytest.mark.timeout(180)
def test_a_prometheus_scrapes_hub_coordinator_agent_and_training_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hub = HubProcess(tmp_path)
        stack.callback(hub.close)
        key = hub.operator.call("POST", "/v1/keys", HubKeyReply, body=HubKeyRequest(name="p", role="viewer")).secret
        guards = [stack.enter_context(reserve_port()) for _ in range(4)]
        rpc, coordinator, on_host, web = (f"127.0.0.1:{port_of(guard)}" for guard in guards)
        words = ("--listen", rpc, "--metrics-listen", coordinator, "--database", f"sqlite:{tmp_path}/coord.db")
        stack.enter_context(process([STRATA, "coordinator", *words]))
        server = stack.enter_context(serving(tmp_path / "t", Path("pretended"), pretended=True))
        host = stack.enter_context(agent(hub, tmp_path, "anna", metrics_listen=on_host))
        token = eventually(lambda: made.read_text() if (made := host.state / "metrics.token").exists() else "")
        config = example(tmp_path / "p", **{"hub.key": key, "agent.token": token, "training.key": server.key})
        text = config.read_text("utf-8")
        for old, new in (
            ("scheme: https\n    tls_config:\n", "scheme: http\n"),
            ("      # The hub's own authority: ca/ca.pem of its data folder, or GET /v1/ca.\n", ""),
            ("      ca_file: hub-ca.pem\n", ""),
            ("hub.example:8443", hub.url.removeprefix("http://")),
            ("127.0.0.1:7071", coordinator),
            ("127.0.0.1:7072", on_host),
            ("127.0.0.1:5555", server.url.removeprefix("http://")),
            ("15s", "1s"),
        ):
            assert old in text, old
            text = text.replace(old, new)
        config.write_text(text, "utf-8")
        options = (f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address={web}")
        stack.enter_context(process(["prometheus", *options]))

        def query(expression: str) -> dict[str, float]:
            """The values by the job that was scraped."""
            try:
                reply = httpx.get(f"http://{web}/api/v1/query", params={"query": expression}, timeout=10)
            except httpx.TransportError:
                return {}
            rows = reply.json()["data"]["result"] if reply.status_code == 200 else []
            return {row["metric"].get("job", ""): float(row["value"][1]) for row in rows}

        up = {"strata-hub": 1.0, "strata-coordinator": 1.0, "strata-training": 1.0, "strata-agent": 1.0}
        eventually(lambda: query("up") == up, 60.0)
        assert query("strata_hub_database_writable") == {"strata-hub": 1.0}
        eventually(lambda: query('strata_hub_hosts{state="online"}') == {"strata-hub": 1.0})
        eventually(lambda: query('strata_agent_heartbeats_total{outcome="answered"}').get("strata-agent", 0) >= 1)
        assert query("strata_coordinator_leader") == {"strata-coordinator": 1.0}
        assert query("strata_train_ranks") == {"strata-training": 2.0}
        assert eventually(lambda: query('strata_hub_http_requests_total{route="/metrics"}'))["strata-hub"] >= 1
        rules = httpx.get(f"http://{web}/api/v1/rules", timeout=10).json()["data"]["groups"]
        alerts = [rule for group in rules for rule in group["rules"]]
        assert len(alerts) >= 20
        assert not [rule["name"] for rule in alerts if rule.get("lastError")]
