"""What a job, or whoever submits one, may try on the host that runs it: with a real second user and real races."""

from __future__ import annotations

import asyncio
import hashlib
import lzma
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.agent import privsep, supervised
from strata.fleet.agent.attempt_folder import AttemptPaths, create_attempt_folder, remove_folder
from strata.fleet.agent.attempt_report import AttemptReporter
from strata.fleet.agent.git import LOCAL
from strata.fleet.agent.log_uploader import StreamUploader
from strata.fleet.agent.path_names import attempt_name
from strata.fleet.agent.prepare import HostContext, prepare_attempt
from strata.fleet.agent.privsep import run_with_input, stream_output
from strata.fleet.agent.privsep_worker import CheckoutCommit
from strata.fleet.agent.redaction import Redactor
from strata.fleet.agent.retry import ThreadPools
from strata.fleet.agent.state import AgentState, AttemptRecord, SavedRecord
from strata.fleet.agent.trainer_source import unpack_request
from strata.fleet.artifacts.files import Tree, scan
from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.client.artifact_transfer import send_missing_chunks
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import Cause
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.artifacts import ArtifactReply, CommitReply, CommitRequest
from strata.fleet.wire.identities import LocalHostReply, LocalHostRequest
from strata.fleet.wire.leases import LeaseGiven
from tests.abuse.second_user import (
    EXCHANGE,
    HOST_KEY,
    a_bundle,
    a_host,
    as_user,
    host_key,
    is_untouched,
    owner,
    said_by_user,
    send_bundle,
)
from tests.core.fleet_agent.leases import a_trainer, lease
from tests.shell.fleet_agent.running import PLANTED, HubProcess, agent
from tests.shell.fleet_agent.test_supervised import Trial
from tests.shell.fleet_agent.waiting import eventually, is_alive
from tests.support.archives import header, pax_archive

AREA = "agent"
ARTIFACT = "artifact1_" + "a" * 64
COMMIT = "1" * 40
RACE_S = 2.0
# Reads an archive as the process of the job's user does, and prints the most memory it took, in KiB.
PEAK = """
import contextlib, pathlib, sys
from strata.base.errors import StrataError
from strata.base.tar import TarReader, decompress_stream
with contextlib.suppress(StrataError):
    list(TarReader(decompress_stream(sys.stdin.buffer)))
print(pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
HONEST = "print(1)"
# Writes over what git checks out below this folder, from when it is there until it is killed.
REWRITE = """
import glob, sys
print("up", flush=True)
while True:
    for path in glob.glob(sys.argv[1] + "/source-*/tree/train.py"):
        try:
            open(path, "r+").write("evil")
            open(path, "r+").truncate(4)
        except OSError:
            pass
"""
# Stops the process of this user that prepares for an agent, as soon as there is one, and prints its number.
STOP = """
import os, signal, sys, time
for _ in range(6000):
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
        try:
            parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
            if parent == sys.argv[1] and "privsep_worker" in open(f"/proc/{pid}/cmdline").read():
                os.kill(int(pid), signal.SIGSTOP)
                print(pid, flush=True)
                sys.exit()
        except OSError:
            pass
    time.sleep(0.01)
"""
OTHER_UID = 65_533
"""A second user without a name, who is not the job's."""
# One grandchild in the child's group, one that left it, one whose parent has gone; their numbers are printed.
FAMILY = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"]
same = subprocess.Popen(sleeper)
apart = subprocess.Popen(sleeper, start_new_session=True)
middle = subprocess.Popen(
    [sys.executable, "-c", "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True,"
     " stdout=subprocess.DEVNULL).pid)", *sleeper],
    stdout=subprocess.PIPE,
)
orphan = int(middle.communicate()[0])
print("pids", same.pid, apart.pid, orphan, flush=True)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    made = HubProcess(tmp_path_factory.mktemp("hub"))
    yield made
    made.close()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    made = Trial(tmp_path)
    yield made
    made.close()


@pytest.fixture
def host() -> Iterator[HostContext]:
    with a_host() as site:
        yield site


@pytest.fixture
def host_with_hub(hub: HubProcess) -> Iterator[HostContext]:
    with a_host(hub.operator) as site:
        yield site


def a_place(site: HostContext, given: LeaseGiven) -> AttemptPaths:
    return AttemptPaths(site.attempts / attempt_name(given.job_id, given.epoch))


def prepared(site: HostContext, trainer: TrainerSpec) -> AttemptPaths:
    given = lease(trainer)
    place = a_place(site, given)
    prepare_attempt(site, given, place, None)
    return place


