"""Jobs through a real hub and a real agent: how they end, what the hub knows of it, and what the child could see."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from strata.fleet.artifacts.files import scan
from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.client.artifact_transfer import send_missing_chunks
from strata.fleet.client.hub_api import HubApi
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.artifacts import ArtifactReply, CommitReply, CommitRequest
from strata.fleet.wire.hosts import Host
from tests.shell.fleet_agent.running import PLANTED, HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually, is_alive
from tests.support.busy import BUSY

pytestmark = pytest.mark.timeout(240)


def test_a_job_that_ends_well_leaves_its_log_its_metrics_and_its_files(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "anna") as anna:
        job = hub.submit("anna", "complete")
        seen = hub.until(job, "completed", "failed")
        assert seen.job.status == "completed", seen
        assert hub.file(seen.job.artifact, "model.txt") == "weights of complete"
        assert hub.log(job) == "done\n"
        lines = hub.operator.fetch(f"/v1/job/{job}/metrics").content.splitlines()
        assert len(lines) == 10
        (attempt,) = seen.attempts
        assert attempt.facts["metrics"] == {"loss": 0.2}
        assert attempt.facts["exit"] == 0
        # Nothing of it is left on the host.
        eventually(lambda: not list((anna.state / "attempts").iterdir()))
        assert not list((anna.work / "attempts").iterdir())
        assert anna.end() == 0


def test_all_of_a_log_is_at_the_hub_before_the_job_is_finished(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "kurt"):
        job = hub.submit("kurt", "chatter", lines=300_000)
        hub.until(job, "completed")
        assert hub.log(job) == "".join(f"line {line}\n" for line in range(300_000))


def test_a_crash_is_known_at_once_with_the_last_lines(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "bert"):
        job = hub.submit("bert", "crash")
        attempt = hub.until_tried(job)
        assert attempt.cause is Cause.USER_ERROR
        assert attempt.error.startswith("exit code 1\n")
        assert "the learning rate is a fish" in attempt.error
        crashed_s = float(hub.log(job, 1).split()[2])
        assert attempt.ended_at_s is not None
        took_s = attempt.ended_at_s - crashed_s
        print(f"a crash is known after {took_s:.2f} s")
        assert took_s < 2.0 * BUSY


def test_a_job_that_takes_too_long_ends_with_that_cause(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "cleo", grace_s="0"):
        attempt = hub.until_tried(hub.submit("cleo", "stubborn", timeout_s=0.5))
        assert attempt.cause is Cause.TIMEOUT
        assert attempt.error.startswith("ran longer than timeout_s = 0.5")


def test_cancelling_a_job_ends_all_its_processes(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "dora", grace_s="1") as dora:
        job = hub.submit("dora", "family")
        pids = [int(word) for word in hub.says(job, "pids").split()[1:]]
        assert len(pids) == 3
        assert all(map(is_alive, pids))
        hub.cancel(job)
        eventually(lambda: not any(map(is_alive, pids)), 40.0)
        eventually(lambda: not list((dora.state / "attempts").iterdir()))
        assert hub.job(job).job.status == "cancelled"


def test_a_child_knows_nothing_that_is_the_agents(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "emil") as emil:
        release = tmp_path / "release"
        job = hub.submit("emil", "held", release=str(release))
        hub.says(job, "held")
        pid = emil.child()
        environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert f"STRATA_JOB={job}" in environ
        assert "STRATA_EPOCH=1" in environ
        everything = "\0".join([*environ, Path(f"/proc/{pid}/cmdline").read_text()])
        assert PLANTED not in everything
        assert emil.secret not in everything
        assert "STRATA_AGENT" not in everything
        assert (emil.state.stat().st_mode & 0o777, emil.state.is_dir()) == (0o700, True)
        # The secret is nowhere in what the agent said, nor among the arguments of its own process.
        assert emil.secret not in emil.said() + Path(f"/proc/{emil.pid}/cmdline").read_text()
        release.touch()
        hub.until(job, "completed")


def test_a_source_that_was_uploaded_is_run_and_a_result_that_is_a_link_is_not_kept(
    hub: HubProcess, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "go.py").write_text(
        "import os, pathlib\nout = pathlib.Path(os.environ['STRATA_OUTPUT'])\n"
        "(out / 'where').write_text(os.getcwd())\n(out / 'passwd').symlink_to('/etc/passwd')\n"
    )
    manifest = scan(source)
    send_missing_chunks(HubApi(hub.operator), source, manifest, lambda: True)
    body = CommitRequest(manifest=manifest, lineage=Lineage(kind=ArtifactKind.SOURCE))
    bundle = hub.operator.call("POST", "/v1/artifacts", CommitReply, body=body).artifact_id
    with agent(hub, tmp_path, "fred") as fred:
        trainer = TrainerSpec(name="uploaded", command=("python", "go.py"), bundle=bundle)
        spec = JobSpec(model="u", trainer="uploaded", needs=Needs(allowed_hosts=("fred",)))
        seen = hub.until(hub.submit_with(trainer, spec), "completed", "failed")
        assert seen.job.status == "completed", seen
        assert seen.attempts[0].facts["code"] == bundle
        assert Path(hub.file(seen.job.artifact, "where")).is_relative_to(fred.work)
        files = hub.operator.call("GET", f"/v1/artifact/{seen.job.artifact}", ArtifactReply).manifest.files
        assert [file.path for file in files] == ["where"]


@pytest.mark.proves("Never again: a missing program, folder or commit was tried for ever")
def test_a_trainer_that_no_eligible_host_has_fails_after_one_attempt_on_each(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "gina"), agent(hub, tmp_path, "gerd"):
        eventually(lambda: hub.online() >= {"gina", "gerd"})
        trainer = TrainerSpec(name="elsewhere", command=("python", "x.py"), directory="/no/such/folder")
        spec = JobSpec(model="e", trainer="elsewhere", needs=Needs(allowed_hosts=("gina", "gerd")))
        seen = hub.until(hub.submit_with(trainer, spec), "failed")
        assert seen.job.reason == "setup_error: no eligible host could set it up"
        assert [each.cause for each in seen.attempts] == [Cause.SETUP_ERROR] * 2
        assert len({each.host_id for each in seen.attempts}) == 2
        assert "/no/such/folder is not on this host" in seen.attempts[0].error


def test_slots_bound_what_runs_at_once(hub: HubProcess, tmp_path: Path) -> None:
    release = tmp_path / "release"
    with agent(hub, tmp_path, "hugo", slots="2") as hugo:
        jobs = [hub.submit("hugo", "held", seed=seed, release=str(release)) for seed in range(3)]
        wanted = ["pending", "running", "running"]
        eventually(lambda: sorted(hub.job(job).job.status for job in jobs) == wanted)
        assert len(hugo.children()) == 2
        release.touch()
        for job in jobs:
            hub.until(job, "completed")


def test_a_second_agent_in_the_same_folder_does_not_start(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "ines") as ines:
        eventually(lambda: "host_registered" in ines.said())
        first = ines._process
        ines.start()
        assert ines._process.wait(60) == 100
        assert "another agent uses the state folder" in ines.said()
        ines._process = first


def test_the_hub_is_told_what_the_host_is(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "jule", labels='{ rack = "b4" }') as jule:
        eventually(lambda: "host_registered" in jule.said())
        host = hub.operator.call("GET", "/v1/host/jule", Host)
        assert host.capability.os == "linux"
        assert host.capability.cores >= 1
        assert host.capability.ram_bytes > 1 << 28
        assert host.capability.labels["rack"] == "b4"
        assert host.capability.python.startswith("3.")
        jule.end(signal.SIGINT)


def test_jobs_inherit_the_variables_that_the_settings_name_and_logs_have_their_limit(
    hub: HubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NOT_NAMED", "secret")
    script = (
        "import os; print({k: v for k, v in os.environ.items() if k in ('NCCL_DEBUG', 'NOT_NAMED')});"
        "print('x' * 1_000_000)"
    )
    with agent(hub, tmp_path, "kate", pass_env='["NCCL_*"]', max_log_mib="0.01"):
        trainer = TrainerSpec(name="prints", command=("python", "-c", script), directory=str(tmp_path))
        job = hub.submit_with(trainer, JobSpec(model="p", trainer="prints"))
        hub.until(job, "completed")
        text = hub.log(job)
    assert "{'NCCL_DEBUG': 'INFO'}" in text
    assert "NOT_NAMED" not in text
    assert len(text) < 400_000, "the beginning and the end of it"
