"""A folder becomes the same bytes on every machine, and carries no caches, environments or credentials."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from strata.base.errors import StrataError
from strata.cli.fleet import bundle as bundling
from strata.cli.fleet.bundle import make_bundle, read_ignored


def files(folder: Path) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(make_bundle(folder).content)) as tar:
        return tar.getnames()


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_times_owners_and_the_order_of_creation_make_no_difference(tmp_path: Path) -> None:
    one = fill(tmp_path / "one", "a.py", "b/c.py", "d.py")
    other = fill(tmp_path / "other", "d.py", "b/c.py", "a.py")
    os.utime(other / "a.py", (1, 1))
    (other / "d.py").chmod(0o600)
    assert make_bundle(one) == make_bundle(other)
    (other / "d.py").chmod(0o700)
    assert make_bundle(one) != make_bundle(other)


def test_caches_environments_and_credentials_stay_here(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", ".git/config", "__pycache__/x.pyc", "old.pyc", ".env", "mine/pyvenv.cfg", "mine/bin/x")
    fill(tmp_path, "hub/operator.token", "hub/hub.db", "agent/identity/hub.json", "conf/contexts.json", "conf/tokens/t")
    assert files(tmp_path) == ["train.py"]


def test_an_ignore_file_names_files_globs_folders_and_paths(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "data/x.csv", "deep/data/y.csv", "notes.txt", "deep/keep.txt", "out/a", "deep/out/b")
    (tmp_path / ".strataignore").write_text("# comment\ndata/\n/notes.txt\n/out\n")
    (tmp_path / ".gitignore").write_text("train.py\n")
    assert files(tmp_path) == [".gitignore", ".strataignore", "deep/keep.txt", "deep/out/b", "train.py"]


def test_what_an_ignore_file_says_and_is_not_understood_is_reported(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\na/**/b\n")
    assert read_ignored(tmp_path)[1] == [".gitignore: !keep.log", ".gitignore: a/**/b"]


def test_a_link_out_of_the_folder_is_left_out_and_one_inside_is_kept(tmp_path: Path) -> None:
    inside = fill(tmp_path / "project", "real.py")
    fill(tmp_path, "secret.txt")
    (inside / "alias.py").symlink_to(inside / "real.py")
    (inside / "leak.txt").symlink_to(tmp_path / "secret.txt")
    assert files(inside) == ["alias.py", "real.py"]
    with tarfile.open(fileobj=io.BytesIO(make_bundle(inside).content)) as tar:
        assert tar.getmember("alias.py").linkname == "real.py"


def test_a_folder_of_data_is_refused_with_the_name_of_the_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "train.py")
    (tmp_path / "huge.bin").write_bytes(bytes(4096))
    monkeypatch.setattr(bundling, "MAX_BYTES", 4096)
    with pytest.raises(StrataError, match=r"name what is not code in .strataignore; the largest is huge.bin"):
        make_bundle(tmp_path)
