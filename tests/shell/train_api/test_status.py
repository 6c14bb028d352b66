"""What the server says of itself: times of operations, metrics, and `strata serve status`, of a server at work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.base.errors import StrataError
from strata.base.settings import process_environment
from strata.cli.main import run
from strata.sdk.train import Datum, TrainingServer
from strata.train.status.reports import PHASES
from tests.shell.train_api.processes import Processes, serving

PAGE: Final = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
TOKENS: Final = list(range(20))
STEPS: Final = 3


class ApiContext:
    """A server that two tenants have trained on, each for a little while."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.operator = {"X-Operator-Token": (processes.data / "operator.token").read_text().strip()}
        self.keys: dict[str, str] = {}
        self.last: dict[str, str] = {}

    def get(self, path: str, tenant: str | None = None, status: int = 200) -> httpx.Response:
        """Of the operator unless a tenant asks."""
        headers = self.operator if tenant is None else {"X-API-Key": self.keys[tenant]}
        with self.processes.private() as http:
            reply = http.get(path, headers=headers)
        assert reply.status_code == status, reply.text
        return reply

    def metrics(self, tenant: str | None = None) -> dict[str, Any]:
        return {each.name: each for each in text_string_to_metric_families(self.get("/metrics", tenant).text)}

    def train(self, tenant: str) -> None:
        asked = {"name": tenant, "role": "researcher"}
        with self.processes.private() as http:
            made = http.post("/v1/keys", headers=self.operator, json=asked)
        self.keys[tenant] = made.json()["secret"]
        with TrainingServer(self.processes.url, self.keys[tenant]) as server:
            model = server.create_model("tiny", rank=4)
            for step in range(STEPS):
                model.report(reward=step / 2)
                self.last[tenant] = model.forward_backward([Datum(TOKENS[:-1], TOKENS[1:])]).request_id
                model.optim_step(learning_rate=1e-3)
            model.sampler().result().sample(TOKENS, max_tokens=5).result()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiContext]:
    with serving(Path(tmp_path_factory.mktemp("t")), Path("pretended"), pretended=True) as processes:
        site = ApiContext(processes)
        for tenant in ("alice", "bob"):
            site.train(tenant)
        yield site


def test_the_times_of_an_operation_are_in_order_and_its_phases_are_what_lies_between(site: ApiContext) -> None:
    line = site.get(f"/api/v1/futures/{site.last['alice']}/timeline", "alice").json()
    names = ("accepted", "ready", "dispatched", "sent", "begun", "answered", "ended")
    moments = [line[f"{name}_at"] for name in names]
    assert moments == sorted(moments)
    assert (line["kind"], line["tokens"], line["outcome"]) == ("forward_backward", len(TOKENS) - 1, "finished")
    assert set(line["phases"]) <= set(PHASES)
    assert {"pack", "forward", "backward"} <= set(line["phases"])
    assert sum(line["phases"].values()) == pytest.approx(line["answered_at"] - line["accepted_at"], abs=1e-5)


def test_the_times_of_another_tenant_do_not_exist(site: ApiContext) -> None:
    theirs = site.get(f"/api/v1/futures/{site.last['alice']}/timeline", "bob", 404)
    never = site.get("/api/v1/futures/nobody:train:0:1/timeline", "bob", 404)
    assert theirs.text.replace(site.last["alice"], "nobody:train:0:1") == never.text


def test_the_activity_is_of_the_caller_and_for_operators_of_all(site: ApiContext) -> None:
    everything, own = site.get("/api/v1/activity").json(), site.get("/api/v1/activity", "bob").json()
    assert {each["tenant"] for each in everything["operations"]} == {"key:alice", "key:bob"}
    assert {each["tenant"] for each in own["operations"]} == {"key:bob"}
    accepted = [each["accepted_at_s"] for each in everything["operations"]]
    assert accepted == sorted(accepted, reverse=True)
    assert len(site.get("/api/v1/activity?operations=2").json()["operations"]) == 2
    with site.processes.private() as http:
        forged = {"X-API-Key": site.keys["bob"], "x-strata-sees-all": "yes"}
        alike = http.get("/api/v1/activity", headers=forged).json()
    assert alike["operations"] == own["operations"], "only a hub in front says who sees all"
    (model,) = own["models"]
    assert (model["tenant"], model["rank"], model["waiting"]) == ("key:bob", 4, 0)
    assert {"loss", "tokens", "step"} <= set(model["values"])
    assert all(
        set(each["values"]) == {"trained", "sampled"} for each in site.get("/api/v1/throughput").json()["points"]
    )


