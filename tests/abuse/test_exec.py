"""What a command in a running job may try (`strata exec`), and what a job may try against the process that joins it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from strata.base.atomic import write_json
from strata.base.private import private_folder
from strata.fleet.agent import exec_in_sandbox, supervised
from strata.fleet.agent.exec_session import RunningJob, SandboxExec, sandbox_request
from strata.fleet.agent.redaction import Redactor
from strata.fleet.agent.supervised import ChildExit, SupervisorSpec
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.seccomp import CLONE_NEWUSER
from tests.abuse.test_sandbox import CALLS, FAMILY, Host, Job, a_host
from tests.core.fleet_agent.leases import a_trainer, lease
from tests.shell.fleet_agent.waiting import eventually, is_alive
from tests.shell.fleet_http.running import Running, refused, running

AREA = "agent: commands in jobs"
SLEEPER = """
import time
print("up", flush=True)
time.sleep(300)
"""


@pytest.fixture
def host() -> Iterator[Host]:
    with a_host(memory_gib=0.25, processes=60) as site:
        yield site


class Exec:
    """A command in the sandbox of a job, run as the agent runs it."""

    _number = 0

    def __init__(self, host: Host, job: Job, *command: str, **changes: object) -> None:
        Exec._number += 1
        self.folder = private_folder(job.state / f"exec-{Exec._number}")
        beside = RunningJob(lease(a_trainer("python")), job.state, job.paths, Redactor(), asyncio.Event())
        request, limits = sandbox_request(host.context, beside, command)
        self.request: SandboxExec = msgspec.structs.replace(request, **changes)
        write_json(self.folder / "request.json", self.request)
        supervised.write_spec(
            self.folder,
            SupervisorSpec(
                command=[sys.executable, "-I", "-S", exec_in_sandbox.__file__, str(self.folder / "request.json")],
                cwd="/",
                env={},
                max_log_bytes=1 << 20,
                timeout_s=120.0,
                grace_s=1.0,
                limits=limits,
            ),
        )
        self.supervisor = supervised.start_supervisor(self.folder)

    @property
    def output(self) -> str:
        path = self.folder / supervised.LOG
        return path.read_text(errors="replace") if path.exists() else ""

    def exit(self) -> ChildExit:
        self.supervisor.wait(60)
        seen = supervised.read_status(self.folder, self.supervisor)
        assert isinstance(seen, ChildExit), (seen, (self.folder / "supervisor.err").read_text())
        return seen


def started(host: Host, code: str = SLEEPER, **trainer: object) -> Job:
    job = host.start(code, **trainer)
    job.says("up")
    return job


@pytest.mark.attack(AREA, "read the agent's key and other jobs from a command, and keep rights or files of the host")
def test_a_command_sees_what_its_job_sees(host: Host, tries: Callable[[int], None]) -> None:
    other = started(host, env={"PRIVATE": "of-the-other-job"})
    job = started(host, env={"GREETING": "hello"})
    files = [
        str(path)
        for path in (host.key, other.paths.spec, other.state / "supervisor.json", job.state / "supervisor.json")
    ]
    inside = ("environ", f"root{host.key}")
    spy = f"""
    import glob, os
    print("is", os.getuid(), os.getgid(), os.getgroups(), os.environ["GREETING"])
    print("descriptors", sorted(os.listdir("/proc/self/fd"))[:-1], os.readlink("/proc/self/cwd"))
    for line in open("/proc/self/status"):
        if line.startswith(("Cap", "NoNewPrivs")):
            print(line.strip())
    for path in {files!r} + [f"{{each}}/{{file}}" for each in glob.glob("/proc/[0-9]*") for file in {inside!r}]:
        try:
            print("READ", path, open(path, "rb").read())
        except OSError as error:
            print("no", path)
    try:
        os.setuid(0)
    except OSError:
        print("stays what it is")
    print("mounts", any(os.path.ismount(path) for path in {[str(host.settings.state_folder)]!r}))
    """
    done = Exec(host, job, sys.executable, "-c", textwrap.dedent(spy))
    assert done.exit().status == 0, done.output
    out = done.output
    assert "is 65534 65534 [] hello" in out or "is 65534 65534 [65534] hello" in out
    assert f"descriptors ['0', '1', '2'] {job.spec.cwd}" in out
    assert out.count("\t0000000000000000") == 5, "a capability is left"
    assert "NoNewPrivs:\t1" in out
    assert "stays what it is" in out
    assert "PRIVATE KEY" not in out
    assert "of-the-other-job" not in out
    tries(len(out.splitlines()))


@pytest.mark.attack(AREA, "make system calls beside the job that the job does not get")
def test_a_command_has_the_filter_of_its_job_but_debuggers_work(host: Host, tries: Callable[[int], None]) -> None:
    job = started(host)
    done = Exec(
        host,
        job,
        sys.executable,
        "-c",
        CALLS
        + f"""
