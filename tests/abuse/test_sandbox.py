"""What a job may try in the sandbox of its host: real processes of another user, in namespaces and control groups.

The network is the test's own: hosts in network namespaces that it makes, and nothing else.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.base.private import private_folder
from strata.fleet.agent import supervised
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.cgroup import JobParents
from strata.fleet.agent.outcome import classify_exit
from strata.fleet.agent.path_names import attempt_name
from strata.fleet.agent.prepare import HostContext, create_work_folder, prepare_attempt
from strata.fleet.agent.sandbox import detect_sandbox, job_user_of
from strata.fleet.agent.settings import AgentSettings, SandboxSettings
from strata.fleet.agent.supervised import ChildExit
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.amounts import UNKNOWN, Taken
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.seccomp import CLONE_NEWUSER, NUMBERS
from strata.fleet.wire.hosts import HostsReply
from tests.core.fleet_agent.leases import a_trainer, lease
from tests.shell.fleet_agent.running import HubProcess, agent
from tests.shell.fleet_agent.waiting import eventually, is_alive

NEEDS = ("root", "bwrap", "ip", "nft")
AREA = "agent: sandbox"
KEY = "-----BEGIN PRIVATE KEY----- of the host"
MIB = 1 << 20
SLOWER = 2
"""How much longer a watcher may take on a machine that tests share."""
RAM_BYTES = 8 << 30
PLACE = "/usr/share"
"""A folder of the host that every job sees."""


class Host:
    """An agent's folders, and jobs that run as its attempts would."""

    def __init__(self, folder: Path, agent: AgentSettings) -> None:
        self.folder = folder
        self.settings = agent
        create_work_folder(agent)
        self.key = agent.state_folder / "identity" / "host.key"
        private_folder(agent.state_folder)
        private_folder(self.key.parent)
        self.key.write_text(KEY)
        self.key.chmod(0o600)
        self.sandbox = detect_sandbox(agent, {"HOME": str(folder / "home")}, RAM_BYTES)
        hub = HubApi(HubClient("http://127.0.0.1:1"))
        self.context = HostContext(agent, hub, {"PATH": "/usr/bin:/bin"}, self.sandbox.job_user, sandbox=self.sandbox)
        self._jobs: list[Job] = []

    def start(self, code: str, **trainer: Any) -> Job:
        job = Job(self.context, textwrap.dedent(code), seed=len(self._jobs), **trainer)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        for job in self._jobs:
            job.end()


class Job:
    def __init__(
        self,
        host: HostContext,
        code: str,
        *,
        seed: int,
        needs: Needs | None = None,
        taken: Taken = UNKNOWN,
        limits: Mapping[str, Any] | None = None,
        **trainer: Any,
    ) -> None:
        given = lease(a_trainer("python", "-c", code, directory=PLACE, **trainer), seed=seed, needs=needs or Needs())
        given = msgspec.structs.replace(given, taken=taken)
        name = attempt_name(given.job_id, given.epoch)
        self.paths = AttemptPaths(host.attempts / name)
        self.state = private_folder(host.settings.state_folder / name)
        self.spec = prepare_attempt(host, given, self.paths, ()).spec
        self.spec = msgspec.structs.replace(
            self.spec, limits=msgspec.structs.replace(self.spec.limits, **(limits or {}))
        )
        supervised.write_spec(self.state, self.spec)
        self.supervisor = supervised.start_supervisor(self.state)

    @property
    def log(self) -> str:
        path = self.state / supervised.LOG
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, text: str) -> str:
        return eventually(lambda: self.log if text in self.log else None)

    def exit(self) -> ChildExit:
        self.supervisor.wait(60)
        seen = supervised.read_status(self.state, self.supervisor)
        assert isinstance(seen, ChildExit), (seen, (self.state / "supervisor.err").read_text())
        return seen

    def end(self) -> None:
        if self.supervisor.poll() is None:
            supervised.request_stop(self.state, 0.0)
            self.supervisor.wait(30)


@contextmanager
def a_host(*, interpreter: str = "", **sandbox: Any) -> Iterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="strata-abuse-"))
    folder.chmod(0o711)
    (folder / "home").mkdir()
    wanted = SandboxSettings(mode="required", **sandbox)
    settings = AgentSettings(state=folder / "state", work=folder / "work", interpreter=interpreter, sandbox=wanted)
    site = Host(folder, settings)
    try:
        yield site
    finally:
        site.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def host() -> Iterator[Host]:
    with a_host(memory_gib=0.25, processes=60, disk_gib=0.125) as site:
        yield site


# What a job sees


