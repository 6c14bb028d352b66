"""A training that loses its host goes on where its last checkpoint is, and ends exactly where it would have ended."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.artifacts import FileQuery
from strata.fleet.wire.events import EventsQuery, EventsReply
from strata.fleet.wire.streams import StreamQuery
from tests.shell.fleet_agent.running import AgentProcess, HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually

pytestmark = pytest.mark.proves(
    "A training whose host died goes on elsewhere from its last checkpoint and ends with equal metrics and equal files"
)

TABULAR: Final = Path(__file__).parents[2] / "examples" / "tabular"
TRAINER: Final = TrainerSpec(
    name="tabular", command=("python", "train.py"), directory=str(TABULAR), env={"OMP_NUM_THREADS": "1"}
)
HYPER: Final = {"max_iter": 500, "checkpoint_every": 25}
LEASE_S: Final = 4.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    made = HubProcess(tmp_path, stale_after_s=LEASE_S)
    yield made
    made.close()


def submit(hub: HubProcess, *hosts: str) -> str:
    """The same training each time; whose data it is makes it another job, and the trainer does not ask for it."""
    return hub.submit_with(
        TRAINER,
        JobSpec(
            model="mlp",
            mode="oracle",
            hyper=HYPER,
            trainer=TRAINER.name,
            train_hosts=hosts,
            needs=Needs(allowed_hosts=hosts),
        ),
    )


def checkpoints(hub: HubProcess, job_id: str) -> list[str]:
    """The artifacts, in the order in which the hub acknowledged them."""
    query = EventsQuery(subject=job_id, limit=1000)
    events = hub.operator.call("GET", "/v1/events", EventsReply, query=query).events
    return [event.body["artifact"] for event in events if event.kind == "job.checkpointed"]


def lose_power(host: AgentProcess) -> None:
    host.end(signal.SIGKILL)
    for each in host.children().values():
        for pid in (each["supervisor"], each["child"]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def content(hub: HubProcess, artifact: str, path: str) -> bytes:
    return hub.operator.fetch(f"/v1/artifact/{artifact}/file", query=FileQuery(path=path)).content


def losses(hub: HubProcess, job_id: str, epoch: int) -> dict[int, Any]:
    query = StreamQuery(attempt=epoch, limit=4 * 1024 * 1024)
    lines = hub.operator.fetch(f"/v1/job/{job_id}/metrics", query=query).content.splitlines()
    reports = [json.loads(line) for line in lines]
    return {each["step"]: each["values"] for each in reports if each["type"] == "metrics" and "step" in each}


@pytest.mark.timeout(120)
def test_a_job_whose_host_died_goes_on_elsewhere_from_its_last_checkpoint_with_equal_metrics(
    hub: HubProcess, tmp_path: Path
) -> None:
    with agent(hub, tmp_path, "anna") as anna:
        disturbed = submit(hub, "anna", "bert")
        eventually(lambda: len(checkpoints(hub, disturbed)) >= 2)
        lose_power(anna)
        kept = checkpoints(hub, disturbed)[-1]
        with agent(hub, tmp_path, "bert"):
            undisturbed = submit(hub, "bert")
            whole, resumed = hub.until(undisturbed, "completed", "failed"), hub.until(disturbed, "completed", "failed")
    assert (whole.job.status, resumed.job.status) == ("completed", "completed")
    assert [each.outcome for each in whole.attempts] == ["completed"]
    assert [each.outcome for each in resumed.attempts] == ["lost", "completed"]
    assert resumed.attempts[0].host_id != resumed.attempts[1].host_id

    with np.load(io.BytesIO(content(hub, kept, "weights.npz")), allow_pickle=False) as saved:
        done = int(saved["epoch"])
    assert 2 * HYPER["checkpoint_every"] <= done < HYPER["max_iter"]
    assert f"going on after epoch {done}\n" in hub.log(disturbed, epoch=2)
    every_epoch, later_epochs = losses(hub, undisturbed, 1), losses(hub, disturbed, 2)
    assert list(every_epoch) == list(range(1, HYPER["max_iter"] + 1))
    assert later_epochs == {step: values for step, values in every_epoch.items() if step > done}
    assert resumed.attempts[1].facts["metrics"] == whole.attempts[0].facts["metrics"]
    for path in ("model.npz", "card.json"):
        assert content(hub, resumed.job.artifact, path) == content(hub, whole.job.artifact, path)
