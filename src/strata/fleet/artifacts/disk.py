"""Chunks in files on disk: layout of the folders, verified and synced writes, quarantine, and the free space that is
kept (1 GiB).

    chunks/ab/ab12…    a chunk; the folders 00 to ff are made when the store is opened
    partial/…          what is being written, and what came of puts that broke off, under digest and owner
    quarantine/…       what was found to be something else than its name says

`put` syncs the file before it renames it, and the folder after. So after a power cut a name is absent or its content is
whole. Partial files are not synced: whoever goes on from one verifies all of it.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from strata.base.atomic import sync_folder
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.artifacts.manifest import ArtifactChunk

T = TypeVar("T")

KEEP_FREE_BYTES: Final = 1 << 30
_BLOCK: Final = 1 << 20
"""How much is hashed and written at once: a turn in a thread costs about as much as hashing a tenth of it."""
_THREADS: Final = 8


class DiskChunks:
    """Open with `await DiskChunks.open(folder)`."""

    signer = None

    def __init__(self, folder: Path, *, keep_free_bytes: int = KEEP_FREE_BYTES) -> None:
        self._folder = folder
        self._keep_free_bytes = keep_free_bytes
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="chunks")

    @classmethod
    async def open(cls, folder: Path, *, keep_free_bytes: int = KEEP_FREE_BYTES) -> DiskChunks:
        store = cls(folder, keep_free_bytes=keep_free_bytes)
        try:
            await store._in_thread(store._prepare)
        except OSError as error:
            await store.close()
            raise StrataError(Code.INVALID, f"artifacts cannot be kept in {folder}: {error.strerror}") from error
        return store

    async def put(self, chunk: ArtifactChunk, body: AsyncIterable[bytes], *, owner: str = "", offset: int = 0) -> None:
        incoming = await self._in_thread(partial(self._begin, chunk, owner, offset))
        try:
            await self._receive(incoming, body)
            await self._in_thread(partial(self._finish, incoming))
        except BaseException as error:
            # What merely broke off is of use to its owner. What is wrong in itself is not, nor what does not fit, nor
            # what the disk failed to keep: after a failed sync the next one may succeed without having written it.
            useless = isinstance(error, StrataError) and error.code in (Code.INVALID, Code.EXHAUSTED, Code.UNAVAILABLE)
            await self._in_thread(partial(incoming.put_aside, keep=not useless))
            raise
        finally:
            await self._in_thread(incoming.file.close)

    async def received(self, digests: Sequence[str], owner: str) -> Mapping[str, int]:
        def look() -> dict[str, int]:
            found = {}
            for digest in digests:
                with suppress(FileNotFoundError):
                    found[digest] = self._partial(digest, owner).stat().st_size
            return found

        return await self._in_thread(look)

    async def read(self, chunk: ArtifactChunk) -> bytes:
        def load() -> bytes:
            try:
                with self._chunk(chunk.digest).open("rb") as file:
                    found = file.read(chunk.size + 1)
            except FileNotFoundError as error:
                raise StrataError(Code.NOT_FOUND, f"there is no chunk {chunk.digest}") from error
            except OSError as error:
                raise corrupt(chunk, error.strerror or "unreadable") from error
            if len(found) != chunk.size or sha256_hex(found) != chunk.digest:
                raise corrupt(chunk, "its bytes are others")
            return found

        return await self._in_thread(load)

    async def has(self, digest: str) -> bool:
        return await self._in_thread(self._chunk(digest).exists)

    async def delete(self, digest: str) -> None:
        await self._in_thread(lambda: self._chunk(digest).unlink(missing_ok=True))

    async def quarantine(self, chunk: ArtifactChunk) -> bool:
        try:
            await self.read(chunk)
        except StrataError as error:
            if error.code is Code.CORRUPT:
                place = self._folder / "quarantine" / chunk.digest
                await self._in_thread(lambda: self._chunk(chunk.digest).replace(place))
            return True
        return False

    async def free_bytes(self) -> int | None:
        return await self._in_thread(self._free)

    async def tidy(self, before_s: float) -> int:
        def remove() -> int:
            removed = 0
            for entry in list(os.scandir(self._folder / "partial")):
                with suppress(FileNotFoundError):
                    if entry.stat().st_mtime < before_s:
                        Path(entry.path).unlink()
                        removed += 1
            return removed

        return await self._in_thread(remove)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)

    def _prepare(self) -> None:
        for name in ("chunks", "partial", "quarantine"):
            (self._folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        shards = {f"{number:02x}" for number in range(256)}
        for shard in shards - {entry.name for entry in os.scandir(self._folder / "chunks")}:
            (self._folder / "chunks" / shard).mkdir(exist_ok=True, mode=0o700)
        # A folder that could vanish in a power cut would take acknowledged chunks with it.
        for folder in (self._folder / "chunks", self._folder, self._folder.parent):
            sync_folder(folder)

    def _begin(self, chunk: ArtifactChunk, owner: str, offset: int) -> _Incoming:
        """A file that nobody else writes: a new one, or what is left of this owner's last put, hashed again."""
        if self._free() < chunk.size - offset:
            raise StrataError(
                Code.EXHAUSTED,
                f"the disk of the artifacts has less than {self._keep_free_bytes} bytes to spare",
                hint="free some space, or collect artifacts that nobody needs",
            )
        kept = self._partial(chunk.digest, owner)
        path = kept.with_name(f"{kept.name}.{secrets.token_hex(8)}")
        if not offset:
            with _translated():
                return _Incoming(chunk, path, kept, path.open("xb", buffering=0))
        there = 0
        with suppress(FileNotFoundError):
            kept.rename(path)
            there = path.stat().st_size
        if there != offset or offset > chunk.size:
            with suppress(FileNotFoundError):
                path.rename(kept)
            raise StrataError(
                Code.CONFLICT,
                f"{there} bytes of {chunk.digest} are here, not {offset}",
                hint=f"go on at {there}, or send it from the beginning",
                received=there,
            )
        incoming = _Incoming(chunk, path, kept, path.open("rb+", buffering=0), size=offset)
        while part := incoming.file.read(_BLOCK):
            incoming.hash.update(part)
        return incoming

    async def _receive(self, incoming: _Incoming, body: AsyncIterable[bytes]) -> None:
        parts: list[bytes] = []
        waiting = 0
        try:
            async for part in body:
                if incoming.size + waiting + len(part) > incoming.chunk.size:
                    raise _wrong(f"more than the {incoming.chunk.size} bytes of {incoming.chunk.digest} were sent")
                parts.append(part)
                waiting += len(part)
                if waiting >= _BLOCK:
                    taken, parts, waiting = parts, [], 0
                    await self._in_thread(partial(incoming.write, taken))
        finally:
            # Also what came before the line was cut: the sender goes on from there.
            if parts:
                await self._in_thread(partial(incoming.write, parts))

    def _finish(self, incoming: _Incoming) -> None:
        chunk, path = incoming.chunk, incoming.path
        if incoming.size < chunk.size:
            raise StrataError(
                Code.PRECONDITION,
                f"only {incoming.size} of the {chunk.size} bytes of {chunk.digest} were sent",
                hint="go on from there",
                received=incoming.size,
            )
        if incoming.hash.hexdigest() != chunk.digest:
            raise _wrong(f"the bytes sent as {chunk.digest} are {incoming.hash.hexdigest()}")
        place = self._chunk(chunk.digest)
        with _translated():
            failpoint("artifacts.disk.before_sync")
            os.fsync(incoming.file.fileno())
            failpoint("artifacts.disk.before_rename")
            path.replace(place)
            failpoint("artifacts.disk.before_folder_sync")
            sync_folder(place.parent)
            failpoint("artifacts.disk.after_put")

    def _free(self) -> int:
        found = os.statvfs(self._folder)
        return max(0, found.f_bavail * found.f_frsize - self._keep_free_bytes)

    def _chunk(self, digest: str) -> Path:
        return self._folder / "chunks" / digest[:2] / digest

    def _partial(self, digest: str, owner: str) -> Path:
        return self._folder / "partial" / f"{digest}.{sha256_hex(owner.encode())[:32]}"

    async def _in_thread(self, run: Callable[[], T]) -> T:
        """Runs in one of our threads. A caller that is cancelled waits for it: nobody closes a file that is written
        to."""
        done = asyncio.get_running_loop().run_in_executor(self._threads, run)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            while not done.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            raise


