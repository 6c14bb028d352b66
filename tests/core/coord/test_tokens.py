"""The file of revoked tokens: what counts while it cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.coord.server.tokens import REVOKED_CHECK_S, RevokedTokens
from tests.support.manual_clock import ManualClock


def _not_text(file: Path) -> None:
    file.write_bytes(b"t1\n\xff\xfe\n")


def _no_file(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("spoil", [_not_text, _no_file])
async def test_a_file_that_cannot_be_read_lets_nobody_in_until_it_can(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    file, clock = tmp_path / "revoked", ManualClock()
    file.write_text("t1\n")
    revoked = RevokedTokens(file, clock)
    assert "t2" not in revoked
    spoil(file)
    await clock.advance(REVOKED_CHECK_S)
    for _ in range(3):
        with pytest.raises(StrataError, match="cannot read the revoked tokens") as failed:
            "t2" in revoked  # noqa: B015
        assert failed.value.code is Code.UNAVAILABLE
    if file.is_dir():
        file.rmdir()
    file.write_text("t1\nt2\n")
    assert "t2" in revoked


async def test_a_file_that_vanishes_revokes_what_it_did_and_is_looked_for_once_a_second(tmp_path: Path) -> None:
    file, clock = tmp_path / "revoked", ManualClock()
    file.write_text("t1\n")
    revoked = RevokedTokens(file, clock)
    file.unlink()
    await clock.advance(REVOKED_CHECK_S)
    assert "t1" in revoked
    file.write_text("t1\nt2\n")
    assert "t2" not in revoked
    await clock.advance(REVOKED_CHECK_S)
    assert "t2" in revoked