def holds(folder: Path, text: str) -> bool:
    return any(text.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


# What the agent gives to a job, and what ends with it


class Stream:
    """The hub's side of the metrics of an attempt."""

    def __init__(self) -> None:
        self.content = b""

    def append(self, _lease: object, _stream: str, offset: int, piece: bytes, *, last: bool) -> int:
        del last
        assert offset == len(self.content)
        self.content += piece
        return len(self.content)


SPELLINGS = {
    "Python": rb"S3CR3T/token<1>&\"x\"",
    "ujson, PHP": rb"S3CR3T\/token<1>&\"x\"",
    "Go": rb"S3CR3T/token\u003c1\u003e\u0026\"x\"",
    "Jackson, upper case": rb"S3CR3T/token\u003C1\u003E\u0026\u0022x\u0022",
    "all of it": "".join(f"\\u{ord(each):04x}" for each in 'S3CR3T/token<1>&"x"').encode(),
}


@pytest.mark.attack(AREA, "L3: a secret in metrics, as the JSON library of another language spells it")
@pytest.mark.parametrize("library", SPELLINGS)
def test_a_secret_in_metrics_is_masked_however_it_is_spelled(
    tmp_path: Path, library: str, tries: Callable[[int], None]
) -> None:
    secret = 'S3CR3T/token<1>&"x"'
    assert msgspec.json.decode(b'"%s"' % SPELLINGS[library]) == secret
    for line in (b'{"step": 1, "%s": 2, "m": ["\\\\%s"]}\n', b'{"step": 1, "%s "%s" no JSON\n'):
        tries(1)
        whole, stream = line.replace(b"%s", SPELLINGS[library]), Stream()
        path = tmp_path / "metrics"
        uploader = StreamUploader(stream, lease(a_trainer()), "metrics", path, Redactor([secret]))  # type: ignore[arg-type]
        for end in (*range(0, len(whole), 5), len(whole)):
            path.write_bytes(whole[:end])
            uploader.upload_new(last=end == len(whole))
        assert stream.content == whole.replace(SPELLINGS[library], b"*" * len(SPELLINGS[library]))


@pytest.mark.attack(AREA, "secrets of the agent's environment in the job's, in logs and in arguments")
def test_no_secret_of_the_agent_is_in_its_log_its_arguments_or_what_a_job_is_given(
    hub: HubProcess, tmp_path: Path
) -> None:
    with agent(hub, tmp_path, "ruth", log_level="debug") as ruth:
        release = tmp_path / "release"
        job = hub.submit("ruth", "held", release=str(release))
        hub.says(job, "held")
        secret = ruth.secret.rpartition("-")[2]
        pids = [ruth.pid, *(pid for each in ruth.children().values() for pid in (each["supervisor"], each["child"]))]
        for pid in pids:
            assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
        for pid in pids[1:]:
            given = Path(f"/proc/{pid}/environ").read_text()
            assert secret not in given
            assert PLANTED not in given
        written = [path for path in ruth.state.rglob("*") if path.is_file() and path.parent.name != "identity"]
        assert written
        assert not [path for path in written if secret.encode() in path.read_bytes()]
        assert not [path for path in ruth.work.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        release.touch()
        hub.until(job, "completed")
        assert secret not in ruth.said()
        assert secret not in hub.log(job)


@pytest.mark.attack(AREA, "the trainer overrides STRATA_*; LD_PRELOAD and PYTHONPATH towards the supervisor")
def test_variables_of_a_trainer_reach_the_job_and_not_the_process_that_watches_it(
    trial: Trial, tmp_path: Path, tries: Callable[[int], None]
) -> None:
    hostile = {"LD_PRELOAD": "/tmp/evil.so", "PYTHONPATH": "/tmp", "STRATA_JOB": "another", "STRATA_OUTPUT": "/etc"}
    with a_host() as site:
        given = lease(a_trainer(directory="/", env=hostile))
        run = prepare_attempt(site, given, a_place(site, given), None).spec
        assert run.env["STRATA_JOB"] == given.job_id
        assert run.env["STRATA_OUTPUT"].startswith(str(site.attempts))
    trial.start("import time; print('up', flush=True); time.sleep(300)", env=hostile | {"PATH": "/usr/bin:/bin"})
    trial.says("up")
    pids = supervised.read_pids(trial.folder)
    assert pids is not None
    assert Path(f"/proc/{pids.supervisor}/environ").read_bytes() == b""
    tries(len(hostile))


@pytest.mark.attack(AREA, "commands: a line for a shell, an option, a folder, 800 KB of arguments")
@pytest.mark.parametrize("command", [["touch x; touch y"], ["--help"], ["/tmp"], ["true", "x" * 800_000]])
def test_a_command_is_a_program_and_its_arguments_and_never_a_line_for_a_shell(
    trial: Trial, command: list[str]
) -> None:
    trial.start("", command=command)
    seen = trial.exit()
    assert not seen.started
    assert "cannot start" in seen.error
    assert not list(trial.cwd.iterdir())


@pytest.mark.attack(AREA, "processes that leave their group and ignore SIGTERM")
@pytest.mark.parametrize("how", ["it ends", "it is stopped"])
def test_all_that_a_child_started_ends_with_it_wherever_it_went(trial: Trial, how: str) -> None:
    trial.start(FAMILY + ("" if how == "it ends" else "time.sleep(300)"))
    said = trial.says("pids").partition("pids")[2].split()
    pids = [int(word) for word in said[:3]]
    if how == "it is stopped":
        assert all(map(is_alive, pids))
        supervised.request_stop(trial.folder, 0.1)
    trial.exit()
    eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.attack(AREA, "a variable whose name has an equals sign, or a NUL in its value")
@pytest.mark.parametrize("env", [{"A=B": "x"}, {"A": "x\0y"}, {"": "x"}])
def test_a_variable_that_no_process_can_have_is_refused_and_the_supervisor_lives(
    trial: Trial, hub: HubProcess, env: dict[str, str]
) -> None:
    trial.start("pass", env=env)
    seen = trial.exit()
    assert not seen.started or "" in env
    if "A" not in env:
        trainer = TrainerSpec(name="odd", command=("true",), directory="/", env=env)
        with pytest.raises(StrataError) as refused:
            hub.submit_with(trainer, JobSpec(model="odd", trainer="odd"))
        assert refused.value.code is Code.INVALID


# Sources


TRAVERSALS = [
    f"{ARTIFACT}/../../../state/identity",
    f"{ARTIFACT}/../../../../state/identity",
    f"{ARTIFACT}/..",
    f"{ARTIFACT}\n",
    "artifact1_../../state/identity",
    "artifact1_",
    "../../state/identity",
    "/etc",
    "sha256:" + "a" * 64 + "/../../state",
    "a" * 64 + "/../../../state/identity",
]


@pytest.mark.proves(
    "Never again: a `bundle` that is a path gave a job the host's key: root copied any folder into the attempt"
)
@pytest.mark.attack(AREA, "C1: a bundle that is a path into the host, with run_as")
@pytest.mark.parametrize("bundle", TRAVERSALS)
def test_a_bundle_that_is_a_path_is_refused_by_the_host(host: HostContext, bundle: str) -> None:
    # The first part is there, as after a job of that source: without it the path leads nowhere.
    for name in (ARTIFACT, "a" * 64, "sha256:" + "a" * 64):
        (host.cache / name).mkdir(parents=True)
    given = lease(a_trainer(bundle=bundle))
    with pytest.raises(StrataError, match="is not an uploaded source"):
        prepare_attempt(host, given, a_place(host, given), None)
    assert not holds(host.attempts, HOST_KEY)
    assert is_untouched(host)


@pytest.mark.proves(
    "Never again: a `bundle` that is a path gave a job the host's key: root copied any folder into the attempt"
)
@pytest.mark.attack(AREA, "C1: a bundle, a commit or an id that is a path, sent to the hub")
def test_a_trainer_with_a_path_for_a_digest_is_refused_by_the_hub(
    hub: HubProcess, tries: Callable[[int], None]
) -> None:
    hostile = [{"bundle": bundle} for bundle in TRAVERSALS]
    hostile += [{"git": "https://example.org/r", "commit": commit} for commit in ("HEAD", "../x", COMMIT + "/..", "-x")]
    for fields in hostile:
        trainer = msgspec.convert({"name": "path", "command": ["true"], **fields}, TrainerSpec)
        with pytest.raises(StrataError) as refused:
            hub.submit_with(trainer, JobSpec(model="path", trainer="path"))
        assert refused.value.code is Code.INVALID, fields
    tries(len(hostile))


@pytest.mark.attack(AREA, "an id or an epoch of a lease that is a path")
def test_a_lease_with_a_path_for_an_id_names_no_folder(host: HostContext, tries: Callable[[int], None]) -> None:
    good = lease(a_trainer(directory="/"))
    hostile = ["job1_" + "a" * 64 + "/../..", "../../state", "job1_", "job1_" + "a" * 63, "job1_" + "A" * 64, "x\0y"]
    for job_id in hostile:
        with pytest.raises(StrataError, match="is not an attempt"):
            AttemptRecord(lease=msgspec.structs.replace(good, job_id=job_id), claimed_at_s=0.0).key  # noqa: B018
        encoded = msgspec.json.encode(msgspec.structs.replace(good, job_id=job_id))
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(encoded, type=LeaseGiven)
    with pytest.raises(StrataError):
        attempt_name(good.job_id, -1)
    tries(len(hostile) + 1)


@pytest.mark.attack(AREA, "git: programs, options, descriptors and protocols that are not https or ssh")
@pytest.mark.parametrize("run_as", [True, False])
def test_git_fetches_over_https_and_ssh_alone(run_as: bool, tries: Callable[[int], None]) -> None:
    hostile = [
        "ext::sh -c touch% {mark}", "--upload-pack=touch {mark}", "ssh://-oProxyCommand=touch%20{mark}/x",
        "-oProxyCommand=touch:x", "ftp://127.0.0.1:9/x", "http://127.0.0.1:9/x", "git://127.0.0.1:9/x",
        "https://127.0.0.1:9/x\n--upload-pack=touch", "fd::0", "transport::address", "./relative", "user@-host:x",
    ]  # fmt: skip
    with a_host() as site:
        host = site if run_as else HostContext(site.settings, site.hub, site.environ, None)
        mark = site.settings.work_folder / "touched"
        began_s = time.monotonic()
        for url in hostile:
            given = lease(a_trainer(git=url.format(mark=mark), commit=COMMIT))
            with pytest.raises(StrataError) as refused:
                prepare_attempt(host, given, a_place(host, given), None)
            assert refused.value.code is Code.PRECONDITION
        assert time.monotonic() - began_s < 60.0
        assert not list(site.settings.work_folder.rglob("touched"))
    tries(len(hostile))


@pytest.mark.proves("Never again: `fd::17` as a git address held a slot for 600 s")
@pytest.mark.attack(AREA, "L4: git fd::17 holds a slot for ten minutes")
def test_a_git_address_that_is_a_descriptor_is_refused_at_once(tmp_path: Path) -> None:
    with a_host() as site:
        for host in (site, HostContext(site.settings, site.hub, site.environ, None)):
            given = lease(a_trainer(git="fd::17", commit=COMMIT))
            began_s = time.monotonic()
            with pytest.raises(StrataError, match="not an address of a git repository"):
                prepare_attempt(host, given, a_place(host, given), None)
            assert time.monotonic() - began_s < 10.0


@pytest.mark.proves("Never again: git ran as root for a job")
@pytest.mark.attack(AREA, "M14: git by path, a repository in a folder of root's, with run_as")
@pytest.mark.parametrize("form", ["{path}", "file://{path}", "localhost:{path}"])
def test_a_repository_that_only_root_can_read_is_not_fetched_for_a_job(host: HostContext, form: str) -> None:
    repository = host.settings.state_folder / "repository"
    repository.mkdir(mode=0o700)
    (repository / "secret.txt").write_text(HOST_KEY)
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *args], cwd=repository, check=True, env={"PATH": "/usr/bin:/bin"})
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, check=True, text=True)
    given = lease(a_trainer(git=form.format(path=repository), commit=head.stdout.strip()))
    with pytest.raises(StrataError):
        prepare_attempt(host, given, a_place(host, given), None)
    assert not holds(host.attempts, HOST_KEY)
    assert not holds(host.cache, HOST_KEY)