def test_the_curves_of_a_model_are_its_tenants(site: ApiContext) -> None:
    models = {each["tenant"]: each["model_id"] for each in site.get("/api/v1/activity").json()["models"]}
    path = f"/api/v1/training_runs/{models['key:alice']}/curves"
    curves = site.get(f"{path}?names=loss,tokens", "alice").json()
    loss, tokens = curves["series"]
    assert (loss["name"], len(loss["values"]), tokens["values"]) == ("loss", STEPS, [len(TOKENS) - 1] * STEPS)
    assert len(loss["steps"]) == len(loss["at_s"]) == STEPS
    assert loss["at_s"] == sorted(loss["at_s"])
    (reward,) = site.get(f"{path}?names=reward", "alice").json()["series"]
    assert reward["values"] == [0.0, 0.5, 1.0], "as its client has reported"
    assert site.get(f"{path}?names=loss,tokens").json() == curves, "an operator sees all"
    site.get(path, "bob", 404)
    site.get(f"{path}?points=0", "alice", 400)


def test_the_trace_has_every_operation_from_its_beginning_to_its_end(site: ApiContext) -> None:
    site.get("/api/v1/trace", "alice", 403)
    events = site.get("/api/v1/trace").json()["traceEvents"]
    begun = [each["id"] for each in events if each["ph"] == "b" and each["name"].endswith(each["id"])]
    ended = [each["id"] for each in events if each["ph"] == "e" and each["name"].endswith(each["id"])]
    assert sorted(begun) == sorted(ended)
    assert set(site.last.values()) <= set(begun)
    at_the_ranks = [each for each in events if each["ph"] == "X"]
    assert sum(each["name"] == "optim_step" for each in at_the_ranks) == 2 * STEPS
    assert all(each["dur"] >= 0 for each in at_the_ranks)


