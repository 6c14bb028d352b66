"""What a source, a result or a job of ill will may try on a host, and does not achieve."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.agent import unpack as unpacking
from strata.fleet.agent.unpack import unpack
from strata.fleet.artifacts.files import materialise, scan
from strata.fleet.artifacts.manifest import File, Manifest
from tests.shell.fleet_agent.running import PLANTED, HubProcess, agent

LINK, HARD, DEVICE, PIPE = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE


def archive(folder: Path, *members: tuple[str, bytes | dict[str, Any]]) -> Path:
    """Each with its content, or with what it is instead of a file."""
    path = folder / "source.tar"
    with tarfile.open(path, "w") as tar:
        for name, what in members:
            member = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what))
            else:
                for key, value in what.items():
                    setattr(member, key, value)
                tar.addfile(member)
    return path


def link(target: str, kind: bytes = LINK) -> dict[str, Any]:
    return {"type": kind, "linkname": target}


ESCAPES: dict[str, list[tuple[str, bytes | dict[str, Any]]]] = {
    "above": [("../out", b"x")],
    "above, from below": [("a/../../out", b"x")],
    "a folder above": [("../out", {"type": tarfile.DIRTYPE})],
    "a link to an absolute path": [("link", link("/etc"))],
    "a link above": [("a/link", link("../../out"))],
    "a link through a link": [("a/b/c", b"x"), ("deep", link("a/b")), ("link", link("deep/../../../out"))],
    "a link that was a folder": [("a", link("..")), ("a/out", b"x")],
    "a file through a link": [("a", link("/tmp")), ("a/strata-out", b"x")],
    "a hard link to a file of the host": [("hard", link("/etc/passwd", HARD))],
    "a hard link through a link": [("a", link("/etc")), ("hard", link("a/passwd", HARD))],
    "a hard link above": [("hard", link("../source.tar", HARD))],
    "a device": [("null", {"type": DEVICE, "devmajor": 1, "devminor": 3})],
    "a pipe": [("pipe", {"type": PIPE})],
    "a folder that is a file": [("a", b"x"), ("a/b", b"y")],
}


@pytest.mark.parametrize("how", ESCAPES)
def test_a_source_bundle_with_an_escape_is_refused_whole(tmp_path: Path, how: str) -> None:
    (tmp_path / "in").mkdir()
    source = archive(tmp_path, ("fine.py", b"pass"), *ESCAPES[how])
    with pytest.raises(StrataError, match="cannot be unpacked") as refused:
        unpack(source, tmp_path / "in" / "kept")
    assert refused.value.code is Code.PRECONDITION
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in", "source.tar"]
    assert not Path("/tmp/strata-out").exists()


def test_what_stays_inside_is_unpacked_with_its_links_and_without_its_privileges(tmp_path: Path) -> None:
    members: list[tuple[str, bytes | dict[str, Any]]] = [
        ("./pkg", {"type": tarfile.DIRTYPE}),
        ("./pkg/a.py", b"a"),
        ("link.py", link("pkg/a.py")),
        ("pkg/up", link("../pkg")),
    ]
    source = archive(tmp_path, *members)
    with tarfile.open(source, "a") as tar:
        root = tarfile.TarInfo("run.sh")
        root.mode, root.uid, root.size = 0o6777, 0, 1
        tar.addfile(root, io.BytesIO(b"x"))
    unpack(source, tmp_path / "kept")
    assert (tmp_path / "kept" / "link.py").read_text() == "a"
    assert (tmp_path / "kept" / "pkg" / "up" / "a.py").read_text() == "a"
    assert (tmp_path / "kept" / "run.sh").stat().st_mode & 0o7777 == 0o755 & ~_umask()


def _umask() -> int:
    known = os.umask(0)
    os.umask(known)
    return known


def test_the_root_of_a_path_is_taken_off(tmp_path: Path) -> None:
    unpack(archive(tmp_path, ("/tmp/strata-out", b"x")), tmp_path / "kept")
    assert (tmp_path / "kept" / "tmp" / "strata-out").exists()
    assert not Path("/tmp/strata-out").exists()


def test_a_source_that_swells_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MAX_UNPACKED", 1000)
    with pytest.raises(StrataError) as refused:
        unpack(archive(tmp_path, ("a", b"x" * 600), ("b", b"x" * 600)), tmp_path / "kept")
    assert refused.value.code is Code.EXHAUSTED
    monkeypatch.setattr(unpacking, "MAX_MEMBERS", 2)
    with pytest.raises(StrataError):
        unpack(archive(tmp_path, *((str(n), b"") for n in range(3))), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "a\\..\\out", "C:out", "nul", "a/", "a//b", "."])
def test_an_artifact_with_a_name_that_leads_elsewhere_is_not_written(tmp_path: Path, path: str) -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    manifest = Manifest(files=(File(path=path, size=0, sha256=empty, chunks=()),))
    (tmp_path / "in").mkdir()
    with pytest.raises(StrataError) as refused:
        materialise(manifest, lambda *_: b"", tmp_path / "in" / "kept")
    assert refused.value.code is Code.INVALID
    assert [each.name for each in tmp_path.rglob("*")] == ["in"]


def test_a_result_is_files_of_its_folder_and_nothing_that_a_link_points_to(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (tmp_path / "secret").write_text("of the agent")
    (output / "model").write_text("trained")
    (output / "stolen").symlink_to(tmp_path / "secret")
    (output / "folder").symlink_to(tmp_path)
    os.mkfifo(output / "pipe")
    assert [file.path for file in scan(output, links="skip").files] == ["model"]
    with pytest.raises(StrataError):
        scan(output)


def test_no_secret_of_the_agent_is_in_its_log_its_arguments_or_what_a_job_is_given(
    hub: HubProcess, tmp_path: Path
) -> None:
    with agent(hub, tmp_path, "ruth", log_level="debug") as ruth:
        release = tmp_path / "release"
        job = hub.submit("ruth", "held", release=str(release))
        hub.says(job, "held")
        secret = ruth.secret.rpartition("-")[2]
        pids = [ruth.pid, *(pid for each in ruth.children().values() for pid in (each["waiter"], each["child"]))]
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
