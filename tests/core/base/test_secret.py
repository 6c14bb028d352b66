from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret, read_secret


class Holder(msgspec.Struct, frozen=True):
    token: Secret


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret("hunter2")
    shown = [str(secret), repr(secret), f"{secret} {secret!r}", repr(Holder(secret))]
    assert not any("hunter2" in text for text in shown)
    assert all("***" in text for text in shown)
    assert secret.reveal() == "hunter2"


def test_an_encoder_that_does_not_know_secrets_refuses_them() -> None:
    with pytest.raises(TypeError):
        msgspec.json.encode(Holder(Secret("hunter2")))
    with pytest.raises(TypeError):
        json.dumps(Secret("hunter2"))


def test_secrets_compare_by_content_and_only_with_secrets() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("***") != "***"
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2
    assert Secret("\udcff") == Secret("\udcff")


def private(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "revealed"), [(b"s3cret\n", "s3cret"), (b"s3cret\r\n", "s3cret"), (b" a b \n\n", " a b \n")]
)
def test_a_secret_file_is_read_without_its_last_line_break(tmp_path: Path, content: bytes, revealed: str) -> None:
    assert read_secret(private(tmp_path / "token", content)).reveal() == revealed


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666])
def test_a_secret_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(StrataError, match="can be read by group or others") as caught:
        read_secret(private(tmp_path / "token", b"s3cret", mode))
    assert caught.value.code is Code.INVALID
    assert "chmod 600" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "is empty"), (b"\n", "is empty"), (b"\xff", "UTF-8"), (b"x" * 70_000, "longer than")]
)
def test_a_file_without_a_usable_secret_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(StrataError, match=reason):
        read_secret(private(tmp_path / "token", content))


@pytest.mark.skipif(os.name != "posix", reason="pipes with names are POSIX")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(StrataError, match="not a regular file"):
        read_secret(tmp_path / "pipe")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match=r"cannot read the secret file .*nowhere: No such file"):
        read_secret(tmp_path / "nowhere")


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(StrataError, match="empty"):
        Secret("")