tell("ptrace", call("ptrace", 0, 0, 0, 0))
tell("process_vm_readv", call("process_vm_readv", os.getpid(), 0, 0, 0, 0, 0))
tell("keyctl", call("keyctl", 1, 0))
tell("unshare", call("unshare", {CLONE_NEWUSER}))
tell("setns", call("setns", 0, 0))
""",
    )
    assert done.exit().status == 0, done.output
    for label in ("ptrace", "process_vm_readv"):
        assert f"{label} done" in done.output
    for label in ("keyctl", "unshare", "setns"):
        assert f"{label} Operation not permitted" in done.output
    tries(5)


@pytest.mark.attack(AREA, "load code of the job into the process that joins its sandbox as root")
def test_nothing_of_the_job_is_loaded_before_the_command(host: Host) -> None:
    loud = {"LD_DEBUG": "files", "LD_PRELOAD": "/nonexistent.so", "PYTHONSTARTUP": "/x", "PYTHONPATH": "/tmp"}
    job = started(host, interpreter="/usr/bin/python3", env=loud)
    done = Exec(host, job, "/bin/true")
    assert done.exit().status == 0
    assert "/bin/true" in done.output
    assert "python" not in done.output


@pytest.mark.attack(AREA, "look into the process that joins the sandbox, from the job, while it still has rights")
def test_the_job_cannot_look_into_the_process_that_joins(host: Host, tries: Callable[[int], None]) -> None:
    job = started(
        host,
        f"""
        import os, time
        print("up", flush=True)
        own, until = os.getpid(), time.monotonic() + 300
        while time.monotonic() < until:
            for name in os.listdir("/proc"):
                if not name.isdigit() or int(name) in (1, own):
                    continue
                for path in ("root{host.key}", "cwd{host.key}"):
                    try:
                        print("READ", open(f"/proc/{{name}}/{{path}}").read(), flush=True)
                    except OSError:
                        pass
                try:
                    links = [os.readlink(f"/proc/{{name}}/fd/{{fd}}") for fd in os.listdir(f"/proc/{{name}}/fd")]
                except OSError:
                    continue
                print("seen", flush=True)
                for link in links:
                    if "ns" in link.partition(":")[0] or str(link).startswith(("mnt:", "user:", "{host.folder}")):
                        print("HOLDS", link, flush=True)
        """,
    )
    for _ in range(10):
        assert Exec(host, job, "sleep", "0.05").exit().status == 0
    eventually(lambda: "seen" in job.log)
    assert "READ" not in job.log
    assert "HOLDS" not in job.log
    tries(10)


@pytest.mark.attack(AREA, "take more memory or processes than the job has, by a command beside it")
def test_a_command_shares_the_limits_of_its_job(host: Host) -> None:
    job = started(host)
    greedy = Exec(host, job, sys.executable, "-c", "x = b'x' * (1 << 30); print('took it')")
    greedy.exit()
    assert "took it" not in greedy.output
    # The kernel may choose either; a job that is left has a limit for its processes.
    if job.supervisor.poll() is not None:
        job = started(host)
    forks = """
    import os, time
    made = 0
    try:
        while True:
            if os.fork() == 0:
                time.sleep(300)
            made += 1
    except OSError:
        print("made", made, flush=True)
    """
    bomb = Exec(host, job, sys.executable, "-c", textwrap.dedent(forks))
    assert bomb.exit().status == 0
    assert 5 < int(bomb.output.split()[1]) <= 60


@pytest.mark.attack(AREA, "outlive the lease with a command whose processes left the tree and ignore SIGTERM")
def test_no_process_of_a_command_outlives_the_job(host: Host) -> None:
    job = started(host)
    groups = [Path(group) for group in job.spec.limits.groups]
    before = set((groups[-1] / "cgroup.procs").read_text().split())
    stays = Exec(host, job, sys.executable, "-c", FAMILY)
    eventually(lambda: "up" in stays.output)
    pids = [int(pid) for pid in set((groups[-1] / "cgroup.procs").read_text().split()) - before]
    assert len(pids) >= 4
    supervised.request_stop(job.state, 0.0)
    assert job.exit().stopped
    stays.exit()
    eventually(lambda: not any(is_alive(pid) for pid in pids))
    eventually(lambda: not any(group.exists() for group in groups))


@pytest.mark.attack(AREA, "join a process that has the number of a job that has ended")
def test_a_process_that_took_the_number_of_the_job_is_not_joined(host: Host, tmp_path: Path) -> None:
    job = started(host)
    mark = tmp_path / "mark"
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        wrong = Exec(host, job, "touch", str(mark), pid=bystander.pid)
        assert wrong.exit().status == 125
        assert "the job has ended" in wrong.output
        later = Exec(host, job, "touch", str(mark), started="1")
        assert later.exit().status == 125
        assert not mark.exists()
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.attack(AREA, "stop the supervisor of a command, and leave the command behind")
def test_a_command_ends_with_its_supervisor(host: Host) -> None:
    job = started(host)
    left = Exec(host, job, "sh", "-c", "echo begun; sleep 299")
    eventually(lambda: "begun" in left.output)
    child = eventually(lambda: supervised.read_pids(left.folder)).child
    inside = [int(pid) for pid in Path(f"/proc/{child}/task/{child}/children").read_text().split()]
    assert inside
    left.supervisor.send_signal(signal.SIGKILL)
    left.supervisor.wait(30)
    eventually(lambda: not any(is_alive(pid) for pid in (child, *inside)))
    assert job.supervisor.poll() is None


@pytest.mark.attack(AREA, "run a command in the job of another researcher, read its output, end it")
async def test_another_researcher_gets_nothing(tmp_path: Path, tries: Callable[[int], None]) -> None:
    async with running(tmp_path / "hub") as site:
        path = await _requested(site)
        ben, viewer = await site.with_role("researcher", "ben"), await site.with_role("viewer")
        for client in (ben, viewer):
            replies = [
                await client.post(path.rpartition("/")[0], json={"command": ["id"]}),
                await client.get(path),
                await client.post(f"{path}/cancel"),
                # Routes of hosts.
                await client.post(f"{path}/start", json={"run": "r1"}),
                await client.put(path, params={"epoch": 1, "offset": 0}, content=b"x"),
                await client.post(f"{path}/end", json={"run": "r1", "status": 0}),
            ]
            assert {refused(reply)[1] for reply in replies} == {"forbidden"}
            tries(len(replies))


async def _requested(site: Running) -> str:
    """The path of a command that Anna has requested in her own job."""
    spec = JobSpec(model="m")
    anna = Submitter(owner="anna")
    await site.hub.context.fleet.jobs.apply(
        ApplyPlan(new={spec.id: spec}), "test", source="test", declared=False, submitter=anna
    )
    vera = await site.host("vera")
    (held,) = await vera.claim()
    beat = {"leases": [{"job_id": held.job_id, "epoch": held.epoch, "running": True}]}
    await vera.http.post("/v1/heartbeats", json=beat)
    client = await site.with_role("researcher", "anna")
    reply = await client.post(f"/v1/job/{held.job_id}/exec", json={"command": ["id"]})
    return f"/v1/job/{held.job_id}/exec/{reply.json()['id']}"
