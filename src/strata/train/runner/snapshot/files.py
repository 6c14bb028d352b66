"""A snapshot of all models on disk: written beside the training by every rank, and a name only when it is whole.

Each rank writes what it alone has, and rank 0 also what all have, into a folder beside; files are brought to the disk
and digested there, and then a small file says so. Rank 0 waits for those of all ranks, in its own writing thread: the
ranks train meanwhile, and a collective of a second thread could meet theirs in another order on every rank. Then come
the manifest, its sync, and the name. Whoever dies on the way leaves a folder that nobody will ever ask for.
"""

from __future__ import annotations

import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from strata.base.atomic import sync_file, sync_folder, write_file
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.checkpoints.files import File, check_header, digests, seal
from strata.train.core import ops

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
MANIFEST_LIMIT: Final = 64 << 20
SHARED: Final = "shared.safetensors"
LOOK_S: Final = 0.02
"""How often rank 0's writing thread looks for the files of the others. Nobody waits for it."""


class ModelPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    created: ops.CreateModel
    steps: int


class SamplerPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sampler_id: str
    kind: Literal["base", "adapter", "whole"]
    lora: ops.LoraConfig | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int = FORMAT
    base_model: str
    arch: str
    parameters: int
    full: bool
    ranks: int
    touched: bool
    models: Sequence[ModelPart]
    samplers: Sequence[SamplerPart]
    files: Mapping[str, File] = {}


class Copied(msgspec.Struct, frozen=True):
    """What a rank has to write. `shared` is the same on all ranks, and empty on all but the first."""

    manifest: Manifest
    shared: Mapping[str, torch.Tensor]
    own: Mapping[str, torch.Tensor]


class Written(msgspec.Struct, frozen=True):
    """How it ended, on rank 0."""

    number: int
    digest: str
    size: int
    held_s: float
    written_s: float
    trouble: str | None = None


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank has done its part, or cannot."""

    files: Mapping[str, File] = {}
    trouble: str | None = None


class SnapshotWriter:
    """Writes one snapshot at a time, in a thread of its own. `started` and `taken` are for the dispatching thread."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        # A queue, because a result that came between looking and forgetting would never be told.
        self._written: SimpleQueue[Written] = SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        """Called from the thread when there is something to take."""

    def check_free(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise StrataError(Code.PRECONDITION, "the snapshot before is still being written")

    def start(self, number: int, folder: Path, copied: Copied, held_s: float) -> None:
        # A daemon: a group that ends does not wait for a snapshot that nobody will hear of.
        given = (number, folder, copied, held_s)
        self._thread = threading.Thread(target=self._run, args=given, name="snapshot", daemon=True)
        self._thread.start()

    def take(self) -> Written | None:
        """How the last one ended, once."""
        try:
            return self._written.get_nowait()
        except Empty:
            return None

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, number: int, folder: Path, copied: Copied, held_s: float) -> None:
        started_s = time.perf_counter()
        digest, size, trouble = "", 0, "the writing thread ended early"
        try:
            digest, size = self._write(folder, copied)
            trouble = ""
        except (StrataError, OSError, SafetensorError) as error:
            trouble = f"rank {self._rank}: {error}"
        finally:
            if self._rank == 0:
                if trouble:
                    shutil.rmtree(part_of(folder), ignore_errors=True)
                took_s = time.perf_counter() - started_s
                self._written.put(Written(number, digest, size, held_s, took_s, trouble or None))
                self.wake()

    def _write(self, folder: Path, copied: Copied) -> tuple[str, int]:
        part = part_of(folder)
        part.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            sealed = _Sealed(self._write_tensors(part, copied))
        except (StrataError, OSError, SafetensorError) as error:
            _say(part, self._rank, _Sealed(trouble=str(error)))
            raise
        failpoint("train.snapshot.before_sealed")
        _say(part, self._rank, sealed)
        failpoint("train.snapshot.after_sealed")
        if self._rank != 0:
            return "", 0
        files = self._gather(part, copied.manifest.ranks)
        return commit(folder, msgspec.structs.replace(copied.manifest, files=files))

    def _write_tensors(self, part: Path, copied: Copied) -> dict[str, File]:
        failpoint("train.snapshot.before_files")
        own = part / own_file(self._rank)
        save_file(dict(copied.own), own)
        made = [own]
        failpoint("train.snapshot.between_files")
        if self._rank == 0:
            save_file(dict(copied.shared), part / SHARED)
            made.append(part / SHARED)
        return seal(made)

    def _gather(self, part: Path, ranks: int) -> dict[str, File]:
        """What all ranks wrote, once all have; their small files go, because the manifest says the same."""
        files: dict[str, File] = {}
        give_up_s = time.monotonic() + self._timeout_s
        for rank in range(ranks):
            place = part / _sealed_file(rank)
            while not place.exists():
                if time.monotonic() > give_up_s:
                    raise StrataError(Code.DEADLINE, f"rank {rank} has not written its part in {self._timeout_s:g} s")
                time.sleep(LOOK_S)
            said = msgspec.json.decode(place.read_bytes(), type=_Sealed)
            if said.trouble is not None:
                raise StrataError(Code.UNAVAILABLE, f"rank {rank}: {said.trouble}")
            files |= said.files
        for rank in range(ranks):
            (part / _sealed_file(rank)).unlink()
        return files