def test_the_metrics_are_those_of_the_documentation(site: ApiContext) -> None:
    rows = re.findall(r"(?m)^\| `(strata_train_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text("utf-8"))
    served: dict[str, tuple[str, str]] = {}
    labels: dict[str, set[str]] = {}
    for family in site.metrics().values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        served[name] = family.type, family.documentation
        labels[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    assert {name: (kind, text) for name, kind, _, text in rows} == served
    # A label shows when something was counted under it; of some there was nothing here.
    documented = {name: set(re.findall(r"`(\w+)`", named)) for name, _, named, _ in rows}
    assert {name: documented[name] for name in labels if labels[name]} == {
        name: labels[name] for name in labels if labels[name]
    }
    assert {name for name in documented if documented[name]} - {name for name in labels if labels[name]} <= {
        "strata_train_snapshots_total", "strata_train_queue_length", "strata_train_engine_ready",
        "strata_train_engine_starts", "strata_train_routed_samples_total", "strata_train_returned_samples_total",
        "strata_train_unroutable_samples_total",
        "strata_train_device_turns_total",
    }  # fmt: skip


def test_the_metrics_count_what_was_done(site: ApiContext) -> None:
    found = site.metrics()

    def value(name: str, **labels: str) -> float:
        samples = found[name].samples
        (one,) = [each.value for each in samples if each.labels == labels and not each.name.endswith("_created")]
        return float(one)

    kinds = {"kind": "forward_backward"}
    assert value("strata_train_operations_accepted", **kinds) == 2 * STEPS
    assert value("strata_train_operations_ended", **kinds, outcome="finished") == 2 * STEPS
    assert value("strata_train_trained_tokens") == 2 * STEPS * (len(TOKENS) - 1)
    assert value("strata_train_sampled_tokens") > 0
    assert value("strata_train_ranks") == 2
    asked = {"server": "0", "method": "POST", "route": "/api/v1/optim_step", "status": "200"}
    assert value("strata_train_http_requests", **asked) == 2 * STEPS


def test_paths_that_are_no_routes_are_one_label(site: ApiContext) -> None:
    for path in ("/no", "/such", "/thing"):
        site.get(path, status=404)
    samples = site.metrics()["strata_train_http_requests"].samples
    assert not {each.labels["route"] for each in samples} & {"/no", "/such", "/thing"}


def test_the_status_tells_an_operator_of_all_tenants_and_a_tenant_of_itself(site: ApiContext) -> None:
    everything, own = site.get("/api/v1/status").json(), site.get("/api/v1/status", "bob").json()
    assert (everything["ranks"]["state"], everything["ranks"]["answered"]) == ("ready", [0, 1])
    assert {each["tenant"] for each in everything["recent"]} == {"key:alice", "key:bob"}
    assert {each["tenant"] for each in own["recent"]} == {"key:bob"}
    assert everything["trained_tokens_per_s"] > 0
    assert "alice" not in json.dumps(own)
    assert "alice" not in site.get("/metrics", "bob").text


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRATA_URL", "STRATA_OPERATOR_TOKEN", "STRATA_OPERATOR_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.usefixtures("home")
def test_the_command_line_shows_the_status_of_whoever_is_logged_in_to(
    site: ApiContext, capsys: pytest.CaptureFixture[str]
) -> None:
    token = site.processes.data / "operator.token"
    assert run(["login", site.processes.address, "--token-file", str(token)]) == 0
    assert run(["serve", "status"]) == 0
    out = capsys.readouterr().out
    assert "tiny (pretended, lora, 1 parameter): 2 ranks ready" in out
    assert "alice" in out
    assert run(["serve", "status", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["base_model"] == "tiny"


@pytest.mark.usefixtures("home")
def test_the_settings_of_a_server_that_runs_here_are_enough_to_find_it(
    site: ApiContext, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "status", str(site.processes.data.parent / "strata.toml")]) == 0
    assert "2 ranks ready" in capsys.readouterr().out


@pytest.mark.usefixtures("home")
def test_a_key_in_a_file_shows_what_its_tenant_may_see(
    site: ApiContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text(site.keys["bob"])
    file.chmod(0o600)
    assert run(["serve", "status", site.processes.url, "--key-file", str(file), "-o", "wide"]) == 0
    out = capsys.readouterr().out
    assert site.last["bob"] in out
    assert "alice" not in out


def test_an_operator_trains_through_the_socket_and_not_over_tcp(site: ApiContext) -> None:
    with site.processes.private(**site.operator) as http:
        made = http.post("/v1/keys", json={"name": "carol", "role": "operator"}).json()["secret"]
        tenant = {"X-API-Key": site.keys["bob"]}
        assert httpx.get(f"{site.processes.url}/api/v1/status", headers=tenant, timeout=30).status_code == 200
    with TrainingServer(site.processes.address, made) as server:
        assert server.create_model("tiny", rank=4).model_id
    for secret in (made, site.operator["X-Operator-Token"]):
        with pytest.raises(StrataError, match="only a key of a viewer or a researcher"):
            TrainingServer(site.processes.url, secret)
        for header in ({"X-API-Key": secret}, {"Authorization": f"Bearer {secret}"}, {"X-Operator-Token": secret}):
            reply = httpx.get(f"{site.processes.url}/api/v1/status", headers=header, timeout=30)
            assert reply.status_code in (401, 403), header
            assert secret not in reply.text


@pytest.mark.usefixtures("home")
def test_a_watch_that_is_piped_prints_a_line_for_each_change(site: ApiContext) -> None:
    settings = site.processes.data.parent / "strata.toml"
    command = [sys.executable, "-c", "from strata.cli.main import main; main()", "serve", "status", str(settings), "-w"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=process_environment()) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "tiny (pretended, lora, 1 parameter): 2 ranks ready\n"
        site.train("carol")
        assert any(re.search(r"\bunload_model +carol\b", line) for line in watching.stdout)
        os.kill(watching.pid, signal.SIGINT)
        assert watching.wait(20) != 0
