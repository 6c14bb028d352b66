"""Checkpoints in object storage that speaks S3: `PREFIX/RUN/KIND/NAME@SEQ/FILE`, the manifest last.

A checkpoint is there when its manifest is. So one that is being put, or deleted, is there whole or not at all, and what
a process that died has left is only files that nobody finds. What is fetched is verified on the way to the disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec
import obstore
from obstore import exceptions
from obstore.store import S3Store

from strata.base.atomic import sync_folder, sync_tree
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.database.objects import translated
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.files import File, allowed
from strata.train.settings import CheckpointSettings

_NAMES: Final = 4
"""Folders above a checkpoint whose names must be on the disk too."""


class ObjectStore:
    def __init__(self, store: S3Store, prefix: str) -> None:
        self._store = store
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    async def names(self) -> tuple[set[str], set[str]]:
        """Those that are there, and those of which there are only parts."""
        found: set[str] = set()
        whole: set[str] = set()
        with translated(self._prefix):
            async for page in obstore.list(self._store, self._prefix or None):
                for each in page:
                    name, _, file = each["path"].removeprefix(self._prefix).rpartition("/")
                    found.add(name)
                    if file == checkpoint.MANIFEST:
                        whole.add(name)
        return whole, found - whole

    async def put(self, folder: Path, name: str) -> None:
        """Verified before it leaves. The same again changes nothing."""
        manifest = await asyncio.to_thread(checkpoint.read, folder)
        own = await asyncio.to_thread((folder / checkpoint.MANIFEST).read_bytes)
        there = await self._manifest(name)
        if there == own:
            return
        if there is not None:
            # Files change below it: until all have, there is no checkpoint of that name.
            await self._delete(self._key(name, checkpoint.MANIFEST))
        for file in manifest.files:
            with translated(name):
                await obstore.put_async(self._store, self._key(name, file), folder / file)
            failpoint("train.store.after_file")
        failpoint("train.store.before_manifest")
        with translated(name):
            try:
                await obstore.put_async(self._store, self._key(name, checkpoint.MANIFEST), own, mode="create")
            except exceptions.AlreadyExistsError:
                if await self._manifest(name) != own:
                    raise StrataError(Code.CONFLICT, f"somebody else writes {name} into the object store") from None
        failpoint("train.store.after_manifest")

    async def fetch(self, name: str, place: Path, beside: Path) -> bool:
        """Put it at its place, by way of a folder `beside`; False if there is none. CORRUPT if it is not as written."""
        raw = await self._manifest(name)
        if raw is None:
            return False
        try:
            manifest = msgspec.json.decode(raw, type=checkpoint.Manifest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StrataError(Code.CORRUPT, f"the manifest of {name} in the object store is damaged") from error
        await asyncio.to_thread(_make_empty, beside)
        try:
            for file, expected in manifest.files.items():
                if not allowed(file):
                    raise StrataError(Code.CORRUPT, f"{name} in the object store has a file that is none of ours")
                await self._fetch_file(self._key(name, file), beside / file, expected)
                failpoint("train.store.after_fetch")
            await asyncio.to_thread(_put_in_place, beside, place, raw)
        finally:
            await asyncio.to_thread(shutil.rmtree, beside, ignore_errors=True)
        return True

    async def _fetch_file(self, key: str, to: Path, expected: File) -> None:
        digest, size = hashlib.sha256(), 0
        with translated(key), to.open("wb") as opened:
            try:
                found = await obstore.get_async(self._store, key)
            except FileNotFoundError as error:
                raise StrataError(Code.CORRUPT, f"{key} is missing in the object store") from error
            async for part in found.stream():
                piece = bytes(part)
                size += len(piece)
                if size > expected.size:
                    break
                digest.update(piece)
                await asyncio.to_thread(opened.write, piece)
        if size != expected.size or f"sha256:{digest.hexdigest()}" != expected.digest:
            raise StrataError(Code.CORRUPT, f"{key} in the object store is not what was written")

    async def delete(self, name: str) -> None:
        """The manifest first: from then on it is not there."""
        await self._delete(self._key(name, checkpoint.MANIFEST))
        failpoint("train.store.after_unlisting")
        with translated(name):
            pages = [page async for page in obstore.list(self._store, f"{self._prefix}{name}")]
        for each in (each for page in pages for each in page):
            if each["path"].startswith(self._key(name, "")):
                await self._delete(each["path"])

    async def _manifest(self, name: str) -> bytes | None:
        key = self._key(name, checkpoint.MANIFEST)
        with translated(key):
            try:
                found = await obstore.get_async(self._store, key)
            except FileNotFoundError:
                return None
            if found.meta["size"] > checkpoint.MANIFEST_LIMIT:
                raise StrataError(Code.CORRUPT, f"the manifest of {name} in the object store is too long")
            return bytes(await found.bytes_async())

    async def _delete(self, key: str) -> None:
        with translated(key):
            try:
                await obstore.delete_async(self._store, key)
            except FileNotFoundError:
                return

    def _key(self, name: str, file: str) -> str:
        return f"{self._prefix}{name}/{file}"


def open_store(settings: CheckpointSettings, server: str) -> ObjectStore:
    """Of this server: others may keep theirs under the same address."""
    bucket, _, prefix = settings.storage.removeprefix("s3://").partition("/")
    if not settings.storage.startswith("s3://") or not bucket or settings.secret_key is None:
        raise StrataError(
            Code.INVALID, "checkpoints.storage is s3://BUCKET/PREFIX, and needs access_key and secret_key beside it"
        )
    options: dict[str, Any] = {"endpoint": settings.endpoint} if settings.endpoint else {}
    store = S3Store(
        bucket,
        region=settings.region,
        access_key_id=settings.access_key,
        secret_access_key=settings.secret_key.reveal(),
        client_options={"allow_http": settings.endpoint.startswith("http://")},
        **options,
    )
    return ObjectStore(store, f"{prefix.strip('/')}/{server}")


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)


def _put_in_place(beside: Path, place: Path, manifest: bytes) -> None:
    (beside / checkpoint.MANIFEST).write_bytes(manifest)
    sync_tree(beside)
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside.rename(place)
    for above in place.parents[:_NAMES]:
        sync_folder(above)
