"""The installer of the hub, for real: user, environment, settings, units; the hub it installed runs and is backed up.

The package comes as a wheel of this tree, and what it needs from the package index, as for `make setup`.
"""

from __future__ import annotations

import configparser
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.shell.deploy.machine import PYTHON, ROOT, Machine, clone_without
from tests.shell.fleet_agent.waiting import eventually
from tests.support.kernel import lets_make_overlays

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not lets_make_overlays(), reason="the kernel lets this process make no mounts"),
]

SCRIPT: Final = ROOT / "scripts" / "install-hub.sh"
SETTINGS: Final = "/etc/strata/hub.toml"
DATA: Final = "/var/lib/strata-hub"
BACKUPS: Final = "/var/lib/strata-hub-backups"
UNITS: Final = ("strata-hub.service", "strata-hub-backup.service", "strata-hub-backup.timer")


def installs(own: Machine, *more: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """As far as it gets without a package, unless `more` names one."""
    return own.runs("sh", script, "--python", PYTHON, "--from", "/nowhere", *more)


def back_up(own: Machine) -> subprocess.CompletedProcess[str]:
    """What the timer starts, as the user of its unit."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read_string(own.runs("cat", "/etc/systemd/system/strata-hub-backup.service").stdout)
    command = shlex.split(unit["Service"]["ExecStart"])
    user = unit["Service"]["User"]
    return own.runs("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *command, cwd="/")


def test_one_command_makes_a_hub_with_backups_and_another_run_upgrades_it(
    own: Machine, wheel: Path, tmp_path: Path
) -> None:
    first = installs(own, "--from", str(wheel), "--name", "hub.example", "--listen", "127.0.0.1:0")
    assert first.returncode == 0, first.stderr
    assert [own.mode(path) for path in (DATA, BACKUPS, SETTINGS)] == ["strata-hub 700", "strata-hub 700", "root 640"]
    for unit in UNITS:
        assert own.runs("cat", f"/etc/systemd/system/{unit}").stdout == (ROOT / "deploy/systemd" / unit).read_text()
    with (tmp_path / "hub.log").open("wb") as log:
        hub = own.starts(shlex.split(first.stdout), log, cwd="/")
        try:
            eventually(lambda: own.has(f"{DATA}/hub.sock"), 60.0)
            done = back_up(own)
            assert done.returncode == 0, done.stderr
        finally:
            hub.send_signal(signal.SIGTERM)
            assert hub.wait(60) == 0, (tmp_path / "hub.log").read_text()
    assert own.mode(f"{DATA}/operator.token") == "strata-hub 600"
    token = own.runs("cat", f"{DATA}/operator.token").stdout.strip()
    (made,) = own.runs("ls", BACKUPS).stdout.split()
    assert own.runs("cat", f"{BACKUPS}/{made}/operator.token").stdout.strip() == token
    own.runs("sed", "-i", "s/hub.example/changed.example/", SETTINGS)
    settings = own.runs("cat", SETTINGS).stdout
    again = installs(own, "--from", str(wheel), "--name", "other.example")
    assert again.returncode == 0, again.stderr
    assert "stays as it is" in again.stderr
    assert "changed.example" in settings
    assert own.runs("cat", SETTINGS).stdout == settings
    assert own.runs("cat", f"{DATA}/operator.token").stdout.strip() == token
    removed = own.runs("sh", SCRIPT, "--uninstall")
    assert removed.returncode == 0, removed.stderr
    assert not any(own.has(path) for path in ("/opt/strata", *(f"/etc/systemd/system/{unit}" for unit in UNITS)))
    assert all(own.has(path) for path in (SETTINGS, f"{DATA}/operator.token", f"{BACKUPS}/{made}/backup.json"))
    assert own.runs("sh", SCRIPT, "--uninstall").returncode == 0, "twice is harmless"


def test_what_would_be_done_is_told_and_not_done(own: Machine) -> None:
    before = own.runs("ls", "-R", "/opt", "/etc", "/var/lib").stdout
    done = installs(own, "--dry-run", "--name", "hub.example")
    assert done.returncode == 0, done.stderr
    assert "useradd" in done.stdout
    assert 'names = ["hub.example"]' in done.stdout
    assert own.runs("ls", "-R", "/opt", "/etc", "/var/lib").stdout == before
    assert own.runs("id", "strata-hub").returncode != 0


def test_another_user_than_root_is_refused_with_a_sentence(own: Machine) -> None:
    own.runs("mkdir", "/opt/clone")
    own.runs("cp", "-r", ROOT / "scripts", ROOT / "deploy", "/opt/clone")
    as_nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    done = own.runs(*as_nobody, "sh", "/opt/clone/scripts/install-hub.sh", cwd="/")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "install-hub: run this as root: it makes a user and a service\n"


def test_a_secret_on_the_command_line_is_refused_and_not_repeated(own: Machine) -> None:
    for more in (("0123456789ab",), ("--token", "0123456789ab")):
        done = installs(own, *more)
        assert (done.returncode, "0123456789ab" in done.stdout + done.stderr) == (1, False)
        assert "never here" in done.stderr


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--python", "/bin/false"), "not Python 3.11 or newer"),
        (("--name", 'hub"]\ndata = "/tmp'), "--name takes a DNS name"),
        (("--listen",), "needs a value"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_done(own: Machine, more: tuple[str, ...], reason: str) -> None:
    done = installs(own, *more)
    assert (done.returncode, reason in done.stderr) == (1, True), done.stderr
    assert own.runs("id", "strata-hub").returncode != 0
    assert not own.has(SETTINGS)


@pytest.mark.parametrize("missing", UNITS)
def test_a_script_without_its_units_says_so_before_anything_is_done(own: Machine, tmp_path: Path, missing: str) -> None:
    done = installs(own, script=clone_without(tmp_path / "clone", missing) / "scripts" / SCRIPT.name)
    assert (done.returncode, f"{missing} is missing" in done.stderr) == (1, True), done.stderr
    assert own.runs("id", "strata-hub").returncode != 0


@pytest.mark.parametrize("folder", [DATA, BACKUPS])
def test_a_folder_of_another_user_and_a_link_are_refused(own: Machine, folder: str) -> None:
    own.runs("install", "-d", "-m", "0755", "-o", "nobody", folder)
    done = installs(own)
    assert (done.returncode, "does not belong to strata-hub" in done.stderr) == (1, True), done.stderr
    own.runs("rmdir", folder)
    own.runs("ln", "-s", "/opt", folder)
    done = installs(own)
    assert (done.returncode, "is a link" in done.stderr) == (1, True), done.stderr


def test_settings_without_backups_are_kept_and_said(own: Machine) -> None:
    own.runs("mkdir", "-p", "/etc/strata")
    own.runs("tee", SETTINGS, input='[hub]\ndatabase = "postgresql://db/strata"\n')
    done = installs(own, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "no backup is scheduled" in done.stderr


def test_the_program_of_another_service_of_the_machine_stays(own: Machine) -> None:
    for path in ("/opt/strata/bin/strata", "/etc/systemd/system/strata-serve.service"):
        own.runs("install", "-D", "/bin/true", path)
    done = own.runs("sh", SCRIPT, "--uninstall")
    assert done.returncode == 0, done.stderr
    assert own.has("/opt/strata/bin/strata")