@pytest.mark.attack(AREA, "read the key and the environment of the agent, the files and environment of another job")
def test_a_job_reads_nothing_of_the_agent_and_of_other_jobs(host: Host, tries: Callable[[int], None]) -> None:
    marker = secrets.token_hex(8)
    other = host.start(
        f"""
        import os, pathlib, time
        pathlib.Path(os.environ["STRATA_OUTPUT"], "own").write_text("{marker}")
        print("up", flush=True)
        time.sleep(300)
        """,
        env={"PRIVATE": marker},
    )
    other.says("up")
    files = [
        str(path) for path in (host.key, other.paths.output / "own", other.paths.spec, other.state / "supervisor.json")
    ]
    pids = [os.getpid(), other.supervisor.pid, eventually(lambda: supervised.read_pids(other.state)).child]
    files += [f"/proc/{pid}/environ" for pid in pids] + [f"/proc/{pid}/root{host.key}" for pid in pids]
    spy = host.start(
        f"""
        import glob, os
        print("uid", os.getuid())
        for path in {files!r} + glob.glob("/proc/[0-9]*/environ") + glob.glob("{host.folder}/**", recursive=True):
            try:
                content = open(path, "rb").read()
            except OSError as error:
                print("no", path, type(error).__name__)
            else:
                print("READ", path, content)
        print("processes", len(glob.glob("/proc/[0-9]*")))
        """
    )
    assert spy.exit().status == 0
    assert "uid 65534" in spy.log
    # Its own environment is there, so the search would have found the others.
    assert f"STRATA_OUTPUT={spy.paths.output}" in spy.log
    assert marker not in spy.log
    assert "PRIVATE KEY" not in spy.log
    assert "processes 2" in spy.log
    tries(len(spy.log.splitlines()))


@pytest.mark.attack(AREA, "change the system, another job or the agent through a path that is writable for all")
def test_a_job_writes_to_its_own_attempt_only(host: Host, tries: Callable[[int], None]) -> None:
    shared = host.folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    places = [
        "/usr",
        "/etc",
        "/var/lib",
        "/",
        str(host.folder),
        str(shared),
        str(host.settings.work_folder),
        "/dev/shm",
    ]
    job = host.start(
        f"""
        import os, pathlib
        for place in {places!r} + ["/tmp", "/var/tmp", os.environ["HOME"], os.environ["STRATA_OUTPUT"]]:
            try:
                pathlib.Path(place, "planted").write_text("x")
            except OSError:
                continue
            print("wrote", place)
        """
    )
    assert job.exit().status == 0
    wrote = {line.partition(" ")[2] for line in job.log.splitlines()}
    assert wrote == {"/tmp", "/var/tmp", "/dev/shm", str(job.paths.home), str(job.paths.output)}
    for path in ("/tmp/planted", "/var/tmp/planted", "/dev/shm/planted", shared / "planted"):
        assert not Path(path).exists()
    assert (job.paths.tmp / "planted").exists()
    tries(len(places))


@pytest.fixture
def neighbour() -> Iterator[Path]:
    """The home of somebody else, which all users of the host can read."""
    home = Path("/home") / f"strata-abuse-{secrets.token_hex(4)}"
    home.mkdir(mode=0o755)
    (home / ".netrc").write_text("password of a neighbour")
    (home / ".netrc").chmod(0o644)
    try:
        yield home
    finally:
        shutil.rmtree(home)


@pytest.mark.attack(AREA, "read what other people of the host have in their homes")
def test_a_job_sees_no_home_but_the_interpreter_in_it(
    neighbour: Path, monkeypatch: pytest.MonkeyPatch, tries: Callable[[int], None]
) -> None:
    venv = neighbour / "tools" / "venv"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", venv], check=True)
    # As uv links the Python of a minor version: the way to an interpreter leads through the link.
    # Of a link in the home itself, or in its .local, the job sees the link and nothing beside it.
    links = [neighbour / folder / "bin" / "python" for folder in ("linked", ".local", ".")]
    for link in links:
        link.parent.mkdir(parents=True)
        link.symlink_to(venv / "bin" / "python")
    (neighbour / ".local" / ".netrc").write_text("password of a neighbour")
    elsewhere = Path(tempfile.mkdtemp(prefix="strata-abuse-", dir="/var/lib"))
    elsewhere.chmod(0o755)
    (elsewhere / ".netrc").write_text("password of a neighbour")
    person = pwd.struct_passwd(("neighbour", "x", 12345, 12345, "", str(elsewhere), "/bin/bash"))
    service = pwd.struct_passwd(("data", "x", 12346, 12346, "", "/usr/share", "/usr/sbin/nologin"))
    listed = pwd.getpwall()
    monkeypatch.setattr(pwd, "getpwall", lambda: [*listed, person, service])
    read = f"""
import glob, pathlib, sys
for folder in ({str(neighbour)!r}, {str(neighbour / ".local")!r}, {str(elsewhere)!r}):
    try:
        print("READ", pathlib.Path(folder, ".netrc").read_text())
    except OSError:
        print("no", folder)
print("homes", glob.glob("/home/*"), "place", bool(glob.glob({PLACE!r} + "/*")), sys.executable)
"""
    try:
        for interpreter in ("", *map(str, links)):
            with a_host(interpreter=interpreter) as host:
                job = host.start(read)
                assert job.exit().status == 0, job.log
                assert "READ" not in job.log
                assert f"homes {[str(neighbour)] if interpreter else []} place True" in job.log
                assert (str(neighbour) if interpreter else "") in job.log.split()[-1]
        hidden = pytest.raises(StrataError, match=f"hides {venv}/bin/python, which the trainer needs")
        with a_host() as plain, hidden:
            plain.start("", interpreter=f"{venv}/bin/python")
    finally:
        shutil.rmtree(elsewhere)
    tries(12)