@pytest.mark.attack(AREA, "what git writes for a job is the job's user's, and none of it is left behind")
def test_git_runs_as_the_jobs_user_with_nothing_of_roots(host: HostContext) -> None:
    """Over the protocol of files, which `run_as` does not allow: what is looked at is who does the work."""
    repository = host.settings.work_folder / "repository"
    repository.mkdir()
    (repository / "train.py").write_text("print(1)")
    (repository / "link").symlink_to("/etc/hostname")
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *args], cwd=repository, check=True, env={"PATH": "/usr/bin:/bin"})
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, check=True, text=True)
    given = lease(a_trainer(bundle="a" * 64))
    place = a_place(host, given)
    create_attempt_folder(place, given, a_trainer(bundle="a" * 64), host.job_user)
    # git refuses a repository of another user.
    subprocess.run(["chown", "-R", "nobody", str(repository)], check=True)
    environ = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    request = CheckoutCommit(
        url=str(repository), commit=head.stdout.strip(), scratch=str(place.tmp), protocols=LOCAL, environ=environ
    )
    packed = b"".join(stream_output(request, host.job_user, 1 << 20))
    run_with_input(unpack_request(place.source, any_link=True), host.job_user, [packed])
    assert (place.source / "train.py").read_text() == "print(1)"
    assert (place.source / "link").is_symlink()
    assert {path.lstat().st_uid for path in place.source.rglob("*")} == {owner(host).uid}
    assert list(place.tmp.iterdir()) == []