@dataclass(slots=True)
class _Incoming:
    chunk: ArtifactChunk
    path: Path
    """The path has a name of its own while it is written."""
    kept: Path
    """Its name between one put and the next."""
    file: IO[bytes]
    size: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def write(self, parts: Sequence[bytes]) -> None:
        with _translated():
            for part in parts:
                view = memoryview(part)
                while view:
                    failpoint("artifacts.disk.before_write")
                    written = self.file.write(view)
                    self.hash.update(view[:written])
                    self.size += written
                    view = view[written:]

    def put_aside(self, *, keep: bool) -> None:
        with suppress(FileNotFoundError):
            if keep and self.size:
                self.path.replace(self.kept)
            else:
                self.path.unlink()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StrataError(
                Code.EXHAUSTED, "no space left on the disk of the artifacts", hint="free some space"
            ) from error
        raise StrataError(
            Code.UNAVAILABLE, f"the disk of the artifacts fails: {error.strerror}", hint="look at the hub's disk"
        ) from error


def _wrong(message: str) -> StrataError:
    return StrataError(Code.INVALID, message, hint="read the file again and send it from the beginning")


def corrupt(chunk: ArtifactChunk, reason: str) -> StrataError:
    return StrataError(
        Code.CORRUPT, f"the chunk {chunk.digest} is damaged: {reason}", hint="upload it again", chunk=chunk.digest
    )