@pytest.mark.attack(AREA, "load code of the job into the program that makes its sandbox, as root")
def test_the_environment_of_a_trainer_does_not_reach_the_program_that_makes_the_sandbox(host: Host) -> None:
    loud = {"LD_DEBUG": "files", "LD_PRELOAD": "/nonexistent.so", "PYTHONSTARTUP": "/x", "LD_AUDIT": "/nonexistent.so"}
    show = "import os; print('env', os.environ['LD_PRELOAD'])"
    job = host.start(show, interpreter="/usr/bin/python3", env=loud)
    assert job.exit().status == 0
    assert "env /nonexistent.so" in job.log
    # The loader of every program that has the variables names that program: the job's own does.
    assert "needed by /usr/bin/python3" in job.log
    assert "bwrap" not in job.log


@pytest.mark.attack(AREA, "name a folder of the host that is hidden as the folder of a trainer")
def test_a_trainer_cannot_open_a_hidden_folder(host: Host, tries: Callable[[int], None]) -> None:
    hidden = (host.folder / "home", host.settings.state_folder, Path("/run"), Path(pwd.getpwuid(0).pw_dir))
    for folder in hidden:
        with pytest.raises(StrataError) as refused:
            host.sandbox.view.check_visible(folder, ())
        assert refused.value.code is Code.PRECONDITION
    # Also one that an owner opens stays without what must be hidden.
    with a_host(readable=(str(host.folder),)) as open_host:
        job = open_host.start(f"import os; print(os.listdir({str(open_host.settings.state_folder)!r}))")
        assert job.exit().status == 0
        assert "[]" in job.log
    tries(len(hidden) + 1)