def a_remote(site: HostContext) -> tuple[HostContext, str, str]:
    """A host whose jobs' user has a home, an address there that `ssh` reaches, and a commit of many files."""
    folder = site.settings.work_folder
    home, programs, repository = folder / "home", folder / "programs", folder / "repository"
    for made in (home, programs, repository):
        made.mkdir()
    # What is at the other end of ssh, without the network between.
    (programs / "ssh").write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
    (programs / "ssh").chmod(0o755)
    for number in range(2000):
        (repository / f"a{number}.py").write_text("pass")
    (repository / "train.py").write_text(HONEST)
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *args], cwd=repository, check=True, env={"PATH": "/usr/bin:/bin"})
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, check=True, text=True)
    subprocess.run(["chown", "-R", "nobody", str(repository), str(home)], check=True)
    environ = {"PATH": f"{programs}:/usr/bin:/bin"}
    host = HostContext(site.settings, site.hub, environ, replace(owner(site), home=str(home)))
    return host, f"localhost:{repository}", head.stdout.strip()


@pytest.mark.proves(
    "Never again: with `run_as`, a job could rewrite another one's git checkout, which root kept for all projects"
)
@pytest.mark.attack(AREA, "rewrite what git checked out for another job, before it is packed and kept for all")
def test_a_checkout_that_another_job_rewrote_is_not_given_to_later_attempts(host: HostContext) -> None:
    site, url, commit = a_remote(host)
    first, later = (lease(a_trainer(git=url, commit=commit), epoch=epoch) for epoch in (1, 2))
    with as_user(REWRITE, a_place(site, first).tmp) as racer:
        assert racer.stdout is not None
        racer.stdout.readline()
        prepare_attempt(site, first, a_place(site, first), None)
    # Jobs of one user are not protected from each other while both are there; what comes later is.
    assert (a_place(site, first).source / "train.py").read_text() == "evil"
    prepare_attempt(site, later, a_place(site, later), None)
    assert (a_place(site, later).source / "train.py").read_text() == HONEST
    assert not site.cache.exists() or list(site.cache.iterdir()) == []


