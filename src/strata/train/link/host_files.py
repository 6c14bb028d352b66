"""Files between the hosts of a server without a folder that they share: what the first host gives and takes
(`FileService`), and how others fetch and send (parts of 4 MiB, digests verified, atomic).

A host names a folder by a root and a name below it, never by a path. It may read the model, snapshots and checkpoints;
it may write what ranks write there, into temporary folders, and only as a member of the generation that runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from strata.base.atomic import sync_file, sync_folder
from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import PART, CheckpointFile, digest_files, find_damaged
from strata.train.link.hosts import (
    PART_BYTES,
    FileList,
    FilePart,
    FileReply,
    FileRequest,
    FirstHostClient,
    Folder,
    GetSettings,
    HostSettings,
    ListFiles,
    ReadPart,
    Root,
    SealFile,
    WritePart,
    Written,
)

MAX_DEPTH: Final = 8
"""Folders below a root at most."""
UNSEALED: Final = ".unsealed"
"""The suffix of a file that is being received."""
SEALED_BYTES_PER_S: Final = 20e6
"""How slowly the first host may read a file that it seals, and sync it."""
_NAME: Final = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.@+=-]{0,254}")


class _Written(NamedTuple):
    """What ranks write by themselves below a root; rank 0, on the first host, writes everything else."""

    depth: int
    """How deep below the root the folder is: that of a checkpoint is in those of its run and its kind."""
    file: re.Pattern[str]
    rank0: int
    """The number in the name of rank 0's file."""


_WRITTEN: Final[Mapping[Root, _Written]] = {
    "snapshots": _Written(1, re.compile(r"rank-([0-9]{5})\.(?:safetensors|json)"), 0),
    "checkpoints": _Written(3, re.compile(r"shard-([0-9]{5})-model-00001-of-00001\.safetensors"), 1),
}


class FileService:
    def __init__(
        self,
        settings: HostSettings,
        roots: Mapping[Root, Path],
        model: Callable[[], Mapping[str, CheckpointFile]],
        is_current: Callable[[str, int], bool],
        own_ranks: int,
    ) -> None:
        self._settings = settings
        self._roots = roots
        self._model = model
        """The model's files with their digests; UNAVAILABLE until they are known."""
        self._is_current = is_current
        self._own_ranks = own_ranks
        """Ranks of the first host, whose numbers come first: nobody else writes their files."""
        self._sealing: dict[SealFile, asyncio.Task[Written]] = {}

    async def answer(self, request: FileRequest) -> FileReply:
        match request:
            case GetSettings():
                return self._settings
            case ListFiles(folder):
                if folder.root == "model":
                    return FileList(self._model())
                return await asyncio.to_thread(self._list, folder)
            case ReadPart():
                return await asyncio.to_thread(self._read, request)
            case WritePart():
                self._check_write(request)
                return await asyncio.to_thread(self._write, request)
            case SealFile():
                self._check_write(request)
                # Sealing reads the whole file, and may take longer than a client waits before it asks again.
                if (sealing := self._sealing.get(request)) is None:
                    sealing = self._sealing[request] = asyncio.create_task(asyncio.to_thread(self._seal, request))
                    sealing.add_done_callback(lambda _: self._sealing.pop(request))
                return await asyncio.shield(sealing)

    def _list(self, folder: Folder) -> FileList:
        path = self._path(folder)
        try:
            found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(path)}
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StrataError(Code.NOT_FOUND, f"there is no {folder.root} folder {folder.name!r}") from error
        sizes = {name: status.st_size for name, status in found.items() if stat.S_ISREG(status.st_mode)}
        return FileList({name: CheckpointFile("", size) for name, size in sizes.items()})

    def _read(self, request: ReadPart) -> FilePart:
        if request.folder.root == "model" and (request.folder.name or request.file not in self._model()):
            raise StrataError(Code.NOT_FOUND, f"the model has no file {request.file!r}")
        path = self._path(request.folder) / _checked(request.file)
        # The files of a model in the cache of the Hub's client are links; nothing else is.
        flags = os.O_RDONLY | (0 if request.folder.root == "model" else os.O_NOFOLLOW)
        try:
            descriptor = os.open(path, flags)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StrataError(Code.NOT_FOUND, f"{request.file!r} is gone") from error
        try:
            return FilePart(os.pread(descriptor, PART_BYTES, request.offset))
        finally:
            os.close(descriptor)

    def _write(self, request: WritePart) -> Written:
        path = self._path(request.folder)
        if request.folder.root == "snapshots":
            # Rank 0 may make it later; it makes that of a checkpoint before others write.
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(path / f"{request.file}{UNSEALED}", flags, 0o600)
        try:
            os.pwrite(descriptor, request.data, request.offset)
        finally:
            os.close(descriptor)
        return Written()

    def _seal(self, request: SealFile) -> Written:
        path = self._path(request.folder)
        there, sealed = path / f"{request.file}{UNSEALED}", path / request.file
        if not there.exists() and sealed.is_file() and sealed.stat().st_size == request.expected.size:
            # It was sealed before, and the reply was lost.
            return Written()
        if not there.is_file():
            raise StrataError(Code.NOT_FOUND, f"no part of {request.file!r} is there")
        if find_damaged(path, {there.name: request.expected}) is not None or there.stat().st_size != (
            request.expected.size
        ):
            there.unlink()
            raise StrataError(Code.CORRUPT, f"{request.file!r} is not what was sent")
        sync_file(there)
        there.rename(sealed)
        sync_folder(path)
        return Written()

    def _check_write(self, request: WritePart | SealFile) -> None:
        if request.generation < 1 or not self._is_current(request.run, request.generation):
            raise StrataError(Code.STALE, f"generation {request.generation} of the ranks is over")
        folder, file = request.folder, request.file
        name, written = self._path(folder).name, _WRITTEN.get(folder.root)
        temporary = name.startswith(".") and name.endswith(PART)
        found = written.file.fullmatch(file) if written is not None and temporary else None
        if (
            found is None
            or written is None
            or folder.name.count("/") != written.depth - 1
            or int(found[1]) - written.rank0 < self._own_ranks
        ):
            raise StrataError(Code.FORBIDDEN, f"no rank of another host writes {file!r} into {folder.name!r}")

    def _path(self, folder: Folder) -> Path:
        root = self._roots[folder.root]
        if not folder.name:
            return root
        parts = folder.name.split("/")
        if len(parts) > MAX_DEPTH:
            raise StrataError(Code.INVALID, "that is no name of a folder")
        path = root.joinpath(*map(_checked, parts))
        if not path.resolve().is_relative_to(root.resolve()):
            raise StrataError(Code.INVALID, "that is no name of a folder")
        return path


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None or name in (".", ".."):
        raise StrataError(Code.INVALID, f"{name[:200]!r} is no name of a file")
    return name