@pytest.mark.attack(AREA, "read the agent's key as the agent's own user, in a user namespace")
def test_an_agent_without_root_hides_its_key_from_jobs_of_its_own_user(host: Host) -> None:
    """All belongs to one user who is not root, as on a host whose agent is none."""
    user = host.context.job_user
    assert user is not None
    paths = AttemptPaths(host.folder / "work" / "attempts" / "own")
    for folder in (paths.folder, paths.tmp):
        folder.mkdir(mode=0o700)
    for path in (paths.folder, paths.tmp, host.key, host.key.parent, host.settings.state_folder, host.folder / "home"):
        os.chown(path, user.uid, user.gid)
    sandbox = replace(host.sandbox, as_root=False, view=replace(host.sandbox.view, homes=(host.folder / "home",)))
    code = f"""
import os, pathlib
print("uid", os.getuid(), "processes", len([name for name in os.listdir("/proc") if name.isdigit()]))
pathlib.Path("{paths.folder}/x").write_text("x")
print(open("{host.key}").read())
"""
    for wrapper in ((), sandbox.wrapper(paths, gpus=False)):
        done = subprocess.run(
            [*wrapper, *(["--"] if wrapper else []), "/usr/bin/python3", "-c", code],
            env={},
            cwd="/",
            user=user.uid,
            group=user.gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "uid 65534" in done.stdout, done.stderr
        assert (KEY in done.stdout) == (not wrapper)
        assert ("processes 2" in done.stdout) == bool(wrapper)


# Which system calls a job gets

CALLS = """
import ctypes, os, platform, sys
from ctypes import c_char_p, c_long
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = c_long
NUMBERS = NUMBERS_OF_THE_CALLS[platform.machine()]

def call(name, *words):
    ctypes.set_errno(0)
    return libc.syscall(c_long(NUMBERS[name]), *[word if isinstance(word, bytes) else c_long(word) for word in words])

def tell(label, result):
    print(label, "done" if result >= 0 else os.strerror(ctypes.get_errno()), result, flush=True)
""".replace("NUMBERS_OF_THE_CALLS", repr(NUMBERS))
"""For jobs: `call` makes a system call by its name, `tell` says what came of it."""


@pytest.mark.attack(AREA, "leave something to another job in the keyring of their user")
def test_jobs_of_one_host_share_no_keyring(host: Host, tries: Callable[[int], None]) -> None:
    mark = f"strata-{secrets.token_hex(6)}"
    user_keyring, search = -4, 10
    leave = host.start(
        CALLS
        + f"""
tell("add", call("add_key", b"user", b"{mark}", b"from the first", 14, {user_keyring}))
tell("session", call("keyctl", 1, 0))
tell("request", call("request_key", b"user", b"{mark}", b"", {user_keyring}))
"""
    )
    assert leave.exit().status == 0, leave.log
    find = host.start(CALLS + f"""tell("found", call("keyctl", {search}, {user_keyring}, b"user", b"{mark}", 0))""")
    assert find.exit().status == 0, find.log
    for label, job in (("add", leave), ("session", leave), ("request", leave), ("found", find)):
        assert f"{label} Operation not permitted" in job.log
    tries(4)


@pytest.mark.attack(AREA, "get capabilities in a user namespace, by every way to make one")
def test_a_job_makes_no_user_namespace(host: Host, tries: Callable[[int], None]) -> None:
    job = host.start(
        CALLS
        + f"""
import struct, subprocess
new_user, chld = {CLONE_NEWUSER}, 17
tell("unshare", call("unshare", new_user))
tell("unshare with others", call("unshare", new_user | 0x20000))
made = call("clone", new_user | chld, 0, 0, 0, 0)
if made == 0:
    os._exit(0)
tell("clone", made)
words = ctypes.create_string_buffer(struct.pack("<11Q", new_user, 0, 0, 0, chld, 0, 0, 0, 0, 0, 0))
made = call("clone3", ctypes.addressof(words), 88)
if made == 0:
    os._exit(0)
tell("clone3", made)
tell("setns", call("setns", os.open("/proc/self/ns/user", os.O_RDONLY), 0))
print("program", subprocess.run(["unshare", "-Ur", "true"], stderr=subprocess.DEVNULL).returncode)
"""
    )
    assert job.exit().status == 0, job.log
    for label in ("unshare", "unshare with others", "clone", "setns"):
        assert f"{label} Operation not permitted" in job.log
    assert "clone3 Function not implemented" in job.log
    assert "program 1" in job.log
    tries(6)


@pytest.mark.attack(AREA, "look into processes, and use what the kernel gives to no job that trains")
def test_a_job_traces_nothing_and_gets_no_rare_part_of_the_kernel(host: Host, tries: Callable[[int], None]) -> None:
    job = host.start(
        CALLS
        + """
import socket
tell("ptrace", call("ptrace", 0, 0, 0, 0))
for name in ("process_vm_readv", "process_vm_writev"):
    tell(name, call(name, os.getpid(), 0, 0, 0, 0, 0))
tell("bpf", call("bpf", 0, 0, 0))
tell("perf_event_open", call("perf_event_open", 0, 0, -1, -1, 0))
tell("userfaultfd", call("userfaultfd", 1))
tell("syslog", call("syslog", 10, 0, 0))
tell("io_uring_setup", call("io_uring_setup", 1, 0))
try:
    socket.socket(40, socket.SOCK_STREAM)
    print("vsock done")
except OSError as error:
    print("vsock", error.strerror)
"""
    )
    assert job.exit().status == 0, job.log
    denied = ("ptrace", "process_vm_readv", "process_vm_writev", "bpf", "perf_event_open", "userfaultfd", "syslog")
    for label in (*denied, "vsock"):
        assert f"{label} Operation not permitted" in job.log
    assert "io_uring_setup Function not implemented" in job.log
    tries(9)


TRAINS = """
import os, pathlib, subprocess, sys, threading
import torch
from torch.utils.data import DataLoader

class Squares:
    def __len__(self):
        return 64
    def __getitem__(self, at):
        return torch.tensor([float(at * at)])

def multiply(results):
    results.append((torch.ones(256, 256) @ torch.ones(256, 256)).sum())

if __name__ == "__main__":
    for start, workers in (("fork", 2), ("spawn", 1)):
        loaded = DataLoader(Squares(), batch_size=8, num_workers=workers, multiprocessing_context=start)
        print(start, sum(float(batch.sum()) for batch in loaded), flush=True)
    torch.set_num_threads(2)
    results = []
    threads = [threading.Thread(target=multiply, args=(results,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("threads", len(results), flush=True)
    os.chdir(os.environ["TMPDIR"])
    for words in (["init", "-q", "."], ["commit", "-q", "--allow-empty", "-m", "one"], ["gc", "-q"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)
    uv = [pathlib.Path(sys.executable).with_name("uv"), "--quiet", "--offline"]
    subprocess.run([*uv, "venv", "--no-project", "--python", "/usr/bin/python3", "made"], check=True)
    subprocess.run([*uv, "pip", "list", "--python", "made"], check=True)
    print("all works")
"""


@pytest.mark.attack(AREA, "be kept from training by what keeps a job from the rest")
def test_torch_git_and_uv_work_in_the_sandbox() -> None:
    write = "import os, pathlib, sys; script = pathlib.Path(os.environ['TMPDIR'], 'train.py')"
    run = f"script.write_text({TRAINS!r}); os.execv(sys.executable, [sys.executable, str(script)])"
    with a_host() as site:
        job = site.start(f"{write}; {run}")
        job.supervisor.wait(110)
        assert job.exit().status == 0, job.log
        for line in ("fork 85344.0", "spawn 85344.0", "threads 4", "all works"):
            assert line in job.log


# What a job takes


@pytest.mark.attack(AREA, "allocate past the limit of memory")
def test_memory_ends_at_the_limit_and_the_kill_is_known(host: Host) -> None:
    job = host.start(f"block = bytearray({600 * MIB})\nfor at in range(0, len(block), 4096): block[at] = 1")
    seen = job.exit()
    assert (seen.status, seen.oom_kills) == (-signal.SIGKILL, 1)
    assert seen.max_rss_bytes < 300 * MIB
    outcome = classify_exit(seen, job.log, stop=None, timeout_s=0)
    assert (outcome.cause, outcome.facts["oom_kills"]) == (Cause.OOM, 1)


@pytest.mark.attack(AREA, "allocate past the limit of memory with many processes, without control groups")
def test_memory_is_watched_where_there_are_no_control_groups(host: Host) -> None:
    _without_groups(host)
    job = host.start(
        f"""
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                break
        block = bytearray({100 * MIB})
        for at in range(0, len(block), 4096):
            block[at] = 1
        time.sleep(300)
        """
    )
    seen = job.exit()
    assert (seen.status, seen.exceeded, seen.oom_kills) == (-signal.SIGKILL, "memory", 1), job.log
    assert classify_exit(seen, "", stop=None, timeout_s=0).cause is Cause.OOM


BOMB = """
import os, time
for _ in range(400):
    try:
        if os.fork() == 0:
            until_s = time.monotonic() + 20
            while time.monotonic() < until_s:
                pass
            os._exit(0)
    except OSError:
        time.sleep(0.01)
print("forked", flush=True)
time.sleep(60)
"""
"""At most 400 processes, and none for longer than 20 seconds."""
HOG = """
blocks = []
for _ in range(64):
    block = bytearray(64 << 20)
    for at in range(0, len(block), 4096):
        block[at] = 1
    blocks.append(block)
"""
"""At most 4 GiB."""
ONE = Needs(min_cores=1, min_ram_gib=1)
ONE_TAKEN = Taken(cores=1, ram_gib=1.0, slots=0)


@pytest.mark.attack(AREA, "take more cores, memory or processes than the job declared")
def test_a_job_gets_no_more_than_it_declared(tries: Callable[[int], None]) -> None:
    tries(2)
    with a_host(processes=60) as site:
        assert site.sandbox.limits == "enforced", site.sandbox.lacks
        hog = site.start(HOG, needs=ONE, taken=ONE_TAKEN)
        bomb = site.start(BOMB, needs=ONE, taken=ONE_TAKEN)
        groups = {group.parts[4]: group for group in map(Path, bomb.spec.limits.groups)}
        bomb.says("forked")
        before_s, began_s = _cpu_s(groups["unified"]), time.monotonic()
        processes = int((groups["pids"] / "pids.current").read_text())
        ended = hog.exit()
        eventually(lambda: time.monotonic() - began_s > 3)
        cores = (_cpu_s(groups["unified"]) - before_s) / (time.monotonic() - began_s)
        outcome = classify_exit(ended, "", stop=None, timeout_s=0, limits=hog.spec.limits)
    assert (ended.status, ended.oom_kills) == (-signal.SIGKILL, 1)
    # Pages of shared libraries are charged to whoever read them first.
    assert ended.max_rss_bytes <= (1 << 30) + 16 * MIB
    assert outcome.error == "out of memory: killed by SIGKILL; its limit is 1 GiB (min_ram_gib of the job)"
    assert outcome.facts["memory_limit_gib"] == 1.0
    assert processes <= 60
    assert cores < 1.05


@pytest.mark.attack(AREA, "take more cores, memory or processes than the job declared, without control groups")
@pytest.mark.parametrize(
    ("code", "exceeded", "error"),
    [
        (HOG + "import time; time.sleep(60)", "memory", "its limit is 1 GiB (min_ram_gib of the job)"),
        (BOMB, "processes", "its limit is 60 (sandbox.processes of the host)"),
        (BOMB.replace("400", "3"), "cpu", "its limit is 0.1 (min_cores of the job)"),
    ],
    ids=["memory", "processes", "cores"],
)
def test_without_control_groups_a_job_is_ended_when_it_takes_more_than_it_declared(
    code: str, exceeded: str, error: str
) -> None:
    with a_host(processes=60) as site:
        _without_groups(site)
        assert site.sandbox.limits == "watched"
        # The limit of the whole user would stop the bomb as well, and a busy machine might give it less than a core.
        weaker = {"limit_user": False, "cores": 0.1 if exceeded == "cpu" else 1}
        job = site.start(code, needs=ONE, taken=ONE_TAKEN, limits=weaker)
        seen = job.exit()
        outcome = classify_exit(seen, "", stop=None, timeout_s=0, limits=job.spec.limits)
    assert (seen.status, seen.exceeded) == (-signal.SIGKILL, exceeded)
    assert outcome.error.endswith(error)
    # It exceeds its limit at the earliest when it begins.
    assert seen.ran_s < 5 * SLOWER
    figure = {"memory": seen.exceeded_bytes > 1 << 30, "processes": seen.exceeded_count > 60}
    assert figure.get(exceeded, seen.exceeded_count > 0.12)


def _cpu_s(group: Path) -> float:
    """What all processes of the group have used; a group of version 2 counts it also without controllers."""
    return int((group / "cpu.stat").read_text().split()[1]) / 1e6


@pytest.mark.attack(AREA, "fork without end")
@pytest.mark.parametrize("groups", [True, False], ids=["control group", "user's limit"])
def test_processes_end_at_the_limit(host: Host, groups: bool) -> None:
    if not groups:
        _without_groups(host)
    job = host.start(
        """
        import os, time
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(300)
                made += 1
        except OSError as error:
            print("made", made, error.errno, flush=True)
        """
    )
    assert job.exit().status == 0
    made = int(job.log.split()[1])
    assert 10 < made <= 60


@pytest.mark.attack(AREA, "fill the disk of the host")
def test_a_job_that_fills_the_disk_is_ended_with_the_reason(host: Host) -> None:
    job = host.start(
        f"""
        import os, time
        for number in range(3):
            open(f"/tmp/{{number}}", "wb").write(os.urandom({100 * MIB}))
        time.sleep(300)
        """
    )
    seen = job.exit()
    assert (seen.exceeded, seen.status) == ("disk", -signal.SIGKILL)
    # The same limit alone is what a job in a container gets.
    alone = host.sandbox.limit_disk(job.spec, job.paths).limits
    assert (alone.disk_bytes, alone.disk_folders) == (job.spec.limits.disk_bytes, (str(job.paths.folder),))
    outcome = classify_exit(seen, job.log, stop=None, timeout_s=0)
    assert outcome.cause is Cause.USER_ERROR
    assert "took more disk than this host gives to a job" in outcome.error


def _without_groups(host: Host) -> None:
    """As on a host where the agent may not create control groups."""
    host.sandbox = replace(host.sandbox, parents=JobParents(), blocks_metadata=False)
    host.context = replace(host.context, sandbox=host.sandbox)


# When a job ends


FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(300)
        os._exit(0)
print("up", flush=True)
time.sleep(300)
"""


@pytest.mark.attack(AREA, "outlive the lease with processes that left the tree and ignore SIGTERM")
@pytest.mark.parametrize("lost", [False, True], ids=["stopped", "supervisor killed"])
def test_no_process_of_a_job_outlives_its_lease(host: Host, lost: bool) -> None:
    job = host.start(FAMILY)
    job.says("up")
    groups = [Path(group) for group in job.spec.limits.groups]
    pids = [int(pid) for pid in (groups[-1] / "cgroup.procs").read_text().split()]
    assert len(pids) >= 5
    if lost:
        job.supervisor.send_signal(signal.SIGKILL)
        job.supervisor.wait(30)
        supervised.kill_orphans(job.state)
    else:
        supervised.request_stop(job.state, 0.0)
        assert job.exit().stopped
    eventually(lambda: not any(is_alive(pid) for pid in pids))
    eventually(lambda: not any(group.exists() for group in groups))


PATIENT = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up as", os.getuid(), flush=True)
while not pathlib.Path(os.environ["TMPDIR"], "release").exists():
    time.sleep(0.02)
pathlib.Path(os.environ["STRATA_OUTPUT"], "model").write_text("weights")
"""


@pytest.mark.attack(AREA, "a job that a restarted agent finds is confined, goes on, and ends when it is cancelled")
def test_a_confined_job_survives_its_agent_and_not_its_cancellation(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path)
    folder = Path(tempfile.mkdtemp(prefix="strata-abuse-"))
    folder.chmod(0o711)
    trainer = TrainerSpec(name="patient", command=("python", "-c", PATIENT), directory=PLACE)
    try:
        with agent(hub, folder, "vera", sandbox_mode="required", slots="2", grace_s="0") as vera:
            jobs = [hub.submit_with(trainer, JobSpec(model="m", seed=seed, trainer="patient")) for seed in (1, 2)]
            for job in jobs:
                assert "up as 65534" in hub.says(job, "up as")
            host = hub.operator.call("GET", "/v1/workers", HostsReply).hosts[0]
            assert host.capability.sandbox == "namespaces"
            specs = [json.loads(path.read_text()) for path in (vera.state / "attempts").glob("*/supervisor.json")]
            groups = [Path(spec["limits"]["groups"][-1]) for spec in specs]
            pids = [int(pid) for group in groups for pid in (group / "cgroup.procs").read_text().split()]
            assert len(pids) >= 2
            vera.end(signal.SIGKILL)
            assert all(map(is_alive, pids))
            vera.start()
            eventually(lambda: vera.said().count("attempt_resumed") == 2)
            hub.cancel(jobs[0])
            eventually(lambda: sum(group.exists() for group in groups) == 1)
            for place in (vera.work / "attempts").iterdir():
                (place / "tmp" / "release").touch()
            done = hub.until(jobs[1], "completed", "failed")
            assert (done.job.status, len(done.attempts)) == ("completed", 1)
            assert hub.file(done.job.artifact, "model") == "weights"
            eventually(lambda: not any(is_alive(pid) for pid in pids))
            assert not any(group.exists() for group in groups)
    finally:
        hub.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.attack(AREA, "be killed at once although the job has time to save")
def test_a_job_in_a_sandbox_still_gets_its_grace(host: Host) -> None:
    job = host.start(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(3)))
        print("up", flush=True)
        time.sleep(300)
        """
    )
    job.says("up")
    supervised.request_stop(job.state, 20.0)
    seen = job.exit()
    assert (seen.status, seen.stopped) == (3, True)
    assert "saved" in job.log


@pytest.mark.attack(AREA, "a command that is not there, in the sandbox")
def test_a_command_that_is_not_there_is_a_fault_of_the_setup(host: Host) -> None:
    job = host.start("", interpreter="/usr/bin/no-such-python")
    seen = job.exit()
    assert (seen.started, seen.setup) == (False, True)
    assert "no-such-python" in seen.error


# The network


METADATA = ("169.254.169.254/16", "fd00:ec2::254/64", "169.254.42.42/16", "fd00:42::42/64")
LISTEN = """
import socket, time
for port in (7, 53):
    socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True).detach()