@pytest.mark.proves(
    "Never again: with `run_as`, a job could rewrite another one's git checkout, which root kept for all projects"
)
@pytest.mark.attack(AREA, "leave a filter for git in the home of the jobs' user")
@pytest.mark.parametrize("attributes", ["named in .gitconfig", ".config/git/attributes"])
def test_a_filter_in_the_home_of_the_jobs_user_changes_no_source(host: HostContext, attributes: str) -> None:
    site, url, commit = a_remote(host)
    home = Path(owner(site).home)
    places = {"named in .gitconfig": home / "attributes", ".config/git/attributes": home / ".config/git/attributes"}
    places[attributes].parent.mkdir(parents=True, exist_ok=True)
    places[attributes].write_text("train.py filter=evil\n")
    named = f"[core]\nattributesFile = {places[attributes]}\n" if attributes == "named in .gitconfig" else ""
    # The rest of the configuration counts: it is where credentials and addresses are.
    moved = f'[url "{url}"]\ninsteadOf = localhost:moved\n'
    (home / ".gitconfig").write_text(f'{named}{moved}[filter "evil"]\nsmudge = echo evil\n')
    place = prepared(site, a_trainer(git="localhost:moved", commit=commit))
    assert (place.source / "train.py").read_text() == HONEST


@pytest.mark.attack(AREA, "a folder of root's as the source, with run_as")
def test_a_folder_that_the_jobs_user_cannot_reach_is_not_there_for_it(host: HostContext) -> None:
    given = lease(a_trainer(directory=str(host_key(host).parent)))
    with pytest.raises(StrataError, match="is not on this host"):
        prepare_attempt(host, given, a_place(host, given), None)


@pytest.mark.attack(AREA, "what root makes of a source: every file of an attempt is the job's user's from the start")
def test_a_source_is_unpacked_by_the_jobs_user_and_kept_by_root_as_it_came(host_with_hub: HostContext) -> None:
    site = host_with_hub
    digest = send_bundle(site.hub.client, a_bundle("pkg/", "pkg/a.py", "run.sh"))
    place = prepared(site, a_trainer(bundle=digest))
    found = list(place.source.rglob("*"))
    assert len(found) == 3
    assert {path.lstat().st_uid for path in found} == {owner(site).uid}
    assert [(path.name, path.stat().st_uid) for path in site.cache.iterdir()] == [(f"{digest}.tar", 0)]
    assert site.cache.stat().st_mode & 0o077 == 0


