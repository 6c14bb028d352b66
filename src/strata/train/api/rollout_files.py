"""Rollout sessions on disk: one file for each session in the folder of its tenant, to which turns are appended durably;
limits of a tenant and of a session, and expiry 24 h after the last turn.

All API servers of a machine share the folder, so any of them can take any turn. A record that is cut off at the end of
a file was never acknowledged: its writer died before it had replied.
"""

from __future__ import annotations

import fcntl
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from strata.base.atomic import create_file, sync_folder
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.train.core.rollout_session import PromptMode, Turn

FOLDER: Final = "rollout_sessions"
"""The folder in the data of a server that all its API servers share."""
FORMAT: Final = 1
MAX_SESSIONS: Final = 4096
"""Sessions of one tenant."""
MAX_TENANT_BYTES: Final = 2 << 30
MAX_TURNS: Final = 4096
MAX_SESSION_BYTES: Final = 16 << 20
TTL_S: Final = 86_400.0
"""How long a session is kept after its last turn."""
_ID: Final = re.compile(r"rollout_[0-9a-z]{1,64}")
_HEAD_BYTES: Final = 8
"""The length of a record, and its CRC-32."""


class SessionHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first record of a file."""

    format: int
    session_id: str
    prompts: PromptMode
    created_s: float


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    head: SessionHead
    turns: Sequence[Turn]
    size: int
    """Bytes of the file up to the end of its last whole record."""
    expires_s: float


class SessionFile(NamedTuple):
    session_id: str
    size: int
    expires_s: float


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_head: Final = msgspec.msgpack.Decoder(SessionHead).decode
_decode_turn: Final = msgspec.msgpack.Decoder(Turn).decode


@dataclass(frozen=True)
class RolloutFiles:
    """Blocking: a process with an event loop calls it in a thread."""

    folder: Path

    def open(self, tenant: str, head: SessionHead) -> StoredSession:
        """A new session; PRECONDITION if the tenant has too many, or too much in them."""
        files = self.list_files(tenant, head.created_s)
        if len(files) >= MAX_SESSIONS:
            raise _over_quota(f"there are {len(files)} rollout sessions, and {MAX_SESSIONS} is the most of a tenant")
        self.check_room(tenant, head.created_s)
        path = self._path(tenant, head.session_id)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not create_file(path, _frame(head)):
            raise StrataError(Code.CONFLICT, f"there is a rollout session {head.session_id} already")
        sync_folder(path.parent)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        return self.read(tenant, head.session_id, head.created_s)

    def read(self, tenant: str, session_id: str, now_s: float) -> StoredSession:
        """NOT_FOUND if the tenant has no such session, or has it no more; CORRUPT if the file holds something else."""
        try:
            with self._path(tenant, session_id).open("rb") as file:
                return _read_session(file.fileno(), session_id, now_s)
        except FileNotFoundError:
            raise missing(session_id) from None

    def append(self, tenant: str, session_id: str, turns: Sequence[Turn], now_s: float) -> None:
        """Add turns; they survive a power failure once this returns."""
        with self._locked(tenant, session_id) as descriptor:
            stored = _read_session(descriptor, session_id, now_s)
            added = b"".join(map(_frame, turns))
            check_session_room(stored, len(turns), len(added))
            # What is behind the last whole record was never acknowledged.
            os.ftruncate(descriptor, stored.size)
            try:
                _write_at(descriptor, added, stored.size)
                os.fsync(descriptor)
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(descriptor, stored.size)
                raise StrataError(Code.EXHAUSTED, f"the turn cannot be written: {error.strerror}") from error

    def remove(self, tenant: str, session_id: str) -> None:
        try:
            self._path(tenant, session_id).unlink()
        except FileNotFoundError:
            raise missing(session_id) from None

    def list_files(self, tenant: str, now_s: float) -> Sequence[SessionFile]:
        """The sessions of a tenant, the newest first. Removes those that have expired."""
        return sorted(_unexpired(self._of_tenant(tenant), now_s), reverse=True)

    def check_room(self, tenant: str, now_s: float) -> None:
        """PRECONDITION if the tenant's sessions are too large together."""
        size = sum(each.size for each in _unexpired(self._of_tenant(tenant), now_s))
        if size >= MAX_TENANT_BYTES:
            raise _over_quota(f"the rollout sessions have {size >> 20} MiB, and {MAX_TENANT_BYTES >> 20} is the most")

    def remove_expired(self, now_s: float) -> None:
        """Removes those of all tenants: who does not come back would leave theirs."""
        for folder in self.folder.glob("*"):
            for _ in _unexpired(folder, now_s):
                pass

    def _of_tenant(self, tenant: str) -> Path:
        return self.folder / sha256_hex(tenant.encode())[:32]

    def _path(self, tenant: str, session_id: str) -> Path:
        if not _ID.fullmatch(session_id):
            raise missing(session_id)
        return self._of_tenant(tenant) / session_id

    @contextmanager
    def _locked(self, tenant: str, session_id: str) -> Iterator[int]:
        """The file, which no other process appends to meanwhile."""
        try:
            descriptor = os.open(self._path(tenant, session_id), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise missing(session_id) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def missing(session_id: str) -> StrataError:
    return StrataError(
        Code.NOT_FOUND,
        f"there is no rollout session {session_id[:100]!r}: it was deleted, has expired, or was at another server",
        hint="open one with POST /v1/rollout_sessions",
        path="rollout_session",
    )


def check_session_room(stored: StoredSession, turns: int, size: int) -> None:
    """INVALID if so many more turns of so many bytes do not fit into the session."""
    if len(stored.turns) + turns > MAX_TURNS:
        raise _full(f"{len(stored.turns)} turns, and {MAX_TURNS} is the most")
    if stored.size + size > MAX_SESSION_BYTES:
        raise _full(f"{stored.size >> 10} KiB, and would have more than {MAX_SESSION_BYTES >> 20} MiB")


def _full(reason: str) -> StrataError:
    return StrataError(Code.INVALID, f"the rollout session has {reason}", hint="open another one")


def _over_quota(reason: str) -> StrataError:
    return StrataError(Code.PRECONDITION, reason, hint="delete those that were read")


def _unexpired(folder: Path, now_s: float) -> Iterator[SessionFile]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        # Another API server may remove it at the same time.
        with suppress(FileNotFoundError):
            status = entry.stat()
            if status.st_mtime + TTL_S <= now_s:
                Path(entry.path).unlink()
            elif _ID.fullmatch(entry.name):
                yield SessionFile(entry.name, status.st_size, status.st_mtime + TTL_S)


def _frame(record: SessionHead | Turn) -> bytes:
    content = _encode(record)
    return len(content).to_bytes(4) + zlib.crc32(content).to_bytes(4) + content


def _read_session(descriptor: int, session_id: str, now_s: float) -> StoredSession:
    status = os.fstat(descriptor)
    if status.st_mtime + TTL_S <= now_s:
        raise missing(session_id)
    content = os.pread(descriptor, status.st_size, 0)
    places = list(_records(content, session_id))
    records = [content[start:end] for start, end in places]
    try:
        head, turns = _decode_head(records[0]), [_decode_turn(each) for each in records[1:]]
    except (IndexError, msgspec.MsgspecError) as error:
        raise StrataError(Code.CORRUPT, f"the file of {session_id} cannot be read: {error}") from None
    if head.format != FORMAT:
        raise StrataError(Code.UNSUPPORTED, f"{session_id} was written by another version (format {head.format})")
    return StoredSession(head=head, turns=turns, size=places[-1][1], expires_s=status.st_mtime + TTL_S)


def _records(content: bytes, session_id: str) -> Iterator[tuple[int, int]]:
    """The places of the whole records. CORRUPT if one before the last is damaged."""
    place = 0
    while place + _HEAD_BYTES <= len(content):
        start = place + _HEAD_BYTES
        end = start + int.from_bytes(content[place : place + 4])
        if end > len(content):
            return
        if end == start or zlib.crc32(content[start:end]) != int.from_bytes(content[place + 4 : start]):
            if any(content[end:]):
                raise StrataError(Code.CORRUPT, f"the file of {session_id} is damaged at byte {place}")
            return
        yield start, end
        place = end


def _write_at(descriptor: int, content: bytes, place: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written