print("up", flush=True)
time.sleep(600)
"""


@contextmanager
def two_machines() -> Iterator[str]:
    """A namespace with 10.99.0.1, where a job runs, and behind it one with 10.99.0.2 and 10.99.0.3, which listen.

    The second one also has the addresses of metadata services, which are nothing else there.
    """
    mark = secrets.token_hex(3)
    near, far = f"strata-n-{mark}", f"strata-f-{mark}"
    server = None

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in (near, far):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"n{mark}", "netns", near, "type", "veth", "peer", "name", f"f{mark}", "netns", far)
        own = ("10.99.0.1/24", "169.254.1.1/16", "fd00:ec2::1/64", "fd00:42::1/64")
        others = ("10.99.0.2/24", "10.99.0.3/24", *METADATA)
        for name, device, addresses in ((near, f"n{mark}", own), (far, f"f{mark}", others)):
            for address in addresses:
                duplicates = ("nodad",) if ":" in address else ()
                ip("-n", name, "address", "add", address, "dev", device, *duplicates)
            ip("-n", name, "link", "set", device, "up")
        server = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{far}", sys.executable, "-c", LISTEN], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        yield near
    finally:
        if server is not None:
            server.kill()
            server.communicate()
        for name in (near, far):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


REACH = """
import socket
own = socket.create_server(("127.0.0.1", 0))
targets = {"allowed": ("10.99.0.2", 7), "forbidden": ("10.99.0.3", 7)}
targets |= {"own": own.getsockname(), "agent": ("127.0.0.1", PORT)}
targets |= {"metadata": ("169.254.169.254", 7), "metadata6": ("fd00:ec2::254", 7), "resolver": ("169.254.169.254", 53)}
targets |= {"mapped": ("::ffff:169.254.169.254", 7)}
targets |= {"scaleway": ("169.254.42.42", 7), "scaleway6": ("fd00:42::42", 7)}
for name, address in targets.items():
    try:
        socket.create_connection(address, 3).close()
        print(name, "reached", flush=True)
    except OSError as error:
        print(name, "refused", flush=True)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
    try:
        datagram.sendto(b"x", ("10.99.0.3", 9))
        print("datagram reached")
    except OSError:
        print("datagram refused")
