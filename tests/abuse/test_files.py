"""Other users of the machine: what they can read of the servers' files, and where secrets may not stand."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.private import require_private_folder
from strata.base.secret import read_secret
from strata.coord.settings import CoordinatorSettings
from strata.coord.settings import check_exposure as check_coordinator
from strata.hub.backup import back_up, restore
from strata.hub.compose import open_hub
from strata.hub.settings import HubSettings, check_exposure
from strata.journal.open import open_journal
from strata.train.api.server import APIServer
from strata.train.key_database import open_key_database
from strata.train.settings import check_exposure as check_training
from tests.shell.fleet_http.running import process, refused, running
from tests.shell.train_api.conftest import settings_in

pytestmark = pytest.mark.proves("Never again: databases and folders could be read by other users")

Tries = Callable[[int], None]
AREA = "loopback and local users"
PUBLIC = ("ca.pem",)
"""The certificate of the authority is for everybody."""


def loose(folder: Path) -> Iterator[tuple[Path, str]]:
    """Whatever others than the owner may read, write or enter."""
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o077 and path.name not in PUBLIC:
            yield path, oct(mode)


@pytest.mark.attack(AREA, "files of a new data folder of a hub as another user")
def test_a_hub_writes_for_its_owner_alone(tmp_path: Path, tries: Tries) -> None:
    data = tmp_path / "hub"
    before = os.umask(0)
    try:
        with process(data) as hub, hub.client() as operator:
            assert operator.get("/v1/jobs").status_code == 200
            digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
            operator.put(f"/v1/chunk/{digest}", params={"size": 1}, content=b"x")
            names = {path.name for path in data.rglob("*")}
            assert {"hub.db", "operator.token", "ca.key", digest} <= names
            tries(len(names))
            assert list(loose(data)) == []
            reader = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "cat", str(data / "hub.db")]
            assert subprocess.run(reader, capture_output=True, check=False).returncode != 0
    finally:
        os.umask(before)


@pytest.mark.attack(AREA, "data folder of a hub that existed with mode 0755")
async def test_a_hub_does_not_start_in_a_folder_that_others_can_enter(tmp_path: Path, tries: Tries) -> None:
    data = tmp_path / "hub"
    data.mkdir(mode=0o700)
    for mode in (0o755, 0o750, 0o701, 0o777):
        tries(1)
        data.chmod(mode)
        with pytest.raises(StrataError, match="others could reach") as refusal:
            async with open_hub(HubSettings(data=data), SystemClock()):
                pass
        assert refusal.value.code is Code.INVALID
        assert not list(data.iterdir())


@pytest.fixture
async def backup(tmp_path: Path) -> Path:
    async with running(tmp_path / "hub") as site:
        assert (await (await site.operator()).get("/v1/jobs")).status_code == 200
    folder = tmp_path / "backup"
    await asyncio.to_thread(back_up, tmp_path / "hub", "", folder, 1.0, large=True)
    return folder


@pytest.mark.attack(AREA, "restore with the usual umask: what another user reads of the restored hub")
def test_a_restored_hub_is_for_its_owner_alone(backup: Path, tmp_path: Path, tries: Tries) -> None:
    before = os.umask(0o022)
    try:
        for mode in (0o755, 0o777, 0o710):
            tries(1)
            opened = tmp_path / f"open{mode:o}"
            opened.mkdir()
            opened.chmod(mode)
            with pytest.raises(StrataError, match="others could reach"):
                restore(backup, opened, "", 2.0)
            assert not list(opened.iterdir())
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        for data in (closed, tmp_path / "new"):
            tries(1)
            restore(backup, data, "", 2.0)
            assert (data / "hub.db").is_file()
            assert list(loose(data)) == []
        assert os.umask(0o022) == 0o022, "the umask of the process stays"
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "place", ["artifacts", "streams/job1_x", "artifacts/chunks/ab/link", "operator.token", "extra"]
)
@pytest.mark.attack(AREA, "a link in a backup that leads to files of others")
def test_a_backup_with_a_link_is_not_restored(backup: Path, tmp_path: Path, place: str) -> None:
    link = backup / place
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to("/etc")
    with pytest.raises(StrataError, match="neither a file nor a folder") as refusal:
        restore(backup, tmp_path / "new", "", 2.0)
    assert refusal.value.code is Code.INVALID
    assert not (tmp_path / "new").exists()


@pytest.mark.attack(AREA, "data folder of a hub that belongs to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(StrataError, match="another user"):
        require_private_folder(folder, "the files")


@pytest.mark.attack(AREA, "a database that was made before with mode 0644")
async def test_a_database_that_others_could_read_is_mended(tmp_path: Path) -> None:
    async with running(tmp_path / "hub"):
        pass
    database = tmp_path / "hub" / "hub.db"
    database.chmod(0o644)
    async with running(tmp_path / "hub"):
        assert [path for path in database.parent.glob("hub.db*") if path.stat().st_mode & 0o077] == []


@pytest.mark.attack(AREA, "journal of a coordinator and database of keys elsewhere, with the usual umask")
async def test_every_sqlite_file_is_for_its_owner_alone(tmp_path: Path, tries: Tries) -> None:
    before = os.umask(0o022)
    try:
        async with (
            await open_journal(f"sqlite:{tmp_path / 'coord.db'}", SystemClock()),
            open_key_database(f"sqlite:{tmp_path / 'keys.db'}"),
        ):
            files = list(tmp_path.iterdir())
            tries(len(files))
            assert {"coord.db", "keys.db"} <= {path.name for path in files}
            assert [path for path in files if path.stat().st_mode & 0o077] == []
    finally:
        os.umask(before)


@pytest.mark.attack(AREA, "files and sockets of a training server as another user")
async def test_a_training_server_writes_for_its_owner_alone(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    async with APIServer(settings, SystemClock()).application(None):  # type: ignore[arg-type]
        assert list(loose(settings.data)) == []
    settings.data.chmod(0o755)
    with pytest.raises(StrataError, match="others could reach"):
        async with APIServer(settings, SystemClock()).application(None):  # type: ignore[arg-type]
            pass


@pytest.mark.attack(AREA, "an operator token, a key of the authority or a token file that others can read")
async def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub"):
        pass
    for name in ("operator.token", "ca/ca.key"):
        tries(1)
        path = tmp_path / "hub" / name
        path.chmod(0o644)
        with pytest.raises(StrataError):
            async with open_hub(HubSettings(data=tmp_path / "hub"), SystemClock()):
                pass
        path.chmod(0o600)
    other = tmp_path / "token"
    other.write_text("x" * 40)
    other.chmod(0o640)
    with pytest.raises(StrataError):
        read_secret(other)


@pytest.mark.attack(AREA, "two hubs on one folder")
async def test_two_hubs_do_not_share_a_folder(tmp_path: Path) -> None:
    async with running(tmp_path / "hub"):
        with pytest.raises(StrataError):
            async with open_hub(HubSettings(data=tmp_path / "hub"), SystemClock()):
                pass


EVERYWHERE = ("0.0.0.0", "[::]", "0", "192.0.2.1", "example.org", "[::ffff:192.0.2.1]", "[fe80::1]", "")


@pytest.mark.attack(AREA, "listen where other machines can reach the server, without TLS")
def test_no_server_listens_to_other_machines_in_the_clear(tries: Tries) -> None:
    for host in EVERYWHERE:
        tries(3)
        with pytest.raises(StrataError):
            check_exposure(HubSettings(listen=f"{host}:8443"))
        with pytest.raises(StrataError):
            check_training(host)
        with pytest.raises(StrataError):
            check_coordinator(CoordinatorSettings(listen=f"{host}:8444"))


@pytest.mark.attack(AREA, "DNS rebinding: requests with the names of strangers as Host")
async def test_the_name_in_host_opens_nothing(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub") as site:
        anybody = await site.client()
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.", "[::1]:1", "a" * 250):
            tries(2)
            assert refused(await anybody.get("/v1/jobs", headers={"Host": host}))[0] == 401
            reply = await anybody.get("/v1/health", headers={"Host": host, "Origin": f"http://{host}"})
            assert not [name for name in reply.headers if name.startswith("access-control-")]


@pytest.mark.attack(AREA, "CORS preflight and simple requests of a page to routes that change something")
async def test_no_page_of_another_origin_gets_leave(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "hub") as site:
        page = await site.client(Origin="http://evil.example")
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-operator-token"}
        for path in ("/v1/jobs", "/v1/manifest/reload", "/v1/hosts/local", "/v1/keys"):
            for method, headers in (("OPTIONS", asked), ("POST", {"Content-Type": "text/plain"})):
                tries(1)
                reply = await page.request(method, path, headers=headers, content=b"{}")
                assert reply.status_code == 401
                assert not [name for name in reply.headers if name.startswith("access-control-")]