def fetch_files(first: FirstHostClient, folder: Folder, files: Mapping[str, CheckpointFile], target: Path) -> None:
    """Fetch files into a folder, which may have some of them, or the beginning of one, from an earlier attempt.

    CORRUPT if one is not what its digest says; those without a digest are for the caller to verify.
    """
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, expected in files.items():
        path, part = target / _checked(name), target / f"{_checked(name)}{UNSEALED}"
        if path.is_file() and path.stat().st_size == expected.size:
            continue
        with part.open("ab") as opened:
            size = opened.tell()
            while size < expected.size:
                data = first.request(ReadPart(folder, name, size), FilePart).data
                if not data:
                    break
                opened.write(data)
                size += len(data)
        is_damaged = expected.digest and find_damaged(target, {part.name: expected}) is not None
        if size != expected.size or is_damaged:
            part.unlink()
            raise StrataError(Code.CORRUPT, f"{name!r} of the first host is not what its digest says")
        part.rename(path)


def remove_others(folder: Path, files: Mapping[str, CheckpointFile], check_stop: Callable[[], None]) -> None:
    """Remove what is not one of these files, with its digest, and not the beginning of one."""
    right = right_files(folder, files, check_stop)
    begun = {f"{name}{UNSEALED}" for name in files}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_file() and path.name not in right | begun:
            path.unlink()


def right_files(folder: Path, files: Mapping[str, CheckpointFile], check_stop: Callable[[], None]) -> set[str]:
    """Returns which of these files the folder has. Every byte of those is read; `check_stop` is called between them."""
    right = set()
    for name, expected in files.items():
        check_stop()
        path = folder / name
        if path.is_file() and path.stat().st_size == expected.size and digest_files([path])[name] == expected:
            right.add(name)
    return right


def list_files(first: FirstHostClient, folder: Folder) -> Mapping[str, CheckpointFile]:
    return first.request(ListFiles(folder), FileList).files


def send_file(
    first: FirstHostClient, folder: Folder, file: Path, expected: CheckpointFile, *, run: str, generation: int
) -> None:
    """Send a file. When this returns it is durable on the first host."""
    with file.open("rb") as opened:
        for offset, data in _parts(iter(lambda: opened.read(PART_BYTES), b"")):
            first.request(WritePart(run, generation, folder, file.name, offset, data), Written)
    seal = SealFile(run, generation, folder, file.name, expected)
    first.request(seal, Written, at_least_s=expected.size / SEALED_BYTES_PER_S)


def _parts(pieces: Iterable[bytes]) -> Iterable[tuple[int, bytes]]:
    offset = 0
    for data in pieces:
        yield offset, data
        offset += len(data)
