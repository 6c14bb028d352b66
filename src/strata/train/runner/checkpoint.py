"""Checkpoints on disk: a folder that appears whole, with a manifest of digests, and is checked before it is believed.

Files are written into a folder beside, each of them and the folder brought to the disk, the manifest last, and then the
folder gets its name. What is read is a checkpoint that was written to its end, or an error. Nothing in it is pickled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from strata.base.digest import file_digest
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.core import ops

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
NAMES: Final = 4
"""Folders with the names that lead to a checkpoint: of its kind, its run, all runs, and the server's data."""


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    size: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int = FORMAT
    model_id: str
    seq_id: int
    kind: Literal["weights", "sampler_weights"]
    base_model: str
    arch: str
    lora: ops.LoraConfig | None
    steps: int
    """Steps of the optimizer so far; its moments are there if `kind` is "weights"."""
    user_metadata: Mapping[str, str] = {}
    files: Mapping[str, File] = {}


def write(folder: Path, manifest: Manifest, fill: Callable[[Path], None], *, overwrite: bool) -> None:
    """Make `folder` with what `fill` writes. Doing it again for the same operation changes nothing."""
    there = _manifest(folder)
    own = there is not None and (there.model_id, there.seq_id) == (manifest.model_id, manifest.seq_id)
    if own and _is_whole(folder):
        # Whoever wrote it may have died between the name and the sync of its folder.
        _sync_names(folder)
        return
    if there is not None and not own and not overwrite:
        raise StrataError(Code.CONFLICT, f"there is a checkpoint {folder.name!r} already")
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700)
    fill(part)
    files = {}
    for file in sorted(part.iterdir()):
        _sync(file)
        files[file.name] = File(file_digest(file), file.stat().st_size)
    (part / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=files)))
    _sync(part / MANIFEST)
    _sync(part)
    failpoint("train.checkpoint.before_rename")
    if folder.exists():
        gone = folder.with_name(f".{folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        part.rename(folder)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        part.rename(folder)
    _sync_names(folder)


def read(folder: Path) -> Manifest:
    """The manifest of a folder in which every file is what was written, and nothing else lies."""
    manifest = _manifest(folder)
    if manifest is None:
        raise StrataError(Code.NOT_FOUND, f"there is no checkpoint {folder.name!r}")
    if manifest.format != FORMAT:
        raise StrataError(Code.UNSUPPORTED, f"the checkpoint {folder.name!r} has the format {manifest.format}")
    names = {file.name for file in folder.iterdir()}
    if names != {MANIFEST, *manifest.files}:
        strange = sorted(names ^ {MANIFEST, *manifest.files})[0]
        raise StrataError(Code.CORRUPT, f"the checkpoint {folder.name!r} is not as it was written: {strange}")
    for name, expected in manifest.files.items():
        file = folder / name
        if file.stat().st_size != expected.size or file_digest(file) != expected.digest:
            raise StrataError(Code.CORRUPT, f"the checkpoint {folder.name!r} is not as it was written: {name}")
    return manifest


def _is_whole(folder: Path) -> bool:
    try:
        read(folder)
    except StrataError as error:
        if error.code is not Code.CORRUPT:
            raise
        return False
    return True


def _manifest(folder: Path) -> Manifest | None:
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise StrataError(Code.CORRUPT, f"the manifest of {folder.name!r} is damaged: {error}") from error


def _sync_names(folder: Path) -> None:
    """A folder that was made a moment ago is found after a loss of power only if the one above it was synced too."""
    for above in folder.parents[:NAMES]:
        _sync(above)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
