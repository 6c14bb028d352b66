"""A job in an OCI image, with a real podman; its image is made of programs of this machine, without a registry."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from strata.fleet.core.jobspec import EnvironmentSpec, JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.artifacts import CommitReply
from strata.sdk.bundle import make_bundle
from tests.shell.fleet_agent.running import STRATA, HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually

IMAGE: Final = "localhost/strata-test:1"
PROGRAMS: Final = ("dash", "cat", "id", "sleep", "tee")
OPTIONS: Final = ("--cgroup-manager", "cgroupfs", "--runtime", "runc")
RUN_OPTIONS: Final = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""A machine without the right to raise limits needs these."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Options of podman for a storage of its own, in which the image is."""
    assert os.geteuid() == 0, "only root can become another user: run this as root"
    for program in ("podman", "runc"):
        assert shutil.which(program, path="/usr/bin:/usr/sbin:/usr/local/bin"), f"apt-get install {program}"
    folder = tmp_path_factory.mktemp("podman")
    # podman takes no runroot of more than 50 characters.
    run = tempfile.mkdtemp(prefix="podman-")
    options = ("--root", str(folder / "root"), "--runroot", run, *OPTIONS)
    files = {f"bin/{name}": Path(str(shutil.which(name))).resolve() for name in PROGRAMS}
    listed = subprocess.run(["ldd", *map(str, files.values())], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    with tarfile.open(folder / "image.tar", "w") as image:
        for name, path in (
            files | {"bin/sh": files["bin/dash"]} | {each[1:]: Path(each) for each in libraries}
        ).items():
            image.add(path.resolve(), arcname=name)
    command = ["podman", *options, "import", "--quiet", str(folder / "image.tar"), IMAGE]
    subprocess.run(command, check=True, capture_output=True)
    yield options
    subprocess.run(["podman", *options, "rm", "--all", "--force"], check=False, capture_output=True)
    subprocess.run(["umount", str(folder / "root" / "overlay")], check=False, capture_output=True)
    shutil.rmtree(run, ignore_errors=True)


def submit(hub: HubProcess, script: str, host: str, *, image: str = IMAGE, **trainer: object) -> str:
    name = f"in-image-{abs(hash(script)) % 10**8}"
    spec = JobSpec(model=name, trainer=name, needs=Needs(allowed_hosts=(host,)), max_attempts=1)
    source = make_bundle(Path(__file__).parent)
    hub.operator.send("PUT", f"/v1/source/{source.sha256}", source.content, CommitReply)
    values = {"command": ("sh", "-c", script), "bundle": source.sha256, "env": {"GREETING": "hello"}}
    made = TrainerSpec(name=name, environment=EnvironmentSpec(image=image), **values | trainer)  # type: ignore[arg-type]
    return hub.submit_with(made, spec)


def settings(storage: tuple[str, ...]) -> dict[str, str]:
    return {
        "STRATA_AGENT_CONTAINERS_REGISTRIES": json.dumps(["localhost", "127.0.0.1:1"]),
        "STRATA_AGENT_CONTAINERS_OPTIONS": json.dumps(storage),
        "STRATA_AGENT_CONTAINERS_RUN_OPTIONS": json.dumps(RUN_OPTIONS),
    }


def test_a_job_runs_in_its_image_and_its_result_is_kept(
    hub: HubProcess, tmp_path: Path, storage: tuple[str, ...]
) -> None:
    with agent(hub, tmp_path, "boat", variables=settings(storage)):
        script = 'echo "$GREETING from $0"; echo trained | tee $STRATA_OUTPUT/model; id; cat /etc/passwd'
        job = submit(hub, script, "boat")
        ended = hub.until(job, "failed")
        text = hub.log(job)
        assert "hello from sh" in text
        assert "/etc/passwd: No such file" in text, "the files are those of the image"
        facts = ended.attempts[0].facts
        assert facts["environment"] == {"image": IMAGE, "runtime": "podman"}
        done = hub.until(submit(hub, "echo trained | tee $STRATA_OUTPUT/model", "boat"), "completed")
        assert hub.file(done.job.artifact, "model") == "trained\n"


def test_a_cancelled_job_leaves_no_container(hub: HubProcess, tmp_path: Path, storage: tuple[str, ...]) -> None:
    with agent(hub, tmp_path, "ship", variables=settings(storage)) as running:
        job = submit(hub, "echo up; sleep 300", "ship")
        hub.says(job, "up")
        hub.cancel(job)
        listing = ["podman", *storage, "ps", "--quiet"]
        eventually(lambda: not subprocess.run(listing, capture_output=True, text=True, check=True).stdout)
        eventually(lambda: not running.children())


def test_a_container_does_not_outlive_a_supervisor_that_is_killed(
    hub: HubProcess, tmp_path: Path, storage: tuple[str, ...]
) -> None:
    with agent(hub, tmp_path, "canoe", variables=settings(storage)) as running:
        job = submit(hub, "echo up; sleep 301", "canoe")
        hub.says(job, "up")
        [(key, pids)] = running.children().items()
        listing = ["podman", *storage, "ps", "--quiet", "--filter", f"name=strata-{key}"]
        assert subprocess.run(listing, capture_output=True, text=True, check=True).stdout
        os.kill(pids["supervisor"], signal.SIGKILL)
        eventually(lambda: not subprocess.run(listing, capture_output=True, text=True, check=True).stdout)
        hub.cancel(job)
        eventually(lambda: not running.children())


def test_an_image_that_no_registry_has_is_a_setup_error(
    hub: HubProcess, tmp_path: Path, storage: tuple[str, ...]
) -> None:
    with agent(hub, tmp_path, "raft", variables=settings(storage)):
        job = submit(hub, "echo never", "raft", image="127.0.0.1:1/nothing:1")
        attempt = hub.until(job, "failed").attempts[0]
        assert (attempt.cause, "cannot be pulled" in attempt.error) == ("setup_error", True)


def test_a_command_runs_in_the_image_beside_the_job(
    hub: HubProcess, tmp_path: Path, storage: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent(hub, tmp_path, "kayak", variables=settings(storage)) as running:
        job = submit(hub, "echo up; echo inside | tee /tmp/mark; sleep 302", "kayak")
        hub.says(job, "inside")
        hub.until(job, "running")
        monkeypatch.setenv("STRATA_URL", hub.address)
        monkeypatch.setenv("STRATA_OPERATOR_TOKEN_FILE", str(hub.data / "operator.token"))
        script = "id -u; cat /tmp/mark; echo $GREETING; cat /etc/passwd; cat /proc/self/cgroup; exit 5"
        command = [STRATA, "exec", job, "--", "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 5, done.stderr
        lines = done.stdout.splitlines()
        assert lines[1:4] == ["inside", "hello", "cat: /etc/passwd: No such file or directory"], lines
        hub.cancel(job)
        eventually(lambda: not running.children())
