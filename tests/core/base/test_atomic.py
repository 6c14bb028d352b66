"""Files and folders that are replaced at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.base.atomic import create_file, exchange_folders, new_folder, rename_file, write_file
from strata.base.errors import Code, StrataError


def test_a_file_is_replaced_with_its_mode_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_file(path, b"old")
    write_file(path, [b"ne", b"w"], mode=0o640)
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_writer_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_file(path, b"old", durable=False)

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise OSError("cut off")

    with pytest.raises(OSError, match="cut off"):
        write_file(path, pieces())
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


def test_of_two_writers_that_create_a_file_the_first_wins(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    assert create_file(path, b"first")
    assert not create_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["ca.pem"]


def test_a_new_folder_appears_whole_with_what_is_below_it(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with new_folder(path) as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_bytes(b"content")
        (folder / "link").symlink_to("nowhere")
        assert not path.exists()
    assert (path / "below" / "file").read_bytes() == b"content"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_new_folder_that_fails_vanishes(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_bytes(b"half")
            raise OSError("cut off")

    with pytest.raises(OSError, match="cut off"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_under_a_chosen_temporary_name_is_cleared(tmp_path: Path) -> None:
    temporary = tmp_path / ".out.part"
    temporary.mkdir()
    (temporary / "leftover").write_bytes(b"")
    with new_folder(tmp_path / "out", temporary=temporary) as folder:
        (folder / "file").write_bytes(b"")
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["file"]


def test_a_folder_that_exists_is_a_conflict_before_and_after_the_block(tmp_path: Path) -> None:
    path = tmp_path / "out"

    def fill() -> None:
        with new_folder(path) as folder:
            (folder / "mine").write_bytes(b"")
            path.mkdir()
            (path / "theirs").write_bytes(b"")

    with pytest.raises(StrataError) as raised:
        fill()
    assert raised.value.code is Code.CONFLICT
    assert [each.name for each in path.iterdir()] == ["theirs"]
    with pytest.raises(StrataError) as raised, new_folder(path):
        pass
    assert raised.value.code is Code.CONFLICT
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_file_of_another_library_gets_its_name_and_tells_its_size(tmp_path: Path) -> None:
    (tmp_path / "db.partial").write_bytes(b"12345")
    assert rename_file(tmp_path / "db.partial", tmp_path / "db") == 5
    assert (tmp_path / "db").read_bytes() == b"12345"


def test_two_folders_exchange_their_names(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(b"")
    exchange_folders(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "other").exists()
    assert (tmp_path / "other" / "one").exists()
