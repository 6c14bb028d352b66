"""Chunks in object storage that speaks S3: layout of the keys, signed uploads and downloads, verification of what hosts
sent, and quarantine.

    PREFIX/chunks/ab/ab12…           a chunk; only the hub writes here, and only bytes it has verified
    PREFIX/incoming/OWNER/ab12…      what hosts put through signed URLs
    PREFIX/checking/…                a copy of that, out of the host's reach, while it is verified
    PREFIX/quarantine/…              what was found to be something else than its name says

A signed URL cannot bind the content it will receive: obstore signs no headers, and a checksum header would make the
store's word the proof. So what came past the hub is read back once. It is copied by the store first, since its sender
could replace it between the check and the use; the verified copy becomes the chunk by another copy inside the store.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Final

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.artifacts.disk import corrupt
from strata.fleet.artifacts.manifest import ArtifactChunk
from strata.fleet.artifacts.ports import Signer
from strata.objects import Bucket

PUTS: Final = 8
"""Chunks in memory at once. A store of objects takes a chunk whole, so that one is held until it was verified."""


class ObjectChunks:
    """Keeps chunks in a bucket of its own, or below a prefix of one."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._slots = asyncio.Semaphore(PUTS)

    @property
    def signer(self) -> Signer:
        return self

    async def put(self, chunk: ArtifactChunk, body: AsyncIterable[bytes], *, owner: str = "", offset: int = 0) -> None:
        del owner
        if offset:
            raise StrataError(
                Code.CONFLICT, f"nothing of {chunk.digest} is here", hint="send it from the beginning", received=0
            )
        async with self._slots:
            content = await _collect(chunk, body)
            if await asyncio.to_thread(sha256_hex, content) != chunk.digest:
                raise StrataError(
                    Code.INVALID,
                    f"the bytes sent as {chunk.digest} are others",
                    hint="read the file again and send it from the beginning",
                )
            key = self._chunk(chunk.digest)
            failpoint("artifacts.objects.before_put")
            if not await self._bucket.put_if_absent(key, content) and not await self._holds(key, chunk):
                await self._bucket.put(key, content)
            failpoint("artifacts.objects.after_put")

    async def received(self, digests: Sequence[str], owner: str) -> Mapping[str, int]:
        del digests, owner
        return {}

    async def read(self, chunk: ArtifactChunk) -> bytes:
        key = self._chunk(chunk.digest)
        content = await self._load(key, chunk)
        if content is None:
            raise StrataError(Code.NOT_FOUND, f"there is no chunk {chunk.digest}")
        if not await _is(chunk, content):
            raise corrupt(chunk, "its bytes are others")
        return content

    async def has(self, digest: str) -> bool:
        return await self._bucket.size(self._chunk(digest)) is not None

    async def delete(self, digest: str) -> None:
        await self._bucket.delete(self._chunk(digest))

    async def quarantine(self, chunk: ArtifactChunk) -> bool:
        try:
            await self.read(chunk)
        except StrataError as error:
            if error.code is Code.CORRUPT:
                key = self._chunk(chunk.digest)
                await self._bucket.copy(key, f"quarantine/{chunk.digest}")
                await self._bucket.delete(key)
            return True
        return False

    async def free_bytes(self) -> int | None:
        return None

    async def sign_put(self, digests: Sequence[str], owner: str, expires_s: float) -> Sequence[str]:
        return await self._bucket.sign("PUT", [self._incoming(digest, owner) for digest in digests], expires_s)

    async def sign_get(self, digests: Sequence[str], expires_s: float) -> Sequence[str]:
        return await self._bucket.sign("GET", [self._chunk(digest) for digest in digests], expires_s)

    async def adopt(self, chunk: ArtifactChunk, owner: str) -> bool:
        sent = self._incoming(chunk.digest, owner)
        held = f"checking/{chunk.digest}.{secrets.token_hex(8)}"
        async with self._slots:
            size = await self._bucket.size(sent)
            if size is None:
                return False
            if size != chunk.size:
                await self._bucket.delete(sent)
                return False
            if not await self._bucket.copy(sent, held):
                return False
            failpoint("artifacts.objects.before_check")
            right = await self._holds(held, chunk)
            failpoint("artifacts.objects.before_adopt")
            if right:
                right = await self._bucket.copy(held, self._chunk(chunk.digest))
            failpoint("artifacts.objects.after_adopt")
            await self._bucket.delete(held, sent)
        return right

    async def tidy(self, before_s: float) -> int:
        old: list[str] = []
        for folder in ("incoming", "checking"):
            old += [entry.key for entry in await self._bucket.list(f"{folder}/") if entry.modified_s < before_s]
        await self._bucket.delete(*old)
        return len(old)

    async def close(self) -> None: ...

    async def _load(self, key: str, chunk: ArtifactChunk) -> bytes | None:
        """Returns what is there, or nothing of it if that has another size; None if nothing is there."""
        stored = await self._bucket.open(key)
        if stored is None:
            return None
        return await stored.read() if stored.size == chunk.size else b""

    async def _holds(self, key: str, chunk: ArtifactChunk) -> bool:
        content = await self._load(key, chunk)
        return content is not None and await _is(chunk, content)

    def _chunk(self, digest: str) -> str:
        return f"chunks/{digest[:2]}/{digest}"

    def _incoming(self, digest: str, owner: str) -> str:
        return f"incoming/{sha256_hex(owner.encode())[:32]}/{digest}"


async def _collect(chunk: ArtifactChunk, body: AsyncIterable[bytes]) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in body:
        size += len(part)
        if size > chunk.size:
            raise StrataError(Code.INVALID, f"more than the {chunk.size} bytes of {chunk.digest} were sent")
        parts.append(part)
    if size < chunk.size:
        message = f"only {size} of the {chunk.size} bytes of {chunk.digest} were sent"
        raise StrataError(Code.PRECONDITION, message, hint="send it again", received=0)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _is(chunk: ArtifactChunk, content: bytes) -> bool:
    return len(content) == chunk.size and await asyncio.to_thread(sha256_hex, content) == chunk.digest
