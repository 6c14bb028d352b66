"""An archive from elsewhere: what it may hold, and that it changes nothing outside its folder."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.agent.unpack import UnpackLimits, unpack

FILE, LINK, HARD, DEVICE, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE
Member = tuple[str, bytes, str]
"""Name, kind, and the text of a file or the target of a link."""


def an_archive(folder: Path, *members: Member, mode: int = 0o644) -> Path:
    path = folder / "given.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind, text in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, mode
            if kind == FILE:
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
            else:
                member.linkname = text
                tar.addfile(member)
    return path


def unpacked(archive: Path, limits: UnpackLimits | None = None) -> Path:
    folder = archive.with_name("made")
    folder.mkdir()
    with archive.open("rb") as file:
        unpack(file, folder, limits)
    return folder


def test_files_folders_and_links_that_stay_inside_are_unpacked(tmp_path: Path) -> None:
    given = an_archive(
        tmp_path,
        ("./a/b.txt", FILE, "one"),
        ("a/link", LINK, "../c.txt"),
        ("c.txt", FILE, "two"),
        ("d.txt", HARD, "a/b.txt"),
        ("empty", FOLDER, ""),
        ("/rooted.txt", FILE, "three"),
    )
    unpacked(given)
    found = {str(path.relative_to(tmp_path / "made")) for path in (tmp_path / "made").rglob("*")}
    assert found == {"a", "a/b.txt", "a/link", "c.txt", "d.txt", "empty", "rooted.txt"}
    assert (tmp_path / "made" / "a" / "link").read_text() == "two"
    assert (tmp_path / "made" / "d.txt").read_text() == "one"


@pytest.mark.parametrize(("given", "kept"), [(0o4777, 0o755), (0o600, 0o644), (0o100, 0o755)])
def test_of_a_mode_only_that_it_can_be_executed_is_kept(tmp_path: Path, given: int, kept: int) -> None:
    unpacked(an_archive(tmp_path, ("run.sh", FILE, "x"), mode=given))
    assert stat.S_IMODE((tmp_path / "made" / "run.sh").stat().st_mode) == kept


def test_a_file_that_comes_twice_replaces_the_link_before_it(tmp_path: Path) -> None:
    given = an_archive(tmp_path, ("kept", FILE, "old"), ("x", LINK, "kept"), ("x", FILE, "new"))
    unpacked(given)
    assert (tmp_path / "made" / "kept").read_text() == "old"
    assert (tmp_path / "made" / "x").read_text() == "new"


@pytest.mark.parametrize(
    "members",
    [
        [("../out", FILE, "x")],
        [("a/../../out", FILE, "x")],
        [("link", LINK, "/etc")],
        [("link", LINK, "../..")],
        [("link", HARD, "../given.tar")],
        [("up", LINK, "here/.."), ("here", LINK, "."), ("up/out", FILE, "x")],
        [("null", DEVICE, "")],
    ],
)
def test_what_leads_outside_or_is_no_file_is_refused_and_changes_nothing_outside(
    tmp_path: Path, members: list[Member]
) -> None:
    given = an_archive(tmp_path, *members)
    with pytest.raises(StrataError, match="cannot be unpacked") as refused:
        unpacked(given)
    assert refused.value.code is Code.PRECONDITION
    assert sorted(tmp_path.iterdir()) == [given, tmp_path / "made"]


@pytest.mark.parametrize("spelt", ["../victim", "{absolute}"])
def test_no_link_is_made_or_removed_through_another_link(tmp_path: Path, spelt: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "key").write_text("mine")
    out = spelt.format(absolute=victim)
    given = an_archive(tmp_path, ("out", LINK, out), ("out/key", LINK, "x"), ("out/new/planted", LINK, "x"))
    with pytest.raises(StrataError, match="cannot be unpacked"):
        unpacked(given)
    assert not (victim / "key").is_symlink()
    assert (victim / "key").read_text() == "mine"
    assert list(victim.iterdir()) == [victim / "key"]
    assert sorted(tmp_path.iterdir()) == [given, tmp_path / "made", victim]


def test_what_hard_links_take_when_they_are_copied_counts_too(tmp_path: Path) -> None:
    links = [(f"b{number}", HARD, "a") for number in range(9)]
    given = an_archive(tmp_path, ("a", FILE, "x" * 20), *links)
    with pytest.raises(StrataError, match="more than 100 bytes") as refused:
        unpacked(given, UnpackLimits(max_bytes=100))
    assert refused.value.code is Code.PRECONDITION