@pytest.mark.attack(AREA, "M15: a 62 KB bundle with a pax header of digits")
def test_a_pax_header_of_digits_stops_nobody(host_with_hub: HostContext, tries: Callable[[int], None]) -> None:
    for records in (b"1" * 62_000, b"%d comment=%s\n" % (62_000, b"1" * 61_985)):
        bundle = send_bundle(host_with_hub.hub.client, pax_archive(records))
        given = lease(a_trainer(bundle=bundle))
        own_s, children_s = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        with suppress(StrataError):
            prepare_attempt(host_with_hub, given, a_place(host_with_hub, given), None)
        assert time.process_time() - own_s < 1.0, "the agent itself reads nothing of a bundle"
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - children_s < 3.0
        tries(1)


@pytest.mark.proves("Never again: a tar header of 62 KB stopped the agent for 13 s, one of 2 GiB took as much memory")
@pytest.mark.attack(AREA, "M15: a 312 KB xz bundle with a pax header of 2 GiB")
def test_a_pax_header_of_two_gib_is_refused_before_it_is_read(host_with_hub: HostContext) -> None:
    compressor = lzma.LZMACompressor()
    content = compressor.compress(header("pax", 2 << 30, kind=b"x"))
    # Of the same shape as 2 GiB of zeros, which take too long to compress here: the header alone has to be enough.
    content += compressor.compress(bytes(64 << 20)) + compressor.flush()
    given = lease(a_trainer(bundle=send_bundle(host_with_hub.hub.client, content)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StrataError, match="at most 65536 are allowed"):
        prepare_attempt(host_with_hub, given, a_place(host_with_hub, given), None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    watched = subprocess.run(
        [sys.executable, "-c", PEAK], input=content, capture_output=True, check=True, timeout=60
    ).stdout
    assert int(watched) < 100 << 10, "KiB at the peak"


@pytest.mark.attack(AREA, "a bundle whose compression asks for a window of gigabytes")
def test_an_unpacking_that_asks_for_too_much_memory_ends_and_nothing_else(host_with_hub: HostContext) -> None:
    content = bytearray(lzma.compress(a_bundle("a"), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 16}]))
    # The size of the window is one byte of the block's header: 40 asks for 4 GiB. Its checksum is made right again.
    at = content.index(bytes([lzma.FILTER_LZMA2, 1]), 12)
    content[at + 2] = 40
    size = (content[12] + 1) * 4
    content[12 + size - 4 : 12 + size] = zlib.crc32(bytes(content[12 : 12 + size - 4])).to_bytes(4, "little")
    given = lease(a_trainer(bundle=send_bundle(host_with_hub.hub.client, bytes(content))))
    with pytest.raises(StrataError, match="memory"):
        prepare_attempt(host_with_hub, given, a_place(host_with_hub, given), None)


# Races of the job's user with root


@pytest.mark.proves(
    "Never again: root changed the owner of its own files through links that a job swapped in (won at the "
    "first of 20 tries)"
)
@pytest.mark.attack(AREA, "H2: swap folders for links while the agent hands an attempt over")
def test_no_file_of_root_changes_hands_while_an_attempt_is_prepared(
    host_with_hub: HostContext, tries: Callable[[int], None]
) -> None:
    site = host_with_hub
    digest = send_bundle(site.hub.client, a_bundle(*(f"d{number:03}/identity/host.key" for number in range(300))))
    given = lease(a_trainer(bundle=digest))
    place = a_place(site, given)
    baits = site.settings.work_folder / "baits"
    baits.mkdir()
    os.chown(baits, owner(site).uid, owner(site).gid)
    # What is below a folder of the source has the names of what is below the state.
    pairs = [(place.source / f"d{number:03}", baits / str(number)) for number in range(300)]
    for _, bait in pairs:
        bait.symlink_to(site.settings.state_folder)
    with as_user(EXCHANGE, *(path for pair in pairs for path in pair)) as racer:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"up\n"
        for _ in range(3):
            # A source that was swapped away may fail to be unpacked; root's files are what counts.
            with suppress(StrataError):
                prepare_attempt(site, given, place, None)
            assert is_untouched(site)
    tries(3)


