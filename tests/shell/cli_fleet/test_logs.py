"""A log is printed whole: while it grows, over a restart of the hub, and to its last byte."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from strata.cli.exit_codes import ExitCode
from strata.fleet.wire.leases import CompleteRequest, LeaseGiven
from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.shell.fleet_agent.running import STRATA, HubProcess
from tests.shell.fleet_agent.waiting import eventually


@pytest.fixture
def lease(person: Person, host: HostByHand, manifest: Path) -> LeaseGiven:
    assert person.says("apply", str(manifest)).status == 0
    return host.claim()


def test_a_log_and_its_tail_are_printed_as_they_are(person: Person, host: HostByHand, lease: LeaseGiven) -> None:
    host.hub.append(lease, "log", 0, b"one\ntwo\n\x1b]0;title\x07three\n", last=True)
    assert person.says("logs", "tree-small").out == "one\ntwo\n\x1b]0;title\x07three\n"
    assert person.says("logs", "tree-small", "--tail", "2").out == "two\n\x1b]0;title\x07three\n"
    assert person.says("logs", "tree-large").status == ExitCode.NOT_FOUND


def test_a_follower_misses_nothing_over_a_restart_of_the_hub(
    person: Person, hub: HubProcess, host: HostByHand, lease: LeaseGiven, tmp_path: Path
) -> None:
    printed = tmp_path / "printed"
    environ = dict(os.environ)  # noqa: TID251 - the person's, for a process
    with printed.open("wb") as out:
        follower = subprocess.Popen(
            [STRATA, "logs", "-f", "tree-small"], stdout=out, stderr=subprocess.PIPE, env=environ
        )
        try:
            sent = host.hub.append(lease, "log", 0, b"before\n")
            eventually(lambda: printed.read_bytes() == b"before\n")
            hub.kill(signal.SIGKILL)
            hub.start()
            sent = host.hub.append(lease, "log", sent, b"after\n")
            eventually(lambda: printed.read_bytes() == b"before\nafter\n")
            host.hub.append(lease, "log", sent, b"the end", last=True)
            host.hub.complete(lease, CompleteRequest(epoch=lease.epoch))
            _, said = follower.communicate(timeout=60)
        finally:
            follower.kill()
    assert (follower.returncode, printed.read_bytes()) == (0, b"before\nafter\nthe end")
    assert b"trying again\nstrata: the hub is back\n" in said
