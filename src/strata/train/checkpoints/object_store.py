"""Checkpoints in S3 under `PREFIX/RUN/KIND/NAME@SEQ/FILE`: upload with the manifest last, verified fetch, deletion.

A checkpoint exists when its manifest does. So an upload or a deletion that is under way, or that a crash interrupted,
leaves no partial checkpoint, only files that no manifest names. What is fetched is verified on the way to the disk.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec

from strata.base.atomic import sync_folder, sync_tree
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.objects import Bucket, S3Access, connect, static_credentials
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import CheckpointFile, is_allowed_name
from strata.train.settings import CheckpointSettings


class CheckpointStore:
    """The checkpoints of one server below a prefix of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def names(self) -> tuple[set[str], set[str]]:
        """Complete checkpoints, and those of which only some files exist."""
        names: set[str] = set()
        complete: set[str] = set()
        for entry in await self._bucket.list():
            name, _, file = entry.key.rpartition("/")
            names.add(name)
            if file == checkpoint.MANIFEST:
                complete.add(name)
        return complete, names - complete

    async def put(self, folder: Path, name: str) -> None:
        """Upload a checkpoint, verified first. Idempotent."""
        manifest = await asyncio.to_thread(checkpoint.read, folder)
        own = await asyncio.to_thread((folder / checkpoint.MANIFEST).read_bytes)
        there = await self._read_manifest(name)
        if there == own:
            return
        if there is not None:
            # Files change below it: until all have, there is no checkpoint of that name.
            await self._bucket.delete(_key(name, checkpoint.MANIFEST))
        for file in manifest.files:
            await self._bucket.put(_key(name, file), folder / file)
            failpoint("train.store.after_file")
        failpoint("train.store.before_manifest")
        written = await self._bucket.put_if_absent(_key(name, checkpoint.MANIFEST), own)
        if not written and await self._read_manifest(name) != own:
            raise StrataError(Code.CONFLICT, f"another server writes {name} into the object store")
        failpoint("train.store.after_manifest")

    async def fetch(self, name: str, target: Path, temporary: Path) -> bool:
        """Download it to `target`, by way of a `temporary` folder; False if there is none. CORRUPT if it is damaged."""
        raw = await self._read_manifest(name)
        if raw is None:
            return False
        try:
            manifest = msgspec.json.decode(raw, type=checkpoint.CheckpointManifest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StrataError(Code.CORRUPT, f"the manifest of {name} in the object store is damaged") from error
        await asyncio.to_thread(_make_empty, temporary)
        try:
            for file, expected in manifest.files.items():
                if not is_allowed_name(file):
                    raise StrataError(Code.CORRUPT, f"{name} in the object store has an unexpected file")
                await self._fetch_file(_key(name, file), temporary / file, expected)
                failpoint("train.store.after_fetch")
            await asyncio.to_thread(_publish, temporary, target, raw)
        finally:
            await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)
        return True

    async def _fetch_file(self, key: str, to: Path, expected: CheckpointFile) -> None:
        size = 0
        stored = await self._bucket.open(key)
        if stored is None:
            raise StrataError(Code.CORRUPT, f"{key} is missing in the object store")
        try:
            with to.open("wb") as opened:
                async for piece in stored.stream():
                    size += len(piece)
                    if size > expected.size:
                        break
                    await asyncio.to_thread(opened.write, piece)
        except OSError as error:
            # A disk may be full for a while only: UNAVAILABLE like the store, and retried.
            raise StrataError(Code.UNAVAILABLE, f"cannot write a copy of {key}: {error.strerror}") from error
        is_complete = size == expected.size
        if (
            not is_complete
            or await asyncio.to_thread(checkpoint.find_damaged, to.parent, {to.name: expected}) is not None
        ):
            raise StrataError(Code.CORRUPT, f"{key} in the object store is not what was written")

    async def delete(self, name: str) -> None:
        """The manifest first: from then on the checkpoint does not exist."""
        await self._bucket.delete(_key(name, checkpoint.MANIFEST))
        failpoint("train.store.after_unlisting")
        entries = await self._bucket.list(name)
        await self._bucket.delete(*(entry.key for entry in entries if entry.key.startswith(_key(name, ""))))

    async def _read_manifest(self, name: str) -> bytes | None:
        stored = await self._bucket.open(_key(name, checkpoint.MANIFEST))
        if stored is None:
            return None
        if stored.size > checkpoint.MANIFEST_LIMIT:
            raise StrataError(Code.CORRUPT, f"the manifest of {name} in the object store is too long")
        return await stored.read()


def _key(name: str, file: str) -> str:
    return f"{name}/{file}"


def open_store(settings: CheckpointSettings, server: str) -> CheckpointStore:
    """The store of this server: others may use the same bucket and prefix."""
    bucket, _, prefix = settings.storage.removeprefix("s3://").partition("/")
    if not settings.storage.startswith("s3://") or not bucket or settings.secret_key is None:
        raise StrataError(
            Code.INVALID, "checkpoints.storage is s3://BUCKET/PREFIX, and needs access_key and secret_key"
        )
    credentials = static_credentials(settings.access_key, settings.secret_key.reveal())
    access = S3Access(endpoint=settings.endpoint, region=settings.region, credentials=credentials)
    return CheckpointStore(Bucket(connect(bucket, access), f"{prefix.strip('/')}/{server}"))


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)


def _publish(temporary: Path, target: Path, manifest: bytes) -> None:
    (temporary / checkpoint.MANIFEST).write_bytes(manifest)
    sync_tree(temporary)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary.rename(target)
    for above in target.parents[: checkpoint.NAMES]:
        sync_folder(above)