@pytest.mark.proves(
    "Never again: a job could stop the process that prepared another attempt, which then held its slot for ever"
)
@pytest.mark.attack(AREA, "stop the process that prepares another attempt, which then holds its slot for ever")
@pytest.mark.parametrize("content", [a_bundle("a"), a_bundle("a", content=bytes(4 << 20))], ids=["read", "unread"])
def test_a_preparation_that_is_stopped_ends_as_the_hosts_failure(
    host: HostContext, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(privsep, "WAIT_S", 3.0)
    place = prepared(host, a_trainer(directory="/"))
    pids: list[int] = []

    def pieces() -> Iterator[bytes]:
        pids.append(int(said_by_user(STOP, os.getpid())))
        yield content

    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(run_with_input, unpack_request(place.tmp), host.job_user, pieces())
        try:
            # No errno: nothing that a source could have brought about.
            with pytest.raises(ChildProcessError, match=r"more than 3 s") as failed:
                preparing.result(30)
            assert failed.value.errno is None
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.attack(AREA, "stop the process that runs git for another attempt")
def test_a_checkout_that_is_stopped_ends_as_the_hosts_failure(
    host: HostContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(privsep, "WAIT_S", 3.0)
    site, url, commit = a_remote(host)
    given = lease(a_trainer(git=url, commit=commit))
    with as_user(STOP, os.getpid()), pytest.raises(ChildProcessError, match=r"more than 3 s"):
        prepare_attempt(site, given, a_place(site, given), None)


@pytest.mark.proves("Never again: root read the host's key as a checkpoint (within 2 s)")
@pytest.mark.attack(AREA, "H3: swap a checkpoint for a link while it is uploaded")
def test_no_file_of_root_is_sent_as_a_checkpoint(host_with_hub: HostContext, tries: Callable[[int], None]) -> None:
    site = host_with_hub
    given = lease(a_trainer(directory="/"))
    place = a_place(site, given)
    prepare_attempt(site, given, place, None)
    plant = (
        "import os, sys\ncheckpoints, identity = sys.argv[1:]\nos.mkdir(checkpoints + '/c')\n"
        "open(checkpoints + '/c/host.key', 'w').write('mine')\nos.symlink(identity, checkpoints + '/.link')\n"
    )
    assert said_by_user(plant, place.checkpoints, host_key(site).parent) == ""
    record = AttemptRecord(lease=given, claimed_at_s=0.0)
    saved = SavedRecord(record, AgentState(site.settings.state_folder))
    reporter = AttemptReporter(saved, place, site, ThreadPools(), asyncio.Event())
    count = 0
    with as_user(EXCHANGE, place.checkpoints / "c", place.checkpoints / ".link") as racer:
        assert racer.stdout is not None
        racer.stdout.readline()
        until_s = time.monotonic() + RACE_S
        while time.monotonic() < until_s:
            count += 1
            # The chunks are sent; the commit is refused, for the hub knows no such attempt.
            with suppress(StrataError):
                reporter._upload_folder(("checkpoints", "c"), ArtifactKind.CHECKPOINT)
    tries(count)
    digests = {hashlib.sha256(text.encode()).hexdigest(): len(text) for text in (HOST_KEY, "mine")}
    missing = [chunk.digest for chunk in site.hub.missing(digests)]
    assert missing == [hashlib.sha256(HOST_KEY.encode()).hexdigest()], "the key was sent, or nothing was ever read"


@pytest.mark.attack(AREA, "a hard link to a file of root's among the results")
def test_a_result_that_belongs_to_another_user_is_refused(host: HostContext) -> None:
    place = prepared(host, a_trainer(directory="/"))
    # As on a machine without fs.protected_hardlinks: root makes the link that the job could make there.
    os.link(host_key(host), place.output / "model.bin")
    with pytest.raises(StrataError, match="belongs to another user"):
        scan(Tree(place.folder, ("output",), uid=owner(host).uid), links="skip")


@pytest.mark.attack(AREA, "run_as: read the state, /proc of the agent and cached sources; move what the agent reads")
def test_the_jobs_user_reaches_nothing_of_the_agents(host_with_hub: HostContext, tries: Callable[[int], None]) -> None:
    site = host_with_hub
    place = prepared(site, a_trainer(bundle=send_bundle(site.hub.client, a_bundle("a"))))
    key, metrics = host_key(site), place.metrics
    attacks = [
        f"open({str(key)!r}).read()",
        f"os.listdir({str(site.settings.state_folder)!r})",
        f"os.listdir({str(site.cache)!r})",
        f"os.listdir({str(site.attempts)!r})",
        f"open('/proc/{os.getpid()}/environ').read()",
        f"os.listdir('/proc/{os.getpid()}/fd')",
        f"os.rename({str(metrics)!r}, {str(place.output / 'x')!r})",
        f"os.unlink({str(metrics)!r})",
        f"os.rename({str(place.output)!r}, {str(place.tmp / 'x')!r})",
        f"os.link({str(key)!r}, {str(place.output / 'y')!r})",
        f"open({str(place.folder / 'z')!r}, 'w')",
    ]
    for attack in attacks:
        said = said_by_user(f"import os\ntry:\n    {attack}\nexcept PermissionError:\n    print('refused')")
        assert said == "refused\n", (attack, said)
    tries(len(attacks))


@pytest.mark.attack(AREA, "another user than the job's reads or writes an attempt")
def test_a_third_user_reaches_nothing_of_an_attempt(host: HostContext, tries: Callable[[int], None]) -> None:
    place = prepared(host, a_trainer(directory="/"))
    attacks = [f"open({str(place.spec)!r}).read()", f"os.listdir({str(place.output)!r})",
               f"open({str(place.output / 'x')!r}, 'w')", f"open({str(place.metrics)!r}, 'a')"]  # fmt: skip
    for attack in attacks:
        code = f"import os\ntry:\n    {attack}\nexcept PermissionError:\n    print('refused')"
        assert said_by_user(code, uid=OTHER_UID) == "refused\n", attack
    tries(len(attacks))


@pytest.mark.attack(AREA, "a pipe or a link instead of the metrics, to make the agent wait for ever or read elsewhere")
@pytest.mark.parametrize("what", ["os.mkfifo(path)", "os.symlink('/etc/passwd', path)", "os.mkdir(path)"])
def test_metrics_that_are_not_a_file_are_the_jobs_failure(hub: HubProcess, tmp_path: Path, what: str) -> None:
    name = f"pia{len(what)}"
    with agent(hub, tmp_path, name):
        code = f"import os; path = os.environ['STRATA_METRICS']; os.unlink(path); {what}"
        trainer = TrainerSpec(name=name, command=("python", "-c", code), directory="/")
        spec = JobSpec(model=name, trainer=name, needs=Needs(allowed_hosts=(name,)))
        attempt = hub.until_tried(hub.submit_with(trainer, spec))
        assert attempt.cause is Cause.USER_ERROR
        assert "metrics.jsonl cannot be read" in attempt.error


@pytest.mark.attack(AREA, "folders in folders, deeper than a recursion, among the results and to be removed")
def test_folders_without_end_are_refused_as_a_result_and_removed(host: HostContext) -> None:
    place = prepared(host, a_trainer(directory="/"))
    dig = "import os, sys\nos.chdir(sys.argv[1])\nfor _ in range(1200):\n    os.mkdir('dd')\n    os.chdir('dd')\n"
    assert said_by_user(dig, place.output) == ""
    with pytest.raises(StrataError, match="folders deep"):
        scan(Tree(place.folder, ("output",), uid=owner(host).uid), links="skip")
    remove_folder(place.folder)
    assert not place.folder.exists()


@pytest.mark.attack(AREA, "a job without a sandbox reads the host's key", by_design=(
    "docs/operations-security.md",
    "**Where a host has no sandbox, jobs run as the agent's user and can read its credentials**: whoever may submit"
    " jobs can act as that host.",
))  # fmt: skip
def test_a_job_without_a_sandbox_is_its_host(hub: HubProcess, tmp_path: Path) -> None:
    with agent(hub, tmp_path, "opal") as opal:
        identity = opal.state / "identity"
        code = f"import os; print('read', sorted(os.listdir({str(identity)!r})))"
        trainer = TrainerSpec(name="reads", command=("python", "-c", code), directory="/")
        job = hub.submit_with(trainer, JobSpec(model="reads", trainer="reads"))
        hub.until(job, "completed")
        assert "read [" in hub.log(job)


@pytest.mark.attack(AREA, "M2: a host reads artifacts that none of its leases names")
def test_a_host_reads_only_what_its_leases_name(hub: HubProcess, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("of somebody else")
    manifest = scan(source)
    send_missing_chunks(HubApi(hub.operator), source, manifest, lambda: True)
    body = CommitRequest(manifest=manifest, lineage=Lineage(kind=ArtifactKind.SOURCE))
    artifact = hub.operator.call("POST", "/v1/artifacts", CommitReply, body=body).artifact_id
    made = hub.operator.call("POST", "/v1/hosts/local", LocalHostReply, body=LocalHostRequest(name="curious"))
    with HubClient(hub.address, bearer=Secret(made.secret)) as host, pytest.raises(StrataError) as refused:
        host.call("GET", f"/v1/artifact/{artifact}", ArtifactReply)
    assert refused.value.code in (Code.FORBIDDEN, Code.NOT_FOUND)