"""
# Runs a job of this test in the network namespace it is started in, with a service of the host on its loopback. The
# kernel gives that port to nobody: a job in a namespace of its own could get the same one, and reach itself.
INSIDE = """
import json, socket, sys
from tests.abuse.test_sandbox import REACH, a_host
with socket.create_server(("127.0.0.1", 7)) as service, a_host(**json.loads(sys.argv[1])) as host:
    job = host.start(REACH.replace("PORT", str(service.getsockname()[1])))
    assert job.exit().status == 0, job.log
    print(job.log)
"""


@pytest.mark.attack(
    AREA, "reach a forbidden address, the metadata of a cloud, or a service of the host on its loopback"
)
@pytest.mark.parametrize(
    ("network", "reached"),
    [
        ({"network": "host"}, {"allowed", "forbidden", "own", "agent", "datagram", "resolver"}),
        (
            {"network": "host", "allow": ["169.254.169.254"]},
            {"allowed", "forbidden", "own", "agent", "datagram", "resolver", "metadata", "mapped"},
        ),
        ({"network": "allow", "allow": ["10.99.0.2"]}, {"allowed", "own"}),
        (
            {"network": "allow", "allow": ["0.0.0.0/0"]},
            {"allowed", "forbidden", "own", "agent", "datagram", "resolver"},
        ),
        ({"network": "none"}, {"own"}),
    ],
    ids=["host", "host, metadata allowed", "allow", "allow all", "none"],
)
def test_a_job_reaches_only_what_its_host_allows(network: dict[str, Any], reached: set[str]) -> None:
    with two_machines() as near:
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{near}", sys.executable, "-c", INSIDE, json.dumps(network)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        rules = subprocess.run(
            ["nsenter", f"--net=/run/netns/{near}", "nft", "list", "tables"], capture_output=True, text=True, check=True
        )
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines() if line)
    assert {name for name, result in found.items() if result == "reached"} == reached
    # No rule of a job is left behind.
    assert "strata" not in rules.stdout


# What the host says when it cannot


@pytest.mark.attack(AREA, "a root agent without a user for its jobs runs them as root")
def test_an_agent_of_root_runs_no_job_as_root_unless_its_owner_says_so(tmp_path: Path) -> None:
    found = job_user_of(AgentSettings(state=tmp_path / "state"))
    assert found is not None
    assert found.uid != 0
    assert job_user_of(AgentSettings(sandbox=SandboxSettings(mode="off"))) is None


@pytest.mark.attack(AREA, "a host that cannot confine jobs starts as if it could")
def test_what_the_settings_require_is_refused_where_the_host_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.fleet.agent.sandbox.PROGRAMS", str(tmp_path))
    agent = AgentSettings(state=tmp_path / "state", work=tmp_path / "work")
    for sandbox in (
        SandboxSettings(mode="required"),
        SandboxSettings(network="none"),
        SandboxSettings(network="allow", allow=("10.0.0.0/8",)),
    ):
        with pytest.raises(StrataError) as refused:
            detect_sandbox(msgspec.structs.replace(agent, sandbox=sandbox), {}, RAM_BYTES)
        assert refused.value.code is Code.PRECONDITION
    slip = SandboxSettings(readable=(str(tmp_path / "no-such-folder"),))
    with pytest.raises(StrataError, match="there is no"):
        detect_sandbox(msgspec.structs.replace(agent, sandbox=slip), {}, RAM_BYTES)
    weaker = detect_sandbox(agent, {}, RAM_BYTES)
    assert (weaker.level, weaker.bwrap) == ("user", "")
    assert "bubblewrap is not installed" in weaker.describe()
    assert [lack for lack in weaker.lacks if lack.startswith("jobs reach the metadata addresses of clouds")]
    monkeypatch.undo()
    create_work_folder(agent)
    able = detect_sandbox(agent, {}, RAM_BYTES)
    assert "without the metadata addresses of clouds" in able.describe()
    assert not any("metadata" in lack for lack in able.lacks)
