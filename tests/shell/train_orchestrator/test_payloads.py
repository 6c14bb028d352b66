"""Payloads in files: durable before they are told, the same bytes once, and never something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base import failpoint
from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.payload import Payloads


@given(data=st.binary(max_size=300), limit=st.integers(0, 300))
def test_what_is_kept_is_what_is_read(data: bytes, limit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    payloads = Payloads(tmp_path_factory.getbasetemp() / "payloads")
    kept = payloads.keep(data, inline_bytes=limit)
    assert isinstance(kept, ops.InlinePayload) == (len(data) <= limit)
    assert payloads.read(kept) == data


def test_the_same_bytes_are_one_file_of_the_owner_alone(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path / "p")
    assert payloads.store(b"x" * 99) == payloads.store(b"x" * 99)
    (file,) = [path for path in (tmp_path / "p").rglob("*") if path.is_file()]
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


def test_a_file_that_holds_something_else_is_corrupt_and_one_that_is_gone_is_not_found(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path)
    stored = payloads.store(b"x" * 99)
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    file.write_bytes(b"y" * 99)
    with pytest.raises(StrataError) as refused:
        payloads.read(stored)
    assert refused.value.code is Code.CORRUPT
    payloads.remove(stored)
    with pytest.raises(StrataError) as refused:
        payloads.read(stored)
    assert refused.value.code is Code.NOT_FOUND


@pytest.mark.parametrize("name", ["../../etc/passwd", "A" * 64, "", "0" * 63])
def test_a_digest_is_a_digest_and_never_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(StrataError) as refused:
        Payloads(tmp_path).read(ops.StoredPayload(name, 1))
    assert refused.value.code is Code.INVALID


def test_a_death_before_the_name_leaves_no_payload_and_the_next_try_makes_one(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path)
    failpoint.arm("train.payload.before_rename", failpoint.fail)
    with pytest.raises(StrataError):
        payloads.store(b"x" * 99)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert payloads.read(payloads.store(b"x" * 99)) == b"x" * 99


def test_file_and_folder_are_synced_before_the_digest_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    stored = Payloads(tmp_path / "payloads").store(b"x" * 99)
    folder = tmp_path / "payloads" / stored.sha256[:2]
    assert Path(synced[0]).parent == folder
    assert synced[1:] == [str(folder), str(folder.parent), str(tmp_path)]


def test_what_was_brought_again_while_it_was_removed_outlives_the_death_of_its_remover(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path)
    stored = payloads.store(b"x" * 99)
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    os.utime(file, (1.0, 1.0))

    def brought_again(name: str) -> None:
        # Between the look at its age and its new name.
        os.utime(file.with_name(f".{file.name}.gone"), (9.0, 9.0))
        failpoint.fail(name)

    failpoint.arm("train.payload.aside", brought_again)
    with pytest.raises(StrataError):
        payloads.remove_unreferenced(set(), 5.0)
    assert not file.exists(), "the failpoint was not reached"
    assert payloads.remove_unreferenced(set(), 5.0) == (0, 1)
    assert payloads.read(stored) == b"x" * 99
    assert payloads.remove_unreferenced(set(), 10.0) == (1, 0)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_is_needed_outlives_the_death_of_its_remover_however_old_it_is(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path)
    stored = payloads.store(b"x" * 99)
    failpoint.arm("train.payload.aside", failpoint.fail)
    with pytest.raises(StrataError):
        payloads.remove_unreferenced(set(), float("inf"))
    assert payloads.remove_unreferenced({stored.sha256}, float("inf")) == (0, 0)
    assert payloads.read(stored) == b"x" * 99
