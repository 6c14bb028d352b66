"""What a job finds when it starts, and what of it is whose."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest

from strata.base.errors import StrataError
from strata.fleet.agent.attempt_folder import AttemptPaths, find_job_user
from strata.fleet.agent.prepare import SOURCE_TTL_S, HostContext, create_work_folder, prepare_attempt, prune_work_folder
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.jobspec import DataSource
from tests.core.fleet_agent.leases import a_trainer, lease


def a_site(tmp_path: Path, run_as: str = "") -> HostContext:
    settings = AgentSettings(state=tmp_path / "state", work=tmp_path / "work", run_as=run_as)
    create_work_folder(settings)
    nobody_there = HubClient("http://127.0.0.1:1")
    return HostContext(settings, HubApi(nobody_there), {"PATH": "/bin", "HOME": "/h/agent"}, find_job_user(run_as))


def test_a_job_is_told_what_it_is(tmp_path: Path) -> None:
    site = a_site(tmp_path)
    place = AttemptPaths(site.attempts / "a")
    trainer = a_trainer("./go", directory=str(tmp_path), data={"episodes": DataSource(source="/data", digest="d")})
    given = lease(trainer, hyper={"lr": 0.1}, seed=7, timeout_s=60.0)
    run = prepare_attempt(site, given, place, None).spec
    assert run.cwd == str(tmp_path)
    assert run.timeout_s == 60.0
    assert json.loads(Path(run.env["STRATA_HYPER"]).read_text()) == {"lr": 0.1}
    told = json.loads(Path(run.env["STRATA_SPEC"]).read_text())
    assert (told["seed"], told["id"], told["epoch"]) == (7, given.job_id, 1)
    assert told["data"] == {"episodes": {"source": "/data", "digest": "d"}}
    # Again, after a crash in the middle: nothing of the first try is in the way.
    (place.output / "half").touch()
    prepare_attempt(site, given, place, None)
    assert not list(place.output.iterdir())


def test_a_trainer_that_was_removed_meanwhile_is_said_so(tmp_path: Path) -> None:
    site = a_site(tmp_path)
    removed = lease(a_trainer(directory="/"))
    removed = type(removed)(**{name: getattr(removed, name) for name in removed.__struct_fields__} | {"trainer": None})
    with pytest.raises(StrataError, match="was removed"):
        prepare_attempt(site, removed, AttemptPaths(site.attempts / "a"), None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_jobs_user_owns_what_it_writes_to_and_not_the_folder_around_it(tmp_path: Path) -> None:
    site = a_site(tmp_path, "nobody")
    place = AttemptPaths(site.attempts / "a")
    run = prepare_attempt(site, lease(a_trainer(directory="/")), place, None).spec
    nobody = pwd.getpwnam("nobody")
    assert (run.uid, run.gid) == (nobody.pw_uid, nobody.pw_gid)
    assert run.env["HOME"] == nobody.pw_dir
    owners = {path.name: path.stat().st_uid for path in place.folder.iterdir()}
    assert set(owners) == {"output", "checkpoints", "tmp", "home", "metrics.jsonl", "job.json", "hyper.json"}
    assert set(owners.values()) == {nobody.pw_uid}
    assert (place.folder.stat().st_uid, place.folder.stat().st_mode & 0o777) == (0, 0o711)


def test_what_nobody_needs_is_thrown_away(tmp_path: Path) -> None:
    site = a_site(tmp_path)
    for folder in (site.attempts / "known", site.attempts / "unknown", site.cache / "used", site.cache / "old"):
        folder.mkdir(parents=True)
    now_s = (site.cache / "used").stat().st_mtime + 1
    os.utime(site.cache / "old", (now_s, now_s - SOURCE_TTL_S - 2))
    prune_work_folder(site, {"known"}, now_s)
    assert [path.name for path in site.attempts.iterdir()] == ["known"]
    assert [path.name for path in site.cache.iterdir()] == ["used"]
