"""`strata top`, `metrics --plot`, `--watch` of the fleet and the names that a shell completes, on a real hub."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from strata.base.settings import process_environment
from strata.cli.completion import complete_hosts, complete_jobs
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import complete_contexts
from strata.fleet.wire.leases import CompleteRequest, HeartbeatsReply, HeartbeatsRequest, LeaseGiven, LeaseHeld
from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.shell.fleet_agent.running import HubProcess

STRATA = str(Path(sys.executable).with_name("strata"))


def reports(count: int) -> bytes:
    lines = []
    for step in range(count):
        lines.append({"type": "metrics", "at_s": 100.0 + step, "step": step * 10, "values": {"loss": 1 / (step + 1)}})
        lines.append({"type": "progress", "at_s": 100.0 + step, "fraction": step / (2 * count), "note": "warm"})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture
def lease(person: Person, host: HostByHand, manifest: Path) -> LeaseGiven:
    """A job that runs and is nearly at its half; another one that no host can run."""
    assert person.says("apply", str(manifest)).status == ExitCode.OK
    lease = host.claim()
    held = LeaseHeld(job_id=lease.job_id, epoch=lease.epoch, running=True)
    host.hub.client.call("POST", "/v1/heartbeats", HeartbeatsReply, body=HeartbeatsRequest(leases=(held,)))
    host.hub.append(lease, "metrics", 0, reports(20), last=True)
    return lease


def test_top_shows_progress_what_waits_and_the_hosts(person: Person, lease: LeaseGiven) -> None:
    shown = person.says("top").out
    assert shown.splitlines()[0].startswith("1 running, 1 waiting (longest ")
    running = next(line for line in shown.splitlines() if line.startswith("tree-small"))
    assert "####......  47%" in running
    assert running.rstrip().endswith("warm")
    waiting = next(line for line in shown.splitlines() if line.startswith("tree-large"))
    assert "elsewhere" in waiting or "host" in waiting
    assert any(line.startswith("here") and "online" in line for line in shown.splitlines())
    value = person.says("top", "-o", "json").value
    assert value["running"][0]["id"] == lease.job_id
    assert value["running"][0]["progress"]["fraction"] == pytest.approx(0.475)
    assert value["waiting"][0]["why"]


def test_metrics_are_plotted_as_wide_as_the_terminal(
    person: Person, lease: LeaseGiven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = person.says("metrics", "tree-small", "--plot").out.splitlines()
    assert lines[0] == "loss  tree-small  last 0.05, 20 values"
    assert max(map(len, lines)) == 60
    assert lines[9].split() == ["0", "190"]
    series = person.says("metrics", "tree-small", "--plot", "-o", "json").value[0]["series"][0]
    assert series["values"] == [1 / (step + 1) for step in range(20)]
    assert person.says("metrics", "tree-small", "--plot", "--metric", "accuracy").status == ExitCode.NOT_FOUND
    assert lease.epoch


@pytest.mark.usefixtures("person")
def test_watch_prints_a_row_again_when_its_status_changes(host: HostByHand, lease: LeaseGiven) -> None:
    words = [STRATA, "list", "--watch", "-o", "jsonl"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=process_environment()) as process:
        assert process.stdout is not None
        before = sorted(json.loads(process.stdout.readline())["status"] for _ in range(2))
        host.hub.complete(lease, CompleteRequest(epoch=lease.epoch))
        after = json.loads(process.stdout.readline())
        process.terminate()
    assert before == ["pending", "running"]
    assert (after["id"], after["status"]) == (lease.job_id, "completed")


def test_names_are_completed_from_the_hub(person: Person, host: HostByHand, lease: LeaseGiven, hub: HubProcess) -> None:
    param, ctx = click.Argument(["job"]), click.Context(click.Command("show"))
    assert {item.value for item in complete_jobs(ctx, param, "tree-")} == {"tree-small", "tree-large"}
    digits = lease.job_id.partition("_")[2]
    assert [item.value for item in complete_jobs(ctx, param, digits[:6])] == [digits[:10]]
    assert [item.value for item in complete_hosts(ctx, param, "h")] == [host.name]
    (name,) = person.says("contexts", "-o", "name").out.split()
    assert [item.value for item in complete_contexts(ctx, param, name[:2])] == [name]
    assert complete_contexts(ctx, param, "zzz") == []
    hub.close()
    started_s = time.monotonic()
    assert complete_jobs(ctx, param, "tree-") == []
    assert time.monotonic() - started_s < 30, "a hub that is away does not hold the shell up"


def test_names_of_rows_are_for_other_commands(person: Person, lease: LeaseGiven, host: HostByHand) -> None:
    assert person.says("list", "--status", "running", "-o", "name").out == f"{lease.job_id}\n"
    assert person.says("hosts", "-o", "name").out == f"{host.name}\n"
    assert person.says("show", "tree-small", "-o", "name").out == f"{lease.job_id}\n"
    done = person.says("status", "-o", "name")
    assert (done.status, done.out) == (ExitCode.USAGE, "")
