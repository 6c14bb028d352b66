"""What `strata doctor` finds: nothing on a healthy machine, and each planted trouble by its name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from strata.base.atomic import write_json
from strata.base.file_lock import try_lock
from strata.base.secret import Secret
from strata.cli.exit_codes import ExitCode
from strata.fleet.agent.identity import Membership, load_membership, save_local
from strata.fleet.wire.identities import LocalHostReply, LocalHostRequest
from tests.shell.cli_fleet.driving import Person
from tests.shell.fleet_agent.running import HubProcess


class Checkup:
    def __init__(self, person: Person, hub: HubProcess) -> None:
        self.person = person
        self.hub = hub
        self.state = person.home / "agent"

    def joins(self) -> None:
        body = LocalHostRequest(name="here")
        made = self.hub.operator.call("POST", "/v1/hosts/local", LocalHostReply, body=body)
        save_local(self.state, self.hub.address, host_id=made.host_id, name="here", secret=Secret(made.secret))

    def finds(self, *more: str, status: int = ExitCode.OK) -> dict[str, Any]:
        done = self.person.says("doctor", "-o", "json", "--data", str(self.hub.data), "--state", str(self.state), *more)
        assert done.status == status, (done.out, done.err)
        return {each["check"]: each for each in done.value}


@pytest.fixture
def checkup(person: Person, hub: HubProcess) -> Checkup:
    return Checkup(person, hub)


def test_a_healthy_machine_has_no_problem_and_every_line_has_its_form(checkup: Checkup) -> None:
    checkup.joins()
    found = checkup.finds()
    assert {"python", "install", "machine", "torch", "hub", "clock", "credentials"} <= found.keys()
    assert {"agent", "agent's files", "certificate", "jobs' user", "agent's hub", "hub's data", "database"} <= set(
        found
    )
    for each in found.values():
        assert each.keys() == {"check", "state", "why", "fix"}
        assert (each["state"] == "ok") == (each["fix"] is None), each
    assert {name for name, each in found.items() if each["state"] != "ok"} <= {"agent", "jobs' user", "python"}
    assert "not running" in found["agent"]["why"]
    assert "in use" in found["database"]["why"]
    shown = checkup.person.says("doctor", "--data", str(checkup.hub.data), "--state", str(checkup.state))
    assert shown.status == ExitCode.OK
    assert "\nwarning  agent: host here of" in shown.out
    assert "\n         → systemctl start strata-agent" in shown.out


def test_looking_changes_nothing(checkup: Checkup) -> None:
    checkup.joins()
    checkup.hub.kill()

    def seen() -> dict[str, int]:
        folders = (checkup.hub.data, checkup.state, checkup.person.home)
        return {
            str(path): path.stat().st_mode
            for folder in folders
            for path in folder.rglob("*")
            if "-wal" not in path.name
        }

    before = seen()
    checkup.finds(status=ExitCode.FAILED)
    assert seen() == before


def test_a_hub_that_is_away_is_a_problem_and_its_database_is_looked_at(checkup: Checkup) -> None:
    checkup.hub.kill()
    found = checkup.finds(status=ExitCode.FAILED)
    assert (found["hub"]["state"], "cannot be reached" in found["hub"]["why"]) == ("problem", True)
    assert found["database"]["why"].endswith("hub.db is up to date")
    (checkup.hub.data / "hub.db").write_bytes(b"noise" * 1000)
    assert checkup.finds(status=ExitCode.FAILED)["database"]["state"] == "problem"


def test_the_password_of_a_database_is_not_in_any_line(stranger: Person, tmp_path: Path) -> None:
    for url in ("postgresql://me:hun%ter2@127.0.0.1:1/x", "postgresql://me:hunter2@[127.0.0.1/x"):
        for form in ("json", "table"):
            done = stranger.says("doctor", "-o", form, "--data", str(tmp_path), "--database", url)
            assert done.status == ExitCode.FAILED
            assert "the address of the database cannot be read" in done.out
            assert "hun" not in done.out + done.err


def test_a_key_that_ends_soon_is_a_warning_and_one_that_ended_a_problem(checkup: Checkup) -> None:
    person = checkup.person
    made = person.says("keys", "create", "me", "--role", "viewer", "--days", "1", "-o", "json").value
    token = person.home / "token"
    token.touch(mode=0o600)
    token.write_text(made["secret"])
    assert person.says("login", checkup.hub.address, "--name", "mine", "--token-file", str(token)).status == ExitCode.OK
    found = checkup.finds()
    assert (found["credentials"]["state"], "me, viewer" in found["credentials"]["why"]) == ("warning", True)
    checkup.hub.operator.call("POST", f"/v1/key/{made['id']}/revoke", type(None))
    assert checkup.finds(status=ExitCode.FAILED)["credentials"]["state"] == "problem"


def test_secrets_that_others_can_read_are_a_problem(checkup: Checkup) -> None:
    checkup.joins()
    (checkup.hub.data / "operator.token").chmod(0o644)
    (checkup.state / "identity" / "secret").chmod(0o640)
    found = checkup.finds(status=ExitCode.FAILED)
    for name, fix in (("hub's data", "chmod go= "), ("agent's files", "chmod go= ")):
        assert found[name]["state"] == "problem"
        assert found[name]["fix"].startswith(fix)


def test_an_agent_that_runs_is_seen_and_a_certificate_that_ran_out_too(checkup: Checkup) -> None:
    checkup.joins()
    member = load_membership(checkup.state)
    old = Membership(url=member.url, host_id=member.host_id, name=member.name, certified_at_s=1.0, valid_for_s=86_400.0)
    write_json(checkup.state / "identity" / "hub.json", old)
    lock = try_lock(checkup.state / "lock")
    assert lock is not None
    import os

    try:
        found = checkup.finds(status=ExitCode.FAILED)
    finally:
        os.close(lock)
    assert (found["agent"]["state"], found["certificate"]["state"]) == ("ok", "problem")


def test_a_host_that_was_revoked_is_told(checkup: Checkup) -> None:
    checkup.joins()
    revoked = checkup.person.says("revoke", "here", "--reason", "stolen")
    assert revoked.status == ExitCode.OK, revoked.err
    found = checkup.finds(status=ExitCode.FAILED)
    assert (found["agent's hub"]["state"], "stolen" in found["agent's hub"]["why"]) == ("problem", True)


def test_a_machine_that_has_nothing_has_no_problem(stranger: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger.home.mkdir()
    monkeypatch.chdir(stranger.home)
    done = stranger.says("doctor", "-o", "json")
    assert done.status == ExitCode.OK, done.out
    assert {each["state"] for each in done.value} <= {"ok", "warning"}
    missing = stranger.says("doctor", "--context", "nowhere", "--data", "nowhere", "-o", "jsonl")
    assert missing.status == ExitCode.FAILED
    assert missing.out.count('"problem"') == 2


def test_a_work_folder_without_room_is_told(checkup: Checkup, monkeypatch: pytest.MonkeyPatch) -> None:
    checkup.joins()
    usage = shutil.disk_usage(checkup.state)
    # The disk of the test has room; what counts as little is raised above it.
    monkeypatch.setattr("strata.cli.doctor.findings.LOW_BYTES", usage.total + 1)
    found = checkup.finds()
    assert found["work folder"]["state"] == found["hub's disk"]["state"] == "warning"
    assert Path(found["hub's disk"]["why"].rpartition(" ")[2]) == checkup.hub.data
