"""A gang on the command line: one name for all its members."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.cli.exit_codes import ExitCode
from tests.shell.cli_fleet.conftest import MANIFEST
from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.shell.fleet_agent.running import HubProcess

TRAINERS = MANIFEST.partition("[[jobs]]")[0]
GANG = """
[[jobs]]
name = "sft"
model = "tiny"
workers = 4
workers_per_host = 2
min_workers = 2
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubProcess]:
    """With a coordinator on loopback, which nobody has to run for this."""
    monkeypatch.setenv("STRATA_HUB_COORDINATOR_ADDRESS", "127.0.0.1:9")
    folder = tmp_path / "site"
    folder.mkdir()
    process = HubProcess(folder)
    yield process
    process.close()


@pytest.fixture
def applied(person: Person, manifest: Path) -> Person:
    manifest.write_text(TRAINERS + GANG)
    done = person.says("apply", str(manifest))
    assert (done.status, done.out.split("  ")[0]) == (0, "+2 new"), done.err
    return person


def statuses(person: Person) -> dict[str, str]:
    return {row["job"]: row["status"] for row in person.says("list", "-o", "json").value if row["gang"] == "sft"}


def test_members_are_listed_and_shown_together(applied: Person, host: HostByHand) -> None:
    assert host.completes().spec.label == "sft/0"
    assert [*statuses(applied)] == ["sft/0", "sft/1"], "where the one that is still pending is"
    shown = applied.says("show", "sft", "-o", "json").value
    assert [each["job"] for each in shown["members"]] == ["sft/0", "sft/1"]
    assert applied.says("show", "sft/1", "-o", "json").value["job"] == "sft/1"
    text = applied.says("show", "sft").out
    assert "member 1 of 2, with 2 workers; tiny-" in text
    assert "member 2 of 2, with 2 workers; tiny-" in text


def test_cancel_requeue_and_wait_take_the_name_of_the_gang(applied: Person, host: HostByHand) -> None:
    assert "sft/1" in applied.says("cancel", "sft").out
    assert statuses(applied) == {"sft/0": "cancelled", "sft/1": "cancelled"}
    assert applied.says("wait", "sft").status == ExitCode.CANCELLED
    done = applied.says("requeue", "sft/0", "sft/1", "-o", "json")
    assert [row["job"] for row in done.value] == ["sft/0", "sft/1"]
    assert statuses(applied) == {"sft/0": "pending", "sft/1": "pending"}
    for label in ("sft/0", "sft/1"):
        assert host.completes().spec.label == label
    waited = applied.says("wait", "sft")
    assert (waited.status, waited.err.count("completed")) == (0, 2)
    assert applied.says("archive", "sft").status == 0
    assert statuses(applied) == {}


def test_the_log_of_a_gang_is_that_of_its_first_member(applied: Person, host: HostByHand) -> None:
    host.completes()
    done = applied.says("logs", "sft")
    assert "the log of sft/0, the first of 2 members; the others are sft/1 to sft/1" in done.err
    assert applied.says("why", "sft/1").status == ExitCode.OK


def test_a_gang_of_another_size_supersedes_the_first_as_one_job(
    applied: Person, manifest: Path, host: HostByHand
) -> None:
    applied.says("cancel", "sft")
    manifest.write_text(TRAINERS + GANG.replace("workers = 4", "workers = 2"))
    assert applied.says("apply", str(manifest)).out.startswith("+1 new")
    assert statuses(applied) == {"sft/0": "pending"}
    assert applied.says("show", "sft@2", "-o", "json").value["members"][1]["job"] == "sft/1"
