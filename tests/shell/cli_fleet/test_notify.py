"""`strata notify`, as the page of the fleet shows it: the URL comes from standard input and is never shown again."""

from __future__ import annotations

import io

import pytest

from strata.cli.exit_codes import ExitCode
from tests.shell.cli_fleet.driving import Person
from tests.support.webhook_receiver import WebhookReceiver


def test_a_subscription_is_added_tested_listed_and_removed(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(url: str, *options: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{url}\n"))
        done = person.says("notify", "add", "phone", *options)
        return done.status, done.err

    with WebhookReceiver() as receiver:
        port = receiver.url.rpartition(":")[2].partition("/")[0]
        url = f"json://127.0.0.1:{port}/sEcReT"
        assert add(url, "--events", "failed,lost")[0] == ExitCode.USAGE
        assert add(url, "--mine", "--all")[0] == ExitCode.USAGE
        assert add("nonsense")[0] == ExitCode.USAGE
        status, said = add(url, "--events", "failed, host_lost", "--project", "vision")
        assert (status, said.strip()) == (ExitCode.OK, "strata: phone gets failed, host_lost through JSON")
        status, said = add(url, "--events", "failed", "--events", "host_lost", "--project", "vision")
        assert (status, said.strip()) == (ExitCode.OK, "strata: phone gets failed, host_lost through JSON")
        tested = person.says("notify", "test", "phone")
        assert (tested.status, tested.err.strip()) == (ExitCode.OK, "strata: JSON accepted a message")
        assert b"This is a test of the subscription phone" in receiver.deliveries[0].body
        listed = person.says("notify", "list", "-o", "json")
        row = {"name": "phone", "service": "JSON", "events": ["failed", "host_lost"], "jobs": "project vision"}
        assert listed.value == [row]
        assert "sEcReT" not in listed.out + said + person.says("notify", "list").out
        receiver.answers = [500]
        assert person.says("notify", "test", "phone").status == ExitCode.FAILED
    assert person.says("notify", "rm", "phone").status == ExitCode.OK
    assert person.says("notify", "rm", "phone").status == ExitCode.NOT_FOUND
