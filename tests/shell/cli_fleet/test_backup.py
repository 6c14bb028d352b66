"""A hub comes back from its backup, with a running hub as the one that is backed up; and its database moves."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

import strata.coord.worker as strata
from strata.base.errors import Code, StrataError
from strata.cli.backup import without_password
from strata.cli.exit_codes import ExitCode
from strata.fleet.artifacts.manifest import ArtifactKind
from strata.fleet.store.backup import EPOCHS
from strata.fleet.wire.artifacts import ArtifactsQuery, ArtifactsReply
from strata.fleet.wire.events import EventsReply
from strata.fleet.wire.leases import CompleteRequest
from strata.hub.backup import restore
from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.shell.fleet_agent.running import STRATA, HubProcess
from tests.shell.fleet_agent.waiting import eventually
from tests.shell.fleet_http.running import ok, process
from tests.support.feed import ARRIVES_S
from tests.support.ports import port_of, reserve_port
from tests.support.postgres import find_programs


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o077 for path in (folder, *folder.rglob("*"))}


def test_a_running_hub_is_backed_up_and_comes_back_fenced(
    person: Person, hub: HubProcess, host: HostByHand, manifest: Path, tmp_path: Path
) -> None:
    person.says("apply", str(manifest))
    key = person.says("keys", "create", "laptop", "--role", "viewer", "-o", "json").value
    held = host.claim()
    host.hub.append(held, "log", 0, b"half way\n")
    kept = tmp_path / "kept"
    done = person.says("backup", str(kept), "--data", str(hub.data), "--all")
    assert done.status == ExitCode.OK, done.err
    assert modes(kept) == {0}, "it holds the key of the authority"
    assert list((hub.data / "backups").iterdir()) == []
    hub.kill()
    shutil.rmtree(hub.data)
    assert person.says("restore", str(kept), "--data", str(hub.data)).status == ExitCode.OK
    hub.start()
    with pytest.raises(StrataError) as refused:
        host.hub.complete(held, CompleteRequest(epoch=held.epoch))
    assert refused.value.code is Code.STALE
    again = host.claim()
    assert (again.job_id, again.epoch) == (held.job_id, EPOCHS + held.epoch + 1)
    assert person.says("keys", "list", "-o", "json").value[0]["id"] == key["id"]
    assert hub.log(held.job_id, held.epoch) == "half way\n"
    query = ArtifactsQuery(kind=ArtifactKind.SOURCE)
    (source,) = hub.operator.call("GET", "/v1/artifacts", ArtifactsReply, query=query).artifacts
    assert hub.operator.fetch(f"/v1/artifact/{source.artifact_id}/bundle.tar.zst").content


def test_a_backup_and_a_restore_overwrite_nothing(person: Person, hub: HubProcess, tmp_path: Path) -> None:
    kept, data = tmp_path / "kept", str(hub.data)
    assert person.says("backup", str(kept), "--data", data).status == ExitCode.OK
    assert person.says("backup", str(kept), "--data", data).status == ExitCode.FAILED
    assert person.says("restore", str(kept), "--data", data).status == ExitCode.FAILED
    (tmp_path / "other" / "ca").mkdir(parents=True)
    (tmp_path / "other" / "ca" / "ca.key").write_text("of another hub")
    done = person.says("restore", str(kept), "--data", str(tmp_path / "other"))
    assert (done.status, "another authority" in done.err) == (ExitCode.FAILED, True)
    assert person.says("backup", str(tmp_path / "b"), "--data", str(tmp_path / "nowhere")).status == ExitCode.NOT_FOUND
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["operator.token", "ca/ca.pem"])
def test_a_restore_leaves_a_token_and_a_certificate_that_are_there_as_they_are(
    person: Person, hub: HubProcess, tmp_path: Path, name: str
) -> None:
    kept, other = tmp_path / "kept", tmp_path / "other"
    assert person.says("backup", str(kept), "--data", str(hub.data)).status == ExitCode.OK
    other.mkdir(mode=0o700)
    (other / "ca").mkdir()
    (other / name).write_text("of another hub")
    done = person.says("restore", str(kept), "--data", str(other))
    assert (done.status, f"{Path(name)} is there already" in done.err) == (ExitCode.FAILED, True), done.err
    assert (other / name).read_text() == "of another hub"
    assert not (other / "hub.db").exists()
    shutil.copy(kept / name, other / name)
    assert person.says("restore", str(kept), "--data", str(other)).status == ExitCode.OK, "the same is no other"


def test_a_restore_that_was_interrupted_is_finished_by_the_next(
    person: Person, hub: HubProcess, tmp_path: Path
) -> None:
    kept, again = tmp_path / "kept", tmp_path / "again"
    assert person.says("backup", str(kept), "--data", str(hub.data), "--all").status == ExitCode.OK
    (kept / "streams").mkdir(exist_ok=True)
    (kept / "streams" / "long").write_bytes(os.urandom(1 << 20))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
    try:
        # No file may become longer than half of that one.
        with pytest.raises(OSError, match="too large"):
            restore(kept, again, "", 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (again / "streams" / "long").exists()
    done = person.says("restore", str(kept), "--data", str(again))
    assert done.status == ExitCode.OK, done.err
    assert (again / "streams" / "long").read_bytes() == (kept / "streams" / "long").read_bytes()
    assert [path for path in again.rglob("*") if "partial" in path.name and path.is_file()] == []


@pytest.mark.parametrize("name", ["hub.db", "ca/ca.key", "operator.token", "backup.json"])
def test_a_backup_that_was_changed_or_is_not_whole_is_refused(
    person: Person, hub: HubProcess, tmp_path: Path, name: str
) -> None:
    kept = tmp_path / "kept"
    person.says("backup", str(kept), "--data", str(hub.data))
    if name == "backup.json":
        (kept / name).unlink()
    else:
        with (kept / name).open("ab") as file:
            file.write(b"x")
    done = person.says("restore", str(kept), "--data", str(tmp_path / "again"))
    assert done.status in (ExitCode.FAILED, ExitCode.NOT_FOUND), done.err
    assert not (tmp_path / "again").exists()


def test_a_hub_that_does_not_run_is_backed_up_too_and_stays_as_it_is(
    person: Person, hub: HubProcess, manifest: Path, tmp_path: Path
) -> None:
    person.says("apply", str(manifest))
    hub.kill()
    before = sorted(path.name for path in hub.data.iterdir())
    done = person.says("backup", str(tmp_path / "kept"), "--data", str(hub.data))
    assert done.status == ExitCode.OK, done.err
    assert "logs and artifacts" in done.err
    after = sorted(path.name for path in hub.data.iterdir())
    assert set(after) <= set(before), "no file is left behind"
    hub.start()
    assert len(person.says("list", "-o", "json").value) == 2


def test_a_hub_on_postgres_is_backed_up_with_its_own_tools(stranger: Person, postgres_url: str, tmp_path: Path) -> None:
    data, kept = tmp_path / "hub", tmp_path / "kept"
    with process(data, "--database", postgres_url) as started, started.client() as operator:
        made = operator.post("/v1/keys", json={"name": "k", "role": "viewer"}).json()
    done = stranger.says("backup", str(kept), "--data", str(data), "--database", postgres_url)
    assert done.status == ExitCode.OK, done.err
    (command,) = [line for line in done.err.splitlines() if line.startswith("pg_dump")]
    _, *arguments = command.split()
    subprocess.run([find_programs() / "pg_dump", *arguments], check=True, timeout=60)
    # The rows are dropped and come back from the dump.
    restore = [str(find_programs() / "pg_restore"), "--clean", f"--dbname={postgres_url}", str(kept / "hub.dump")]
    subprocess.run(restore, check=True, timeout=60)
    again = tmp_path / "again"
    done = stranger.says("restore", str(kept), "--data", str(again), "--database", postgres_url)
    assert done.status == ExitCode.OK, done.err
    with process(again, "--database", postgres_url) as started, started.client() as operator:
        assert operator.get("/v1/keys").json()["keys"][0]["id"] == made["key"]["id"]
        params: dict[str, str | float] = {"subject": "hub", "wait_s": ARRIVES_S}
        told = ok(operator.get("/v1/events", params=params), EventsReply).events
    assert [each.kind for each in told] == ["hub.restored"]
    assert stranger.says("restore", str(kept), "--data", str(tmp_path / "c")).status == ExitCode.USAGE


def test_a_database_moves_to_postgres_and_the_hub_goes_on_there(
    person: Person, hub: HubProcess, manifest: Path, postgres_url: str, tmp_path: Path
) -> None:
    person.says("apply", str(manifest))
    jobs = person.says("list", "-o", "json").value
    busy = person.says("move", postgres_url, "--data", str(hub.data))
    assert (busy.status, "in use" in busy.err) == (ExitCode.FAILED, True)
    hub.kill()
    moved = person.says("move", postgres_url, "--data", str(hub.data))
    assert moved.status == ExitCode.OK, moved.err
    with process(hub.data, "--database", postgres_url) as started, started.client() as operator:
        found = operator.get("/v1/jobs").json()["jobs"]
    assert {each["id"] for each in found} == {each["id"] for each in jobs}
    back = person.says("move", f"sqlite:{tmp_path / 'back.db'}", "--data", str(hub.data), "--database", postgres_url)
    assert back.status == ExitCode.OK, back.err
    assert sorted(path.name for path in tmp_path.glob("back.db*")) == ["back.db"]


@pytest.mark.parametrize(
    "target",
    [
        "postgresql://me:hunter2@db.example/x",
        "postgresql://me@db.example/x?password=hunter2",
        "postgresql://me@db.example/x?sslmode=require&pass%77ord=hunter2",
        "postgresql://me:hunter2?really@db.example/x",
        "postgresql://me:hunter2@[db.example/x",
    ],
)
def test_a_password_on_the_command_line_is_refused_and_not_repeated(stranger: Person, target: str) -> None:
    done = stranger.says("move", target)
    assert (done.status, "hunter2" in done.err) == (ExitCode.USAGE, False)


def test_a_command_to_copy_has_no_password_in_it() -> None:
    for written in ("postgresql://me:hunter2@db/x?port=1", "postgresql://me@db/x?password=hunter2&port=1"):
        assert without_password(written) == "postgresql://me@db/x?port=1"
    plain = "postgresql:///x?host=/run/postgresql"
    assert without_password(plain) == plain


def test_a_copy_that_cannot_be_made_is_said_so(person: Person, hub: HubProcess, tmp_path: Path) -> None:
    """Asked for in the folder of another hub than the one that has the database open."""
    other = tmp_path / "other"
    other.mkdir()
    done = person.says("backup", str(tmp_path / "b"), "--data", str(other), "--database", str(hub.data / "hub.db"))
    assert (done.status, "cannot be used" in done.err) == (ExitCode.UNREACHABLE, True)
    assert not (tmp_path / "b").exists()
    assert os.listdir(other) == []  # noqa: PTH208 - only whether there is anything


def coordinator(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """As `strata up` starts its own."""
    environ = dict(os.environ) | {"STRATA_COORDINATOR_BACKUPS": str(folder / "backups")}  # noqa: TID251 - a process of its own
    command = [STRATA, "coordinator", "--listen", f"127.0.0.1:{port}", "--database", f"sqlite:{folder}/coordinator.db"]
    return subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("runs", [True, False])
def test_the_journal_of_the_coordinator_of_strata_up_comes_back_without_the_secret_of_its_tokens(
    person: Person, hub: HubProcess, tmp_path: Path, *, runs: bool
) -> None:
    folder, kept, again = hub.data / "coordinator", tmp_path / "kept", tmp_path / "again"
    folder.mkdir(mode=0o700)
    (folder / "token.secret").write_text("s" * 32)
    part = tmp_path / "part"
    part.write_text("weights")
    with reserve_port() as guard:
        port = port_of(guard)
        first = coordinator(folder, port)
        try:
            with strata.join(address=f"127.0.0.1:{port}", job="sft", id="w") as worker:
                worker.checkpoint(7, part)
                if runs:
                    assert person.says("backup", str(kept), "--data", str(hub.data)).status == ExitCode.OK
        finally:
            first.terminate()
            first.wait(30)
        if not runs:
            assert person.says("backup", str(kept), "--data", str(hub.data)).status == ExitCode.OK
        assert modes(kept) == {0}
        assert not (kept / "coordinator" / "token.secret").exists(), "the workers from before are refused"
        again.mkdir(mode=0o700)
        (again / "coordinator").mkdir()
        (again / "coordinator" / "token.secret").write_text("of before")
        assert person.says("restore", str(kept), "--data", str(again)).status == ExitCode.OK
        assert not (again / "coordinator" / "token.secret").exists()
        second = coordinator(again / "coordinator", port)
        try:
            with strata.join(address=f"127.0.0.1:{port}", job="sft", id="w") as worker:
                assert worker.start is not None
                assert (worker.start.step, worker.start.parts[0].uri) == (7, str(part))
        finally:
            second.terminate()
            second.wait(30)


def test_a_journal_that_is_there_is_not_overwritten_and_one_of_an_interrupted_restore_stays(
    person: Person, hub: HubProcess, tmp_path: Path
) -> None:
    folder, kept, again = hub.data / "coordinator", tmp_path / "kept", tmp_path / "again"
    folder.mkdir(mode=0o700)
    with reserve_port() as guard:
        made = coordinator(folder, port_of(guard))
        eventually((folder / "backups").is_dir)
        made.terminate()
        made.wait(30)
    assert person.says("backup", str(kept), "--data", str(hub.data)).status == ExitCode.OK
    again.mkdir(mode=0o700)
    (again / "coordinator").mkdir()
    (again / "coordinator" / "coordinator.db").write_text("of another")
    done = person.says("restore", str(kept), "--data", str(again))
    assert (done.status, "is there already" in done.err, (again / "hub.db").exists()) == (ExitCode.FAILED, True, False)
    shutil.copy(kept / "coordinator" / "coordinator.db", again / "coordinator" / "coordinator.db")
    assert person.says("restore", str(kept), "--data", str(again)).status == ExitCode.OK
