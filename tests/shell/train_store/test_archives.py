"""Archives that come in are read without being believed: nothing is made of them that was not sent."""

from __future__ import annotations

import io
import tarfile
from typing import Final

import pytest

from strata.base.errors import Code, StrataError
from strata.train.checkpoints.archive import read_members

LONG: Final = 1 << 22


def archive(**headers: str) -> bytes:
    member = tarfile.TarInfo("a")
    member.size, member.pax_headers = 4, {key.replace("_", "."): value for key, value in headers.items()}
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as opened:
        opened.addfile(member, io.BytesIO(b"1234"))
    return raw.getvalue()


def test_a_plain_file_is_read_as_it_was_sent() -> None:
    assert read_members(archive(), ["a"]) == {"a": b"1234"}


@pytest.mark.parametrize("ignored", [False, True])
def test_a_sparse_file_is_refused_before_its_holes_are_filled(ignored: bool) -> None:
    raw = archive(GNU_sparse_map="0,4", GNU_sparse_size=str(LONG))
    assert len(raw) < LONG
    with pytest.raises(StrataError, match="sparse") as refused:
        read_members(raw, [] if ignored else ["a"], ["a"])
    assert refused.value.code is Code.INVALID


def test_a_file_that_says_it_is_longer_than_the_archive_is_refused() -> None:
    with pytest.raises(StrataError) as refused:
        read_members(archive(size=str(LONG)), ["a"])
    assert refused.value.code is Code.INVALID
