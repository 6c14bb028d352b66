"""Converts a folder to chunks and a manifest (`scan`), and writes one back (`materialise`) without following links;
folders at most 128 deep. It runs on hosts and clients.

Both directions trust nobody: a folder is read without following links, and a manifest is checked again before anything
of it is written, so that no hub can make a host write outside the folder it chose.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

from strata.base.atomic import new_folder
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.manifest import CHUNK_BYTES, ArtifactFile, ArtifactLimits, ArtifactManifest, check_manifest

_FOLLOW_NOT: Final = getattr(os, "O_NOFOLLOW", 0)
_BINARY: Final = getattr(os, "O_BINARY", 0)
MAX_WALK_DEPTH: Final = 128
"""Folders in folders that are read: each costs as many steps as it is deep."""

Fetch = Callable[[str, int], bytes]
"""Gets a chunk by digest and size; what it returns is verified here."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk and one place in the folder where its bytes are."""

    digest: str
    size: int
    path: str
    offset: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder to read while its owner may change it.

    `base` is reached as any path is, so nobody but the reader may be able to change the way to it. From there on no
    link is followed, by the name of an open descriptor each time, and with `uid` only files of that user are read: a
    hard link to a file of another user is not.
    """

    base: Path
    inside: tuple[str, ...] = ()
    """The way from `base` to the folder."""
    uid: int | None = None


def scan(
    folder: Path | Tree, *, links: Literal["refuse", "skip"] = "refuse", limits: ArtifactLimits | None = None
) -> ArtifactManifest:
    """The manifest of all files below a folder; empty folders leave no trace.

    A link, device or socket is INVALID, or left out with `links="skip"`: an artifact holds files only.
    """
    limits = limits or ArtifactLimits()
    tree = folder if isinstance(folder, Tree) else Tree(folder)
    paths: list[str] = []
    for path in _walk(tree, skip=links == "skip"):
        paths.append(path)
        if len(paths) > limits.max_files:
            raise StrataError(Code.INVALID, f"there are more than {limits.max_files} files in it")
    if not paths:
        raise StrataError(Code.INVALID, f"there is no file in {tree.base.joinpath(*tree.inside)}")
    return check_manifest(ArtifactManifest(files=tuple(_describe(tree, path) for path in sorted(paths))), limits)


def has_files(tree: Tree) -> bool:
    return next(_walk(tree, skip=True), None) is not None


def pieces(manifest: ArtifactManifest, missing: Mapping[str, object]) -> Iterator[Piece]:
    """Yields where to read each missing chunk, each once, in the order of the files."""
    seen: set[str] = set()
    for file in manifest.files:
        for number, chunk in enumerate(file.sized_chunks()):
            if chunk.digest in missing and chunk.digest not in seen:
                seen.add(chunk.digest)
                yield Piece(chunk.digest, chunk.size, file.path, number * CHUNK_BYTES)


def read_piece(folder: Path | Tree, piece: Piece) -> bytes:
    """Its bytes; CONFLICT if the file is not what it was when it was scanned."""
    with _open(folder if isinstance(folder, Tree) else Tree(folder), piece.path) as file:
        file.seek(piece.offset)
        content = file.read(piece.size)
    if sha256_hex(content) != piece.digest:
        raise _changed(piece.path)
    return content


def materialise(
    manifest: ArtifactManifest, fetch: Fetch, target: Path, *, limits: ArtifactLimits | None = None
) -> None:
    """Write the files of a manifest to `target`, which appears at once and whole, or not at all.

    CONFLICT if something is there already; CORRUPT if what was fetched is not what the manifest says.
    """
    check_manifest(manifest, limits or ArtifactLimits())
    with new_folder(target, mode=0o700) as folder:
        for file in manifest.files:
            _write(file, fetch, folder)


@contextmanager
def open_folder(tree: Tree, inside: Sequence[str] = ()) -> Iterator[Iterator[os.DirEntry[str]]]:
    """The entries of a folder. FileNotFoundError, NotADirectoryError or another OSError if it cannot be read."""
    if os.scandir not in os.supports_fd:
        with os.scandir(tree.base.joinpath(*tree.inside, *inside)) as entries:
            yield entries
        return
    descriptor = _descend(tree, inside)
    try:
        with os.scandir(descriptor) as entries:
            yield entries
    finally:
        os.close(descriptor)


def _walk(tree: Tree, *, skip: bool) -> Iterator[str]:
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        inside = waiting.pop()
        above = "".join(f"{name}/" for name in inside)
        if len(inside) > MAX_WALK_DEPTH:
            raise StrataError(Code.INVALID, f"{above[:80]!r}… is more than {MAX_WALK_DEPTH} folders deep")
        try:
            with open_folder(tree, inside) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((*inside, entry.name))
                    elif entry.is_file(follow_symlinks=False):
                        yield above + entry.name
                    elif not skip:
                        raise StrataError(
                            Code.INVALID,
                            f"{above + entry.name!r} is neither file nor folder; an artifact holds files only",
                        )
        except OSError as error:
            raise StrataError(Code.CONFLICT, f"cannot read {above or '.'!r}: {error.strerror}") from error


def _describe(tree: Tree, path: str) -> ArtifactFile:
    whole = hashlib.sha256()
    chunks: list[str] = []
    size = 0
    with _open(tree, path) as file:
        before = os.fstat(file.fileno())
        while content := file.read(CHUNK_BYTES):
            chunks.append(sha256_hex(content))
            # A file of one chunk has that chunk's digest; only longer ones are hashed twice.
            if chunks[1:] or len(content) == CHUNK_BYTES:
                whole.update(content)
            size += len(content)
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != after.st_size:
        raise _changed(path)
    executable = bool(after.st_mode & stat.S_IXUSR) and os.name == "posix"
    return ArtifactFile(
        path=path,
        size=size,
        sha256=chunks[0] if len(chunks) == 1 else whole.hexdigest(),
        chunks=tuple(chunks),
        mode="0755" if executable else "0644",
    )


def _open(tree: Tree, path: str) -> BinaryIO:
    try:
        return open_regular(tree, path)
    except OSError as error:
        raise StrataError(Code.CONFLICT, f"cannot read {path!r}: {error.strerror}") from error


def open_regular(tree: Tree, path: str) -> BinaryIO:
    """A regular file, reached through no link: whoever owns the folder may swap one in while it is read."""
    *inside, name = path.split("/")
    if os.open in os.supports_dir_fd:
        at = _descend(tree, inside)
        try:
            # A pipe would make the opening wait for its other end.
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
    else:
        descriptor = os.open(tree.base.joinpath(*tree.inside, *inside, name), os.O_RDONLY | _BINARY)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and tree.uid in (None, status.st_uid):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise StrataError(Code.INVALID, f"{path!r} belongs to another user than the job's")
    raise StrataError(Code.CONFLICT, f"{path!r} is not a file any more")


def _descend(tree: Tree, inside: Sequence[str]) -> int:
    """A descriptor of the folder `inside`."""
    at = os.open(tree.base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in (*tree.inside, *inside):
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = inner
    return at


def _write(file: ArtifactFile, fetch: Fetch, folder: Path) -> None:
    place = folder / file.path
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = int(file.mode, 8)
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FOLLOW_NOT | _BINARY, mode)
    with os.fdopen(descriptor, "wb") as written:
        for content in fetch_file(file, fetch):
            written.write(content)
    with suppress(NotImplementedError):
        place.chmod(mode)


def fetch_file(file: ArtifactFile, fetch: Fetch) -> Iterator[bytes]:
    """The content of a file, chunk by chunk; CORRUPT if it is not what the manifest says."""
    whole = hashlib.sha256()
    for chunk in file.sized_chunks():
        content = fetch(chunk.digest, chunk.size)
        if len(content) != chunk.size or sha256_hex(content) != chunk.digest:
            raise StrataError(Code.CORRUPT, f"what was fetched as {chunk.digest} is something else")
        if len(file.chunks) > 1:
            whole.update(content)
        yield content
    if len(file.chunks) > 1 and whole.hexdigest() != file.sha256:
        raise StrataError(Code.CORRUPT, f"{file.path!r} is not the file its maker said it was")


def _changed(path: str) -> StrataError:
    return StrataError(Code.CONFLICT, f"{path!r} changed while it was read", hint="scan the folder again")
