"""Folders become manifests and manifests folders, on a real file system, and nothing gets out of the folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.files import materialise, pieces, read_piece, scan
from strata.fleet.artifacts.manifest import CHUNK_BYTES, ArtifactManifest
from tests.conformance.artifacts.making import manifest_of, noise, parts_of

FILES = {"bin/run": b"#!/bin/sh\n", "empty": b"", "model.bin": noise(CHUNK_BYTES + 77), "other.bin": noise(CHUNK_BYTES)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for path, content in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    (folder / "bin/run").chmod(0o755)
    (folder / "nothing in it").mkdir()
    return folder


def refused(code: Code) -> pytest.RaisesExc[StrataError]:
    return pytest.RaisesExc(StrataError, check=lambda error: error.code is code)


def fetch(digest: str, size: int) -> bytes:
    content = parts_of(FILES)[digest]
    assert len(content) == size
    return content


def test_a_folder_and_back_is_the_same_folder(folder: Path, tmp_path: Path) -> None:
    manifest = scan(folder)
    assert manifest == manifest_of(FILES, **{"bin/run": "0755"})
    target = tmp_path / "target"
    materialise(manifest, fetch, target)
    assert scan(target) == manifest
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    assert {path.name for path in target.iterdir()} == {"bin", "empty", "model.bin", "other.bin"}


def test_the_plan_of_an_upload_reads_each_missing_chunk_once(folder: Path) -> None:
    (folder / "copy.bin").write_bytes(FILES["model.bin"])
    manifest = scan(folder)
    wanted = manifest.chunks()
    planned = list(pieces(manifest, wanted))
    assert sorted(piece.digest for piece in planned) == sorted(wanted)
    assert {piece.digest: read_piece(folder, piece) for piece in planned} == parts_of(FILES)
    assert list(pieces(manifest, {})) == []


def test_a_file_that_changed_since_it_was_scanned_is_noticed(folder: Path) -> None:
    manifest = scan(folder)
    (folder / "bin/run").write_bytes(b"#!/bin/rm\n")
    (piece,) = [piece for piece in pieces(manifest, manifest.chunks()) if piece.path == "bin/run"]
    with refused(Code.CONFLICT):
        read_piece(folder, piece)


def test_links_and_pipes_are_refused_or_left_out_and_never_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    manifest = scan(folder)
    (folder / "link").symlink_to(secret)
    (folder / "folder link").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    with refused(Code.INVALID):
        scan(folder)
    assert scan(folder, links="skip") == manifest
    (folder / "bin/run").unlink()
    (folder / "bin/run").symlink_to(secret)
    (piece,) = [piece for piece in pieces(manifest, manifest.chunks()) if piece.path == "bin/run"]
    with refused(Code.CONFLICT):
        read_piece(folder, piece)


def test_a_link_swapped_in_after_the_scan_is_not_followed_whatever_it_leads_to(folder: Path, tmp_path: Path) -> None:
    manifest = scan(folder)
    (run,) = [piece for piece in pieces(manifest, manifest.chunks()) if piece.path == "bin/run"]
    (folder / "bin").rename(tmp_path / "elsewhere")
    (folder / "bin").symlink_to(tmp_path / "elsewhere")
    with refused(Code.CONFLICT):
        read_piece(folder, run)
    (folder / "bin").unlink()
    (folder / "bin").mkdir()
    (folder / "bin/run").symlink_to(tmp_path / "elsewhere/run")
    with refused(Code.CONFLICT):
        read_piece(folder, run)
    (folder / "bin/run").unlink()
    os.mkfifo(folder / "bin/run")
    with refused(Code.CONFLICT):
        read_piece(folder, run)


def test_an_empty_folder_is_no_artifact(tmp_path: Path) -> None:
    with refused(Code.INVALID):
        scan(tmp_path)


@pytest.mark.parametrize("path", ["../evil", "/tmp/evil", "a/../../evil", "C:\\evil", "con"])
def test_a_manifest_that_points_outside_writes_nothing(path: str, tmp_path: Path) -> None:
    (file,) = manifest_of({"a": b"x"}).files
    evil = ArtifactManifest(files=(msgspec.structs.replace(file, path=path),))
    with refused(Code.INVALID):
        materialise(evil, lambda digest, size: b"x", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_leave_no_folder(tmp_path: Path) -> None:
    manifest = manifest_of(FILES)
    for lie in (lambda digest, size: b"", lambda digest, size: bytes(size)):
        with refused(Code.CORRUPT):
            materialise(manifest, lie, tmp_path / "target")
    files = [
        msgspec.structs.replace(file, sha256="0" * 64) if file.path == "model.bin" else file for file in manifest.files
    ]
    with refused(Code.CORRUPT):
        materialise(ArtifactManifest(files=tuple(files)), fetch, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_download_leaves_no_folder(tmp_path: Path) -> None:
    left = iter([True, False])

    def cut_off(digest: str, size: int) -> bytes:
        if next(left):
            return fetch(digest, size)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        materialise(manifest_of(FILES), cut_off, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_already_is_never_written_over(tmp_path: Path) -> None:
    manifest = manifest_of({"a": b"x"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("full", "link"):
        with refused(Code.CONFLICT):
            materialise(manifest, lambda digest, size: b"x", tmp_path / name)
    assert (tmp_path / "full/a").read_bytes() == b"mine"
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_grows_while_it_is_read_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def grown(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        with (folder / "bin/run").open("ab") as file:
            file.write(b"more")
        return found

    monkeypatch.setattr(os, "fstat", grown)
    with refused(Code.CONFLICT):
        scan(folder)


def test_the_agents_side_loads_no_database_no_web_and_no_object_store() -> None:
    code = (
        "import sys, strata.fleet.artifacts.files;"
        "print([m for m in ('obstore','psycopg','backports.zstd','starlette','sqlite3','asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_mode_of_a_file_is_only_whether_it_can_run(folder: Path) -> None:
    (folder / "empty").chmod(0o600)
    (folder / "bin/run").chmod(0o4711)
    modes = {file.path: file.mode for file in scan(folder).files}
    assert (modes["empty"], modes["bin/run"]) == ("0644", "0755")
