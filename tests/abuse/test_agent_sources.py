"""What a source, a bundle or a result of ill will may try on a host, and does not achieve."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.agent.unpack import UnpackLimits, unpack
from strata.fleet.artifacts.files import materialise, scan
from strata.fleet.artifacts.manifest import ArtifactFile, ArtifactManifest
from strata.train.checkpoints.archive import read_members
from tests.support.archives import pax_archive

AREA = "agent: sources and results"
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


def unpacked(source: Path, limits: UnpackLimits | None = None) -> Path:
    folder = source.with_name("made")
    folder.mkdir()
    with source.open("rb") as file:
        unpack(file, folder, limits)
    return folder


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


@pytest.mark.attack(AREA, "bundles: a path, link, device or pipe that leads outside of the folder")
@pytest.mark.parametrize("how", ESCAPES)
def test_a_source_bundle_with_an_escape_is_refused(tmp_path: Path, how: str) -> None:
    source = archive(tmp_path, ("fine.py", b"pass"), *ESCAPES[how])
    with pytest.raises(StrataError, match="cannot be unpacked") as refused:
        unpacked(source)
    assert refused.value.code is Code.PRECONDITION
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "source.tar"]
    assert not Path("/tmp/strata-out").exists()


@pytest.mark.attack(AREA, "bundles: a program that would run with the privileges of root")
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
    made = unpacked(source)
    assert (made / "link.py").read_text() == "a"
    assert (made / "pkg" / "up" / "a.py").read_text() == "a"
    assert (made / "run.sh").stat().st_mode & 0o7777 == 0o755


@pytest.mark.attack(AREA, "bundles: an absolute path")
def test_the_root_of_a_path_is_taken_off(tmp_path: Path) -> None:
    made = unpacked(archive(tmp_path, ("/tmp/strata-out", b"x")))
    assert (made / "tmp" / "strata-out").exists()
    assert not Path("/tmp/strata-out").exists()


@pytest.mark.attack(AREA, "bundles: more bytes or files than a host takes")
def test_a_source_that_swells_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(StrataError, match="more than 1000 bytes"):
        unpacked(archive(tmp_path, ("a", b"x" * 600), ("b", b"x" * 600)), UnpackLimits(max_bytes=1000))
    with pytest.raises(StrataError, match="more than 2 files"):
        unpacked(archive(tmp_path / "a", *((str(n), b"") for n in range(3))), UnpackLimits(max_members=2))


@pytest.mark.attack(AREA, "artifacts: a name that leads outside of the folder")
@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "a\\..\\out", "C:out", "nul", "a/", "a//b", "."])
def test_an_artifact_with_a_name_that_leads_elsewhere_is_not_written(tmp_path: Path, path: str) -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    manifest = ArtifactManifest(files=(ArtifactFile(path=path, size=0, sha256=empty, chunks=()),))
    (tmp_path / "in").mkdir()
    with pytest.raises(StrataError) as refused:
        materialise(manifest, lambda *_: b"", tmp_path / "in" / "kept")
    assert refused.value.code is Code.INVALID
    assert [each.name for each in tmp_path.rglob("*")] == ["in"]


@pytest.mark.attack(AREA, "results: links to files and folders of the host, a pipe")
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


@pytest.mark.attack("training server: content", "import_weights: 51 KB tar with a pax header of digits")
def test_an_import_with_a_pax_header_of_digits_takes_no_time(tries: Callable[[int], None]) -> None:
    for records in (b"1" * 51_000, b"%d comment=%s\n" % (51_000, b"1" * 50_985)):
        began_s = time.process_time()
        with pytest.raises(StrataError) as refused:
            read_members(pax_archive(records), ["adapter_model.safetensors"])
        assert refused.value.code is Code.INVALID
        assert time.process_time() - began_s < 0.5
        tries(1)
