"""The command that runs a job in an image: what of the host it shows, and whose variables the runtime gets."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from strata.base.errors import StrataError
from strata.fleet.agent.attempt_folder import AttemptPaths, JobUser
from strata.fleet.agent.containers import ContainerRuntime, ContainerView, contain, ensure_image, find_runtime
from strata.fleet.agent.settings import ContainerSettings, SandboxSettings
from strata.fleet.agent.supervised import SupervisorSpec

USER = JobUser(65534, 65534, (), "/nonexistent")


def contained(tmp_path: Path, kind: str = "podman", **more: object) -> SupervisorSpec:
    settings = ContainerSettings(options=("--runtime", "runc"), run_options=("--ulimit", "nofile=64:64"))
    runtime = ContainerRuntime(kind, f"/usr/bin/{kind}", settings, {"PATH": "/usr/bin"})  # type: ignore[arg-type]
    spec = SupervisorSpec(
        command=["python", "train.py"],
        cwd=str(tmp_path / "source"),
        env={"PATH": "/opt/host", "LD_PRELOAD": "/evil.so", "TOKEN": "a b'c", "STRATA_SEED": "1"},
        max_log_bytes=1,
        timeout_s=0,
        grace_s=1,
        uid=USER.uid,
        gid=USER.gid,
    )
    view = ContainerView(**{"sandbox": SandboxSettings(), "job_user": USER, "readable": [Path("/data")]} | more)  # type: ignore[arg-type]
    return contain(runtime, "python:3.12", spec, AttemptPaths(tmp_path), view)


def test_the_runtime_gets_the_agents_variables_and_the_job_its_own(tmp_path: Path) -> None:
    spec = contained(tmp_path)
    assert (spec.env, spec.uid) == ({"PATH": "/usr/bin"}, None), "nothing of the job decides what the runtime does"
    file = tmp_path / "environment"
    assert file.read_text() == f"LD_PRELOAD=/evil.so\nTOKEN=a b'c\nSTRATA_SEED=1\nHOME={tmp_path / 'home'}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "a b'c" not in " ".join(spec.command)


def test_a_container_sees_its_attempt_and_what_it_may_read(tmp_path: Path) -> None:
    command = list(contained(tmp_path, memory_bytes=1 << 30, devices=(2,)).command)
    assert command[:4] == ["/usr/bin/podman", "--runtime", "runc", "run"]
    assert command[-5:] == ["--ulimit", "nofile=64:64", "python:3.12", "python", "train.py"]
    mounts = [after for before, after in itertools.pairwise(command) if before == "--mount"]
    assert mounts == [f"type=bind,src={tmp_path},dst={tmp_path}", "type=bind,src=/data,dst=/data,ro=true"]
    words = " ".join(command)
    for part in ("--user 65534:65534", "--cap-drop all", "--memory 1073741824", "--device nvidia.com/gpu=2"):
        assert part in words
    assert "--network host" in words
    assert "--network none" in " ".join(contained(tmp_path, sandbox=SandboxSettings(network="none")).command)


def test_a_container_whose_supervisor_is_lost_can_be_removed_by_its_name(tmp_path: Path) -> None:
    spec = contained(tmp_path)
    name = list(spec.command)[list(spec.command).index("--name") + 1]
    assert list(spec.removal)[:4] == ["/usr/bin/podman", "--runtime", "runc", "rm"]
    assert list(spec.removal)[4:] == ["--force", "--ignore", "--time", "0", name]
    assert not contained(tmp_path, "apptainer").removal, "its processes are in the process group"


def test_apptainer_gets_the_same_folders_and_quoted_variables(tmp_path: Path) -> None:
    spec = contained(tmp_path, "apptainer")
    assert list(spec.command)[-3:] == ["docker://python:3.12", "python", "train.py"]
    assert "--bind /data:/data:ro" in " ".join(spec.command)
    assert "--no-privs" in spec.command
    assert """TOKEN='a b'"'"'c'\n""" in (tmp_path / "environment").read_text()


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match="restricts the network"):
        contained(tmp_path, sandbox=SandboxSettings(network="allow"))
    with pytest.raises(StrataError, match="cannot be mounted"):
        contained(tmp_path, readable=[Path("/a,ro=false")])
    with pytest.raises(StrataError, match="has neither podman nor apptainer"):
        find_runtime(ContainerSettings(), {"PATH": str(tmp_path)}, is_root=False)


def test_an_agent_of_root_runs_no_job_with_apptainer(tmp_path: Path) -> None:
    (tmp_path / "apptainer").touch(mode=0o755)
    variables = {"PATH": str(tmp_path)}
    for settings in (ContainerSettings(), ContainerSettings(program="apptainer")):
        with pytest.raises(StrataError, match="would run it as root"):
            find_runtime(settings, variables, is_root=True)
        assert find_runtime(settings, variables, is_root=False).kind == "apptainer"
    (tmp_path / "podman").touch(mode=0o755)
    assert find_runtime(ContainerSettings(), variables, is_root=True).kind == "podman"


def test_an_image_that_cannot_be_pulled_says_why(tmp_path: Path) -> None:
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\n[ $1 = image ] && exit 1\necho 'no such registry' >&2\nexit 125\n")
    program.chmod(0o755)
    runtime = find_runtime(ContainerSettings(), {"PATH": f"{tmp_path}:{os.defpath}"}, is_root=True)
    with pytest.raises(StrataError, match="cannot be pulled:\nno such registry"):
        ensure_image(runtime, "python:3.12", lambda: True)
