"""A checkpoint on disk: its folder, manifest and format number, digests, atomic writes, checks of safetensors headers,
and the wording of damage.

A writer fills a temporary folder, fsyncs each file and the folder, writes the manifest last, and then renames the
folder, or exchanges it with the one that has the name. A reader gets a complete checkpoint or an error. A checkpoint
holds tensors (safetensors) and JSON and nothing else: no format that could run code.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from strata.base.atomic import exchange_folders, sync_file, sync_folder
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.core import model_options, ops

MANIFEST: Final = "manifest.json"
MANIFEST_LIMIT: Final = 16 << 20
FORMAT: Final = 3
NAMES: Final = 4
"""Folders above a checkpoint whose names must be durable: of its kind, its run, all runs, and the server's data."""
PART: Final = ".part"
HEADER_LIMIT: Final = 32 << 20
"""The largest header of a file of tensors: enough for some hundred thousand of them."""
HEADER_KEYS: Final = frozenset({"format", "quantise", "dtype", "DCP_SHARDING_INFO", "DCP_VERSION", "STRATA_RUNS"})
"""Metadata that our writers put into a header. Any other key is rejected."""
THREADS: Final = 4
LEAF: Final = 4 << 20
"""Bytes of a leaf of a tree digest. Digests on disk depend on it."""
TREE: Final = "sha256-tree:"
"""Prefix of a tree digest: the SHA-256 of the SHA-256 of all leaves. Cores share the leaves of a file."""
PIECE: Final = 256 << 10
"""Bytes that are read and hashed at a time: they stay in the cache of a core."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\.(safetensors|json|jinja)")


class CheckpointFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    size: int


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int = FORMAT
    model_id: str
    seq_id: int
    kind: ops.WeightsKind
    base_model: str
    arch: str
    lora: model_options.LoraConfig | None
    steps: int
    """Steps of the optimizer so far; its moments are there if `kind` is "weights" and there were any."""
    user_metadata: Mapping[str, str] = {}
    files: Mapping[str, CheckpointFile] = {}
    digest: str = ""
    """The digest of the manifest itself, with nothing in this place."""

    @property
    def sealed(self) -> CheckpointManifest:
        # Through JSON and back: 8 and 8.0 are the same alpha, but not the same letters.
        plain = msgspec.json.decode(_encode(msgspec.structs.replace(self, digest="")), type=CheckpointManifest)
        return msgspec.structs.replace(plain, digest=f"sha256:{sha256_hex(_encode(plain))}")


_encode: Final = msgspec.json.Encoder().encode


class _Format(msgspec.Struct, frozen=True):
    """What the manifest of every version says, of a checkpoint as of a snapshot."""

    format: int


def check_format(what: str, manifest: bytes, readable: int) -> None:
    """UNSUPPORTED if another version of Strata wrote the manifest; a msgspec error if no version did."""
    if (number := msgspec.json.decode(manifest, type=_Format).format) != readable:
        raise StrataError(
            Code.UNSUPPORTED,
            f"{what} has format {number}, and this version of Strata reads format {readable} only",
            hint="use the version of Strata that wrote it",
        )


def write(folder: Path, manifest: CheckpointManifest, fill: Callable[[Path], None], *, overwrite: bool) -> None:
    """Create `folder` with what `fill` writes. Idempotent: the same operation again changes nothing."""
    part = temporary_folder(folder, new_token())
    if begin_write(folder, part, manifest, overwrite=overwrite):
        fill(part)
        commit(folder, part, manifest, sync_and_digest(part.iterdir()))


def begin_write(folder: Path, part: Path, manifest: CheckpointManifest, *, overwrite: bool) -> bool:
    """Create `part`, the temporary folder; False if this operation has written its checkpoint already."""
    there = _read_manifest(folder)
    own = there is not None and (there.model_id, there.seq_id) == (manifest.model_id, manifest.seq_id)
    if own and _is_intact(folder):
        # Its writer may have died between the rename and the fsync of the folder.
        _sync_names(folder)
        return False
    if there is not None and not own and not overwrite:
        raise StrataError(Code.CONFLICT, f"there is a checkpoint {folder.name!r} already")
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    sweep(folder.parent)
    part.mkdir(mode=0o700)
    failpoint("train.checkpoint.after_part")
    return True


def commit(folder: Path, part: Path, manifest: CheckpointManifest, files: Mapping[str, CheckpointFile]) -> None:
    """Rename the folder that `begin_write` created. All of `files` are durable already."""
    failpoint("train.checkpoint.before_manifest")
    complete = msgspec.structs.replace(manifest, files=dict(sorted(files.items())))
    (part / MANIFEST).write_bytes(_encode(complete.sealed))
    failpoint("train.checkpoint.before_sync")
    sync_file(part / MANIFEST)
    sync_folder(part)
    failpoint("train.checkpoint.before_rename")
    if folder.exists():
        exchange_folders(part, folder)
        failpoint("train.checkpoint.after_exchange")
        _sync_names(folder)
        failpoint("train.checkpoint.before_removal")
        # Only now: until the new names are on the disk, a loss of power brings the old ones back.
        shutil.rmtree(part)
    else:
        part.rename(folder)
        failpoint("train.checkpoint.after_rename")
        _sync_names(folder)
    failpoint("train.checkpoint.after_names")


def sweep(above: Path) -> None:
    """Remove temporary folders of writers that were killed. Only one group of ranks writes there at a time.

    A group that was replaced and does not know it yet may still write there: then one of the two saves fails.
    """
    left = [path for path in above.iterdir() if path.name.startswith(".") and path.name.endswith(PART)]
    if left:
        # It may be the old folder of the last exchange, which may not be durable yet.
        sync_folder(above)
    for path in left:
        failpoint("train.checkpoint.before_sweep")
        shutil.rmtree(path, ignore_errors=True)


def read(folder: Path, *, share: tuple[int, int] = (0, 1)) -> CheckpointManifest:
    """The manifest of a folder whose files all have their digests, and that holds no other file.

    With `share` = (rank, ranks) the digests of this rank's files only are computed, and the others must do the same:
    none may open a file before all have agreed.
    """
    manifest = _read_manifest(folder)
    if manifest is None:
        raise StrataError(Code.NOT_FOUND, f"there is no checkpoint {folder.name!r}")
    _check_files(folder, manifest)
    rank, ranks = share
    own = sorted(manifest.files)[rank::ranks]
    damaged = find_damaged(folder, {name: manifest.files[name] for name in own})
    if damaged is not None:
        raise StrataError(Code.CORRUPT, f"the checkpoint {folder.name!r} is not as it was written: {damaged}")
    for name in own:
        check_header(folder / name)
    return manifest


def _check_files(folder: Path, manifest: CheckpointManifest) -> None:
    """CORRUPT unless the folder holds the files of the manifest with their sizes, and no other."""
    names = {file.name for file in folder.iterdir()}
    if names != {MANIFEST, *manifest.files}:
        strange = sorted(names ^ {MANIFEST, *manifest.files})[0]
        raise StrataError(Code.CORRUPT, f"the checkpoint {folder.name!r} is not as it was written: {strange}")
    for name, expected in manifest.files.items():
        if not is_allowed_name(name):
            raise StrataError(Code.CORRUPT, f"the checkpoint {folder.name!r} has an unexpected file: {name!r}")
        found = (folder / name).lstat()
        if not stat.S_ISREG(found.st_mode):
            raise StrataError(Code.CORRUPT, f"in the checkpoint {folder.name!r}, {name} is not a plain file")
        if found.st_size != expected.size:
            raise StrataError(Code.CORRUPT, f"the checkpoint {folder.name!r} is not as it was written: {name}")


def _is_intact(folder: Path) -> bool:
    try:
        read(folder)
    except StrataError as error:
        if error.code is not Code.CORRUPT:
            raise
        return False
    return True


def _read_manifest(folder: Path) -> CheckpointManifest | None:
    file = folder / MANIFEST
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode) or not stat.S_ISREG(file.lstat().st_mode):
            raise StrataError(Code.CORRUPT, f"the checkpoint {folder.name!r} is a link, or its manifest is")
        if file.stat().st_size > MANIFEST_LIMIT:
            raise StrataError(Code.CORRUPT, f"the manifest of {folder.name!r} is longer than any of ours")
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        check_format(f"the checkpoint {folder.name!r}", data, FORMAT)
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StrataError(Code.CORRUPT, f"the manifest of {folder.name!r} is damaged: {error}") from error
    if data != _encode(manifest.sealed):
        raise StrataError(Code.CORRUPT, f"the manifest of {folder.name!r} is not as it was written")
    return manifest


def new_token() -> int:
    return secrets.randbits(62)


def temporary_folder(folder: Path, token: int) -> Path:
    """The temporary folder of one attempt to write: two writers never share one."""
    return folder.with_name(f".{folder.name}.{token:016x}{PART}")


def _sync_names(folder: Path) -> None:
    """A new folder survives a power failure only if its parents are synced too."""
    for above in folder.parents[:NAMES]:
        sync_folder(above)


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the header of a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorHeader(msgspec.Struct, frozen=True):
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def is_allowed_name(name: str) -> bool:
    """Says whether a checkpoint may hold a file of that name: tensors, JSON or a chat template."""
    return _NAME.fullmatch(name) is not None


def sync_and_digest(files: Iterable[Path]) -> dict[str, CheckpointFile]:
    """Make files durable. While the disk writes, the digests are computed from the page cache."""
    paths = sorted(files)
    failpoint("train.checkpoint.before_seal")
    for path in paths:
        if not is_allowed_name(path.name):
            raise StrataError(Code.INTERNAL, f"{path.name!r} is no name for a file of a checkpoint")
    with ThreadPoolExecutor(THREADS) as pool:
        syncing = [pool.submit(sync_file, path) for path in paths]
        found = _digest_all(pool, paths)
        for each in syncing:
            each.result()
    return found


def digest_files(files: Iterable[Path]) -> dict[str, CheckpointFile]:
    """Digests of files that need not be those of a checkpoint. Every byte is read."""
    with ThreadPoolExecutor(THREADS) as pool:
        return _digest_all(pool, sorted(files))


def _digest_all(pool: ThreadPoolExecutor, paths: Sequence[Path]) -> dict[str, CheckpointFile]:
    digests = [_start_digest(pool, path) for path in paths]
    return {
        path.name: CheckpointFile(digest(), path.stat().st_size) for path, digest in zip(paths, digests, strict=True)
    }


def find_damaged(folder: Path, files: Mapping[str, CheckpointFile]) -> str | None:
    """The name of the first file that has not the digest of its entry; None if all have. Every byte is read."""
    with ThreadPoolExecutor(THREADS) as pool:
        digests = {name: _start_digest(pool, folder / name) for name in files}
        return next((name for name, digest in digests.items() if digest() != files[name].digest), None)


def _start_digest(pool: ThreadPoolExecutor, path: Path) -> Callable[[], str]:
    """Start to compute the digest of a file; the returned function waits for it."""
    leaves = [pool.submit(_digest_leaf, path, start) for start in range(0, path.stat().st_size, LEAF)]
    return lambda: f"{TREE}{sha256_hex(b''.join(leaf.result() for leaf in leaves))}"


def _digest_leaf(path: Path, start: int) -> bytes:
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = LEAF
        while left and (count := file.readinto(piece[:left])):
            digest.update(piece[:count])
            left -= count
    return digest.digest()


def check_header(file: Path) -> None:
    if file.suffix == ".safetensors":
        read_header(file)


def read_header(file: Path) -> TensorHeader:
    """The header of a safetensors file; CORRUPT if it is too long, malformed or has unknown metadata."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT, size - 8):
            raise _not_tensors(file, f"its header would have {length} bytes")
        data = opened.read(length)
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", b"{}"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(part, type=TensorEntry) for name, part in parts.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_tensors(file, str(error)) from error
    if strange := sorted(metadata.keys() - HEADER_KEYS):
        raise _not_tensors(file, f"the header has the unknown metadata {strange[0]!r}")
    return TensorHeader(tensors, metadata)


def _not_tensors(file: Path, why: str) -> StrataError:
    return StrataError(Code.CORRUPT, f"{file.name} is not a file of tensors: {why}")