def commit(folder: Path, manifest: Manifest) -> tuple[str, int]:
    """The manifest, then the name: from here on it can be restored. Returns the manifest's digest and all bytes."""
    part = part_of(folder)
    failpoint("train.snapshot.before_manifest")
    data = msgspec.json.encode(manifest)
    (part / MANIFEST).write_bytes(data)
    sync_file(part / MANIFEST)
    sync_folder(part)
    failpoint("train.snapshot.before_name")
    part.rename(folder)
    for above in folder.parents[:2]:
        sync_folder(above)
    failpoint("train.snapshot.after_name")
    return sha256_hex(data), sum(file.size for file in manifest.files.values())


def read_manifest(folder: Path, digest: str) -> Manifest:
    """The manifest that has this digest, of a folder in which nothing lies but its files."""
    file = folder / MANIFEST
    try:
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MANIFEST_LIMIT:
            raise _damaged(folder, MANIFEST)
        data = file.read_bytes()
        names = {each.name for each in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StrataError(Code.NOT_FOUND, f"there is no snapshot {folder.name!r}") from error
    if sha256_hex(data) != digest:
        raise _damaged(folder, MANIFEST)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise StrataError(Code.UNSUPPORTED, f"the snapshot {folder.name!r} is of another version: {error}") from error
    if manifest.format != FORMAT:
        raise StrataError(Code.UNSUPPORTED, f"the snapshot {folder.name!r} has the format {manifest.format}")
    if names != {MANIFEST, *manifest.files}:
        raise _damaged(folder, sorted(names ^ {MANIFEST, *manifest.files})[0])
    return manifest


def verify(folder: Path, manifest: Manifest, *, rank: int, ranks: int) -> None:
    """This rank's share of the files is as it was written. None may be opened before all ranks have said so."""
    own = sorted(manifest.files)[rank::ranks]
    for name in own:
        found = (folder / name).lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != manifest.files[name].size:
            raise _damaged(folder, name)
    for name, found_digest in zip(own, digests([folder / name for name in own]), strict=True):
        if found_digest != manifest.files[name].digest:
            raise _damaged(folder, name)
        check_header(folder / name)


def own_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def part_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.part")


def _sealed_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _say(part: Path, rank: int, sealed: _Sealed) -> None:
    write_file(part / _sealed_file(rank), msgspec.json.encode(sealed), durable=False)


def _damaged(folder: Path, name: str) -> StrataError:
    return StrataError(Code.CORRUPT, f"the snapshot {folder.name!r} is not as it was written: {name}")
