"""The systemd units: every key is known to systemd, the hardening reaches a stated bound, and jobs outlive the agent.

systemd itself is not run here. Without `systemd-analyze` these tests fail: a unit that nobody has read is no unit.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from strata.cli.fleet.agent_service import UNIT, unit_text
from strata.coord.settings import CoordinatorSettings
from strata.fleet.agent.loop import DRAIN_REPORT_S
from strata.fleet.agent.settings import AgentSettings
from strata.hub.settings import BackupSettings, HubSettings
from strata.train.launch.launcher import ENGINE_STOP_S, RANKS_S, STOP_S

ROOT: Final = Path(__file__).parents[3]
UNITS: Final = ROOT / "deploy" / "systemd"
RUN_AS: Final = "strata-agent.service.d/run-as.conf"
INSTALLED: Final = {
    "strata-hub.service": "/opt/strata/bin/strata",
    "strata-hub-backup.service": "/opt/strata/bin/strata",
    "strata-coordinator.service": "/opt/strata/bin/strata",
    "strata-serve.service": "/opt/strata/bin/strata",
    "strata-agent.service": "/opt/strata-agent/bin/strata",
}
"""Each in an environment of its own: a machine may have both, and lose one of them."""
MOST_EXPOSED: Final = {
    "strata-hub.service": 1.6,
    "strata-hub-backup.service": 0.9,
    "strata-coordinator.service": 1.6,
    "strata-serve.service": 2.3,
    "strata-agent.service": 3.9,
    RUN_AS: 5.0,
}
"""By `systemd-analyze security`, from 0 to 10; what it calls 5 and below is OK. The agent's is what trainers and the
sandbox of jobs need."""


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def complaints(folder: Path, unit: str, *more: str) -> list[str]:
    done = analyze("verify", "--man=no", *more, folder / unit)
    # It reads what the unit refers to as well, and may dislike that of this machine.
    return [line for line in done.stderr.splitlines() if "strata" in line]


def installed(folder: Path, unit: str, *, run_as: bool = False) -> Path:
    """As it would be on a machine that has the program."""
    program = str(Path(sys.executable).with_name("strata"))
    (folder / unit).write_text((UNITS / unit).read_text().replace(INSTALLED[unit], program))
    if run_as:
        (folder / RUN_AS).parent.mkdir()
        shutil.copy(UNITS / RUN_AS, folder / RUN_AS)
    return folder / unit


def unit_file(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


def service(path: Path) -> configparser.SectionProxy:
    return unit_file(path)["Service"]


@pytest.mark.parametrize(("unit", "run_as"), [*((unit, False) for unit in INSTALLED), ("strata-agent.service", True)])
def test_systemd_knows_every_key(tmp_path: Path, unit: str, run_as: bool) -> None:
    installed(tmp_path, unit, run_as=run_as)
    assert complaints(tmp_path, unit) == []


def test_systemd_knows_every_key_of_the_timer_which_starts_a_backup_each_day(tmp_path: Path) -> None:
    installed(tmp_path, "strata-hub-backup.service")
    timer = "strata-hub-backup.timer"
    shutil.copy(UNITS / timer, tmp_path / timer)
    assert complaints(tmp_path, timer) == []
    keys = unit_file(tmp_path / timer)["Timer"]
    assert (keys["OnCalendar"], keys["Persistent"]) == ("*-*-* 04:00:00", "yes")
    # A day, the delay, and the time that a backup may take.
    assert BackupSettings(folder=tmp_path).max_age_hours >= 24 + 0.5 + 5
    assert analyze("calendar", keys["OnCalendar"]).returncode == 0


@pytest.mark.parametrize("wrong", ["KilMode=process", "KillMode=proces", "TimeoutStopSec=soon"])
def test_a_key_or_a_value_that_systemd_does_not_know_is_found(tmp_path: Path, wrong: str) -> None:
    path = installed(tmp_path, "strata-agent.service")
    path.write_text(path.read_text().replace("KillMode=process", wrong))
    assert complaints(tmp_path, "strata-agent.service")


def test_systemd_knows_every_key_of_the_unit_that_joining_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(Path(sys.executable).with_name("strata"))])
    (tmp_path / UNIT).write_text(unit_text(tmp_path / "state"))
    assert complaints(tmp_path, UNIT, "--user") == []


@pytest.mark.parametrize("name", MOST_EXPOSED)
def test_the_hardening_reaches_its_bound(tmp_path: Path, name: str) -> None:
    unit = "strata-agent.service" if name == RUN_AS else name
    path = installed(tmp_path, unit, run_as=name == RUN_AS)
    done = analyze("security", "--offline=yes", path)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stderr
    print(f"{name}: {found[1]}")
    assert float(found[1]) <= MOST_EXPOSED[name]


def test_jobs_outlive_an_agent_that_crashes_and_have_their_time_when_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / UNIT).write_text(unit_text(tmp_path))
    for path in (UNITS / "strata-agent.service", tmp_path / UNIT):
        unit = service(path)
        assert (unit["KillMode"], unit["OOMPolicy"], unit["Restart"]) == ("process", "continue", "always")
        assert unit["ExecReload"] == "/bin/kill -USR1 $MAINPID"
        assert float(unit["TimeoutStopSec"]) >= AgentSettings().grace_s + DRAIN_REPORT_S + 30
        assert unit["NoNewPrivileges"] == "yes"


def test_what_jobs_have_in_tmp_is_still_there_for_them_when_another_agent_runs() -> None:
    """A PrivateTmp lives as long as the agent: jobs that outlive it would sit in folders that were removed."""
    unit = service(UNITS / "strata-agent.service")
    assert unit.get("PrivateTmp", "no") == "no"
    assert {"/tmp", "/var/tmp"} <= set(unit.get("ReadWritePaths", "").split())


def test_servers_have_time_to_finish_their_requests() -> None:
    for name, drain_s in (
        ("hub", HubSettings().drain_s),
        ("coordinator", CoordinatorSettings().drain_s),
        ("serve", STOP_S + RANKS_S + ENGINE_STOP_S),
    ):
        assert float(service(UNITS / f"strata-{name}.service")["TimeoutStopSec"]) >= drain_s + 30


def test_a_backup_may_write_to_the_hubs_folder_and_that_of_backups_and_leaves_what_the_hub_shares() -> None:
    """Both are services of one user: RemoveIPC would remove what the hub has when a backup ends."""
    unit = service(UNITS / "strata-hub-backup.service")
    assert unit["User"] == service(UNITS / "strata-hub.service")["User"]
    assert unit["StateDirectory"].split() == ["strata-hub", "strata-hub-backups"]
    assert unit.get("RemoveIPC", "no") == "no"


def test_jobs_of_another_user_take_an_agent_that_can_become_him() -> None:
    unit = service(UNITS / RUN_AS)
    kept = set(unit["CapabilityBoundingSet"].split())
    assert unit["Environment"] == "STRATA_AGENT_RUN_AS=strata-job"
    assert kept == {
        f"CAP_{name}"
        for name in ("SETUID", "SETGID", "CHOWN", "FOWNER", "KILL", "DAC_OVERRIDE", "SYS_ADMIN", "NET_ADMIN")
    }
