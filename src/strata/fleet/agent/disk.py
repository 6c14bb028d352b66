"""Small files that are whole or absent, also after a power cut; and folders that nobody else reads."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.files import sync_folder

T = TypeVar("T")


def write_whole(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace a file at once: a reader sees the old content or the new, and the new survives from here on."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: msgspec.Struct) -> None:
    write_whole(path, msgspec.json.encode(value))


def read_json(path: Path, kind: type[T]) -> T | None:
    """None if there is no such file; CORRUPT if it is something else."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise StrataError(Code.CORRUPT, f"{path} cannot be read: {error}") from error


def private_folder(path: Path) -> Path:
    """The folder, made if need be, that only its owner can enter; INVALID if it is somebody else's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix":
        status = path.stat()
        if status.st_uid != os.geteuid():
            raise StrataError(Code.INVALID, f"{path} belongs to another user", hint="choose another state folder")
        if status.st_mode & 0o077:
            path.chmod(0o700)
    return path
