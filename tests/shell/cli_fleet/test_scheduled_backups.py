"""Backups without a TARGET: where they go, which stay, and what a hub says when the newest is old or missing."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.base.errors import Code, StrataError
from strata.cli.exit_codes import ExitCode
from strata.hub.scheduled_backups import ABANDONED_S, choose_target, list_backups, remove_old, survey_backups
from strata.hub.settings import BackupSettings, HubSettings
from tests.shell.cli_fleet.driving import Person
from tests.shell.fleet_agent.running import HubProcess
from tests.shell.fleet_http.running import running
from tests.shell.web.browsing import log_in

NOW_S: Final = 1_800_000_000.0
DAY_S: Final = 86_400.0


def make(folder: Path, at_s: float, *, complete: bool = True, authority: str = "") -> Path:
    path = choose_target(folder, at_s)
    path.mkdir()
    (path / "hub.db").write_text("jobs")
    if complete:
        (path / "backup.json").write_text(json.dumps({"sha256": {"ca/ca.key": authority} if authority else {}}))
    return path


def write_settings(folder: Path, **more: Any) -> Path:
    lines = [f"{name} = {value}" for name, value in {"folder": f'"{folder}"', **more}.items()]
    file = folder.parent / "hub.toml"
    file.write_text("[hub.backups]\n" + "\n".join(lines))
    return file


def test_a_backup_without_a_target_is_made_in_the_folder_and_the_last_ones_stay(
    person: Person, hub: HubProcess, tmp_path: Path
) -> None:
    folder, now_s = tmp_path / "backups", time.time()
    key = hub.data / "ca" / "ca.key"
    authority = hashlib.sha256(key.read_bytes()).hexdigest()
    older = [make(folder, now_s - days * DAY_S, authority=authority) for days in (3, 2, 1)]
    lost = make(folder, now_s - 9 * DAY_S, authority="of a hub whose disk was lost")
    settings = write_settings(folder, keep=2)
    done = person.says("backup", "--config", str(settings), "--data", str(hub.data))
    assert done.status == ExitCode.OK, done.err
    backups = list_backups(folder, time.time())
    assert [each.path for each in backups][:-1] == [lost, *older[-1:]]
    made = backups[-1]
    assert made.complete
    assert made.taken_at_s >= int(now_s)
    assert f"removed {older[0]}" in done.err
    again = tmp_path / "again"
    assert person.says("restore", str(made.path), "--data", str(again)).status == ExitCode.OK


def test_a_backup_that_fails_removes_no_older_one(person: Person, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    older = [make(folder, time.time() - days * DAY_S) for days in (3, 2)]
    settings = write_settings(folder, keep=1)
    done = person.says("backup", "--config", str(settings), "--data", str(tmp_path / "nowhere"))
    assert done.status == ExitCode.NOT_FOUND
    assert sorted(folder.iterdir()) == older


def test_a_backup_needs_a_target_or_a_folder_that_is_private(person: Person, hub: HubProcess, tmp_path: Path) -> None:
    done = person.says("backup", "--data", str(hub.data))
    assert (done.status != ExitCode.OK, "hub.backups.folder" in done.err) == (True, True)
    folder = tmp_path / "backups"
    folder.mkdir()
    folder.chmod(0o755)
    done = person.says("backup", "--config", str(write_settings(folder)), "--data", str(hub.data))
    assert (done.status != ExitCode.OK, f"chmod 700 {folder}" in done.err) == (True, True)


def test_only_complete_backups_count_and_what_others_have_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    complete = [make(folder, NOW_S - days * DAY_S) for days in (3, 2, 1)]
    interrupted = make(folder, NOW_S - 2 * ABANDONED_S - 60, complete=False)
    under_way = make(folder, NOW_S - 60, complete=False)
    to_come = make(folder, NOW_S + 9 * DAY_S)
    foreign = folder / "monday"
    foreign.mkdir()
    (folder / "2020-01-01T000000Z").symlink_to(foreign)
    (folder / "2026-1-2T30405Z").mkdir()
    assert remove_old(folder, 1, NOW_S, authority="") == [*complete[:2], interrupted]
    assert {each.name for each in folder.iterdir()} == {
        *(path.name for path in (complete[2], under_way, to_come, foreign)),
        *("2020-01-01T000000Z", "2026-1-2T30405Z"),
    }
    settings = BackupSettings(folder=folder)
    survey = survey_backups(settings, NOW_S)
    assert survey is not None
    assert survey.newest_at_s == NOW_S - DAY_S, "neither the one under way nor the one of a wrong clock"


def test_a_folder_that_cannot_be_read_is_no_backup(tmp_path: Path) -> None:
    survey = survey_backups(BackupSettings(folder=tmp_path / "nowhere"), NOW_S)
    assert survey is not None
    assert survey.newest_at_s is None
    assert "nowhere cannot be read" in survey.reason


def test_backups_of_a_hub_on_postgres_are_not_scheduled_because_they_lack_its_database(tmp_path: Path) -> None:
    with pytest.raises(StrataError) as refused:
        _ = HubSettings(database="postgresql://db/strata", backups=BackupSettings(folder=tmp_path)).scheduled_backups
    assert refused.value.code is Code.INVALID


def test_a_relative_folder_of_backups_is_refused() -> None:
    with pytest.raises(StrataError, match="must be absolute"):
        BackupSettings(folder=Path("backups"))


async def test_a_hub_shows_that_its_scheduled_backup_is_missing_or_old_until_there_is_a_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    async with running(tmp_path / "hub", backups=BackupSettings(folder=folder, max_age_hours=2)) as hub:
        viewer = await hub.with_role("viewer")

        async def shown() -> tuple[float, float, list[str]]:
            hub.hub.context.hub_metrics.read_at_s = float("-inf")
            text = (await viewer.get("/metrics")).text
            values = {each.name: each.samples[0].value for each in text_string_to_metric_families(text) if each.samples}
            await hub.hub.context.history.run_once()
            reply = (await viewer.get("/v1/overview")).json()
            notices = [each["what"] for each in reply["attention"]]
            return values["strata_hub_backup_timestamp_seconds"], values["strata_hub_backup_max_age_seconds"], notices

        now_s = hub.hub.context.clock.wall_s()
        assert await shown() == (0.0, 7200.0, ["The hub has no backup"])
        browser = await log_in(hub, "viewer")
        assert "The hub has no backup" in await browser.shows("/")
        make(folder, now_s - 3 * 3600)
        assert await shown() == (int(now_s - 3 * 3600), 7200.0, ["The hub's backup is old"])
        make(folder, now_s - 60, complete=False)
        assert (await shown())[2] == ["The hub's backup is old"]
        make(folder, now_s - 3600)
        assert await shown() == (int(now_s - 3600), 7200.0, [])


def test_top_shows_that_a_scheduled_backup_is_missing(
    person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_HUB_BACKUPS_FOLDER", str(tmp_path / "backups"))
    (tmp_path / "other").mkdir()
    hub = HubProcess(tmp_path / "other")
    try:
        person.logs_in(hub)
        assert "The hub has no backup" in person.says("top").out
    finally:
        hub.close()


def test_doctor_says_that_no_backup_was_made_and_then_that_one_is_there(
    person: Person, hub: HubProcess, tmp_path: Path
) -> None:
    settings = write_settings(tmp_path / "backups")
    options = ("--config", str(settings), "--data", str(hub.data))

    def state() -> str:
        (row,) = [row for row in person.says("doctor", *options, "-o", "json").value if row["check"] == "backups"]
        return str(row["state"])

    assert state() == "problem"
    assert person.says("backup", *options).status == ExitCode.OK
    assert state() == "ok"
