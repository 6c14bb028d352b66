"""Traces through real processes, received as a collector of OpenTelemetry would: from a client to the rank, and from
the claim of a job to its trainer."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually
from tests.shell.train_api.processes import serving
from tests.shell.train_runner import tiny_families
from tests.support.otlp import ReceivedSpan, Receiver, receiving

pytestmark = pytest.mark.timeout(240)
PROGRAMS = Path(__file__).with_name("traced_programs.py")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """All processes that a test starts export to it, soon."""
    with receiving() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield made


def assert_chain(spans: Mapping[str, ReceivedSpan], *names: str) -> None:
    """Each span is the parent of the next."""
    for parent, child in itertools.pairwise(names):
        assert spans[child].parent == spans[parent].span, f"{child} is not below {parent}"


def test_a_forward_backward_is_one_trace_from_the_client_to_the_rank(receiver: Receiver, tmp_path: Path) -> None:
    tiny_families.make("llama", tmp_path / "model")
    with serving(tmp_path / "s", tmp_path / "model", ranks=1) as server:
        command = [sys.executable, str(PROGRAMS), "loop", receiver.url, server.url, server.key]
        subprocess.run(command, check=True, timeout=120)
        (step,) = receiver.named("my-loop", "my step")
        names = (
            "my-loop: my step",
            "my-loop: POST /api/v1/forward_backward",
            "strata-api-server: POST /api/v1/forward_backward",
            "strata-orchestrator: orchestrator submit_operation",
            "strata-orchestrator: dispatch",
            "strata-rank: rank FORWARD_BACKWARD",
        )
        spans = eventually(lambda: seen if set(names) <= set(seen := receiver.of_trace(step.trace)) else None)
        assert_chain(spans, *names)
        # Whatever client sent the header, and by its trace the request can be found in the logs.
        header = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "X-API-Key": server.key}
        reply = httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers=header)
        assert reply.headers["x-request-id"] == "ab" * 16
        served = (
            "strata-api-server: GET /api/v1/get_server_capabilities",
            "strata-orchestrator: orchestrator describe_server",
        )
        spans = eventually(lambda: seen if set(served) <= set(seen := receiver.of_trace("ab" * 16)) else None)
        assert_chain(spans, *served)


def test_a_job_is_one_trace_from_its_claim_to_its_trainer(receiver: Receiver, tmp_path: Path) -> None:
    hub = HubProcess(tmp_path)
    try:
        with agent(hub, tmp_path, "anna"):
            job = hub.submit_with(
                TrainerSpec(
                    name="traced",
                    command=("python", PROGRAMS.name, "trainer", receiver.url),
                    directory=str(PROGRAMS.parent),
                ),
                JobSpec(model="m", trainer="traced", needs=Needs(allowed_hosts=("anna",))),
            )
            assert hub.until(job, "completed", "failed").job.status == "completed", hub.log(job)
            (epoch,) = receiver.named("my-trainer", "my epoch")
            names = ("strata-agent: claim", "strata-agent: attempt", "my-trainer: my epoch")
            hub_side = "strata-hub: POST /v1/job/claim"
            spans = eventually(
                lambda: seen if {*names, hub_side} <= set(seen := receiver.of_trace(epoch.trace)) else None
            )
            assert_chain(spans, *names)
            assert_chain(spans, names[0], hub_side)
            assert spans["strata-agent: attempt"].attributes["strata.job"] == job
    finally:
        hub.close()
