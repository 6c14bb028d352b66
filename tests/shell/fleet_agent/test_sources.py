"""Where code comes from: repositories with real git, bundles, and what none of them may do to the host."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import signal
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.privsep import run_with_input
from strata.fleet.agent.trainer_source import SourceFetcher, provide_source, unpack_request
from tests.core.fleet_agent.leases import a_trainer

ENVIRON = {"PATH": "/usr/bin:/bin", "GIT_CONFIG_GLOBAL": "/dev/null"}


def git(folder: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *args],
        check=True,
        capture_output=True,
        text=True,
        env=ENVIRON,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "train.py").write_text("print(1)")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def refuse(*_: Any) -> Any:
    raise AssertionError("nothing is to be fetched")


def fetched(trainer: Any, tmp_path: Path, name: str = "a", fetch_blob: Any = refuse) -> Path:
    place = AttemptPaths(tmp_path / name)
    for folder in (place.source, place.tmp):
        folder.mkdir(parents=True)
    return provide_source(trainer, place, tmp_path / "cache", SourceFetcher(refuse, fetch_blob), environ=ENVIRON)


def test_each_attempt_gets_its_own_copy_of_the_commit(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "train.py").write_text("print(2)")
    git(repository, "commit", "-q", "-a", "-m", "two")
    trainer = a_trainer(git=str(repository), commit=commit)
    first = fetched(trainer, tmp_path, "a")
    assert (first / "train.py").read_text() == "print(1)"
    assert (first / "run.sh").stat().st_mode & 0o100
    (first / "train.py").write_text("spoilt")
    # From the cache: the repository may be gone by now.
    repository.rename(tmp_path / "gone")
    assert (fetched(trainer, tmp_path, "b") / "train.py").read_text() == "print(1)"


def test_a_commit_that_only_a_branch_can_reach_is_found(repository: Path, tmp_path: Path) -> None:
    git(repository, "checkout", "-q", "-b", "side")
    (repository / "side.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "side")
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "later.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "later")
    git(repository, "checkout", "-q", "main")
    assert (fetched(a_trainer(git=str(repository), commit=commit), tmp_path) / "side.py").exists()


def test_hooks_of_a_template_do_not_run(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "template"
    (template / "hooks").mkdir(parents=True)
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        (template / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
        (template / "hooks" / hook).chmod(0o755)
    monkeypatch.setitem(ENVIRON, "GIT_TEMPLATE_DIR", str(template))
    fetched(a_trainer(git=str(repository), commit=git(repository, "rev-parse", "HEAD")), tmp_path)
    assert not (tmp_path / "hooked").exists()


@pytest.mark.parametrize("commit", ["0" * 40, "main", "--upload-pack=touch x", ""])
def test_what_is_no_commit_of_it_is_refused(repository: Path, tmp_path: Path, commit: str) -> None:
    with pytest.raises(StrataError, match="no commit"):
        fetched(a_trainer(git=str(repository), commit=commit), tmp_path)


@pytest.mark.parametrize("url", ["--upload-pack=touch hooked", "ext::sh -c touch% hooked"])
def test_an_address_cannot_be_an_option_or_a_program(tmp_path: Path, url: str) -> None:
    with pytest.raises(StrataError):
        fetched(a_trainer(git=url, commit="1" * 40), tmp_path)
    assert not list(tmp_path.rglob("hooked"))


def at_once(trainer: Any, tmp_path: Path, fetch_blob: Any = refuse, jobs: int = 4) -> list[Path]:
    """What each of several slots gets that start jobs of one new source at the same moment."""
    start = threading.Barrier(jobs)

    def one(number: int) -> Path:
        start.wait(30)
        return fetched(trainer, tmp_path, f"slot{number}", fetch_blob)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, range(jobs)))


@pytest.mark.proves("Never again: several slots that started one new source failed each other")
def test_several_slots_can_start_jobs_of_one_new_bundle_at_once(tmp_path: Path) -> None:
    content = a_tar(*((f"d{number}/train.py", b"print(3)" * 1000) for number in range(100)))
    trainer = a_trainer(bundle=hashlib.sha256(content).hexdigest())
    for folder in at_once(trainer, tmp_path, lambda _: content):
        assert len(list(folder.rglob("train.py"))) == 100
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{trainer.bundle}.tar"]


def test_several_slots_can_start_jobs_of_one_new_commit_at_once(repository: Path, tmp_path: Path) -> None:
    trainer = a_trainer(git=str(repository), commit=git(repository, "rev-parse", "HEAD"))
    for folder in at_once(trainer, tmp_path):
        assert (folder / "train.py").read_text() == "print(1)"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_source_whose_download_breaks_off_is_fetched_again(tmp_path: Path) -> None:
    content = a_tar(("train.py", b"print(3)"))
    trainer = a_trainer(bundle=hashlib.sha256(content).hexdigest())

    def breaks_off(_: str) -> bytes:
        raise StrataError(Code.UNAVAILABLE, "the hub went away")

    with pytest.raises(StrataError, match="went away"):
        fetched(trainer, tmp_path, "a", breaks_off)
    assert not list((tmp_path / "cache").iterdir())
    assert (fetched(trainer, tmp_path, "b", lambda _: content) / "train.py").exists()


def test_a_full_disk_is_the_hosts_failure_and_not_the_sources(tmp_path: Path) -> None:
    content = a_tar(("train.py", random.Random(0).randbytes(1 << 20)))
    trainer = a_trainer(bundle=hashlib.sha256(content).hexdigest())
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path / "small")], check=True)
    try:
        with pytest.raises(OSError, match="No space left") as failed:
            fetched(trainer, tmp_path, "small/a", lambda _: content)
        assert failed.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


def test_a_preparation_that_is_killed_is_the_hosts_failure(tmp_path: Path) -> None:
    def killed() -> Iterator[bytes]:
        (pid,) = (int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _prepares(path))
        os.kill(pid, signal.SIGKILL)
        while True:
            yield bytes(1 << 20)

    with pytest.raises(ChildProcessError, match="status -9"):
        run_with_input(unpack_request(tmp_path), None, killed())


def _prepares(path: Path) -> bool:
    try:
        mine = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
        return mine and b"privsep_worker" in path.read_bytes()
    except OSError:
        return False


def a_tar(*members: tuple[str, bytes | None]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc"
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return written.getvalue()


def test_a_bundle_is_unpacked_once_and_verified(tmp_path: Path) -> None:
    content = a_tar(("train.py", b"print(3)"))
    trainer = a_trainer(bundle="sha256:" + hashlib.sha256(content).hexdigest())
    folder = fetched(trainer, tmp_path, "a", fetch_blob=lambda _: content)
    assert (folder / "train.py").read_text() == "print(3)"
    assert (fetched(trainer, tmp_path, "b") / "train.py").exists()
    with pytest.raises(StrataError) as refused:
        fetched(a_trainer(bundle="0" * 64), tmp_path, "c", fetch_blob=lambda _: content)
    assert refused.value.code is Code.CORRUPT


@pytest.mark.parametrize("member", [("../out", b"x"), ("/tmp/out", b"x"), ("link", None)])
def test_a_bundle_cannot_leave_its_folder(tmp_path: Path, member: tuple[str, bytes | None]) -> None:
    content = a_tar(member)
    trainer = a_trainer(bundle=hashlib.sha256(content).hexdigest())
    if member[0] == "/tmp/out":
        # Python's filter strips the root of a path: it lands inside.
        assert (fetched(trainer, tmp_path, "a", fetch_blob=lambda _: content) / "tmp" / "out").exists()
        return
    with pytest.raises(StrataError, match="cannot be unpacked"):
        fetched(trainer, tmp_path, "a", fetch_blob=lambda _: content)
    assert not list(tmp_path.rglob("out"))


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    content = b"not a tar file"
    with pytest.raises(StrataError, match="cannot be unpacked"):
        fetched(a_trainer(bundle=hashlib.sha256(content).hexdigest()), tmp_path, fetch_blob=lambda _: content)
    with pytest.raises(StrataError, match="is not an uploaded source"):
        fetched(a_trainer(bundle="../../etc"), tmp_path, "b")
