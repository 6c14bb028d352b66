"""Snapshot files of the ranks: format number, manifest, background writing, commit by a rename, verification, and the
wording of damage.

Each rank writes its own tensors into a file in a temporary folder. It syncs and digests the file and then writes a
small JSON file that says so. Rank 0 polls for these files in its writer thread
instead of using a collective: the ranks train meanwhile, and a collective of a second thread could interleave with
theirs in another order on every rank. Rank 0 then writes the manifest, syncs it, and renames the folder. A crash on the
way leaves a temporary folder that nothing refers to.
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
from strata.train.checkpoints.checkpoint import (
    CheckpointFile,
    check_format,
    check_header,
    find_damaged,
    sync_and_digest,
)
from strata.train.core import model_options, ops
from strata.train.core.commands import SnapshotWritten
from strata.train.plan.quantisation import Quantise
from strata.train.runner.checkpoint.shards import SHARDING, ShardOffsets
from strata.train.runner.host_files import HostFiles, OwnFiles

FORMAT: Final = 6
MANIFEST: Final = "manifest.json"
MANIFEST_LIMIT: Final = 64 << 20
RUNS: Final = "STRATA_RUNS"
"""The key in the header of a rank's file."""
POLL_S: Final = 0.02
"""How often rank 0's writer thread polls for the files of the others. No training waits for it."""


class SnapshotModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    created: ops.CreateModel
    steps: int
    layout: str
    """Where the tensors of an adapter are in the flat block that runs refer to. Empty for a full model."""


class SnapshotSampler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    sampler_id: str
    kind: Literal["base", "adapter", "whole"]
    lora: model_options.LoraConfig | None = None
    layout: str = ""
    version: int | None = None
    """The version of weights that in-flight samplers share."""


class SnapshotManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int = FORMAT
    base_model: str
    arch: str
    parameters: int
    full: bool
    quantise: Quantise = ""
    ranks: int
    base_modified: bool
    """Whether the weights of the base differ from those in its folder."""
    models: Sequence[SnapshotModel]
    samplers: Sequence[SnapshotSampler]
    files: Mapping[str, CheckpointFile] = {}


class SnapshotCopy(msgspec.Struct, frozen=True):
    """What a rank has to write."""

    manifest: SnapshotManifest
    own: Mapping[str, torch.Tensor]
    offsets: Mapping[str, Sequence[int]] = {}
    """Where each shard in `own` begins in its weight."""
    runs: Mapping[str, Sequence[tuple[int, int]]] = {}
    """Where the numbers of each share of an adapter in `own` begin and end in the whole adapter, one run of them after
    the other."""
    wait: Callable[[], object] = lambda: None
    """Waits until the tensors have their values: a device may still be copying them."""


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank has written its file, or has failed."""

    files: Mapping[str, CheckpointFile] = {}
    error: str | None = None


class SnapshotWriter:
    """Writes one snapshot at a time, in a thread of its own. The dispatching thread calls `start` and `take`."""

    def __init__(self, rank: int, timeout_s: float, host: HostFiles | None = None) -> None:
        self._rank = rank
        self._host: HostFiles = host or OwnFiles()
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        # A queue: with a plain field, a result that arrives between reading and clearing it would be lost.
        self._results: SimpleQueue[SnapshotWritten] = SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        """Called from the writer thread when there is a result to take."""

    def check_free(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise StrataError(Code.PRECONDITION, "the previous snapshot is still being written")

    def start(self, number: int, folder: Path, copy: SnapshotCopy, held_s: float) -> None:
        # A daemon: a group that ends does not wait for a snapshot that it could not report.
        arguments = (number, folder, copy, held_s)
        self._thread = threading.Thread(target=self._run, args=arguments, name="snapshot", daemon=True)
        self._thread.start()

    def take(self) -> SnapshotWritten | None:
        """The result of the last snapshot, once; its generation is for its reader to set."""
        try:
            return self._results.get_nowait()
        except Empty:
            return None

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, number: int, folder: Path, copy: SnapshotCopy, held_s: float) -> None:
        started_s = time.perf_counter()
        digest, size, failure = "", 0, "the writer thread ended early"
        try:
            digest, size = self._write(folder, copy)
            failure = ""
        except (StrataError, OSError, SafetensorError) as error:
            failure = f"rank {self._rank}: {error}"
        finally:
            if self._rank == 0:
                if failure:
                    shutil.rmtree(temporary_folder(folder), ignore_errors=True)
                took_s = time.perf_counter() - started_s
                self._results.put(SnapshotWritten(0, number, digest, size, held_s, took_s, failure or None))
                self.wake()

    def _write(self, folder: Path, copy: SnapshotCopy) -> tuple[str, int]:
        named = temporary_folder(folder)
        temporary = self._host.outgoing(named)
        temporary.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            sealed = _Sealed(self._write_file(temporary, copy))
            self._host.send(named, [temporary / name for name in sealed.files])
        except (StrataError, OSError, SafetensorError) as error:
            self._seal(named, _Sealed(error=str(error)))
            raise
        failpoint("train.snapshot.before_sealed")
        self._seal(named, sealed)
        failpoint("train.snapshot.after_sealed")
        if self._rank != 0:
            self._host.sent(named)
            return "", 0
        files = self._await_ranks(temporary, copy.manifest.ranks)
        return commit(folder, msgspec.structs.replace(copy.manifest, files=files))

    def _seal(self, named: Path, sealed: _Sealed) -> None:
        temporary = self._host.outgoing(named)
        _write_sealed(temporary, self._rank, sealed)
        self._host.send(named, [temporary / _sealed_file(self._rank)])

    def _write_file(self, temporary: Path, copy: SnapshotCopy) -> dict[str, CheckpointFile]:
        failpoint("train.snapshot.before_file")
        copy.wait()
        own = temporary / rank_file(self._rank)
        offsets = {name: ShardOffsets(list(offsets)) for name, offsets in copy.offsets.items()}
        # A file has shards or shares: with two entries in the header, the same tensors would give different bytes. With
        # none, safetensors would write a header that is no JSON.
        header = {RUNS: msgspec.json.encode(copy.runs).decode()} if copy.runs else {}
        if offsets or not header:
            header[SHARDING] = msgspec.json.encode(offsets).decode()
        save_file(dict(copy.own), own, header)
        failpoint("train.snapshot.before_sync")
        return sync_and_digest([own])

    def _await_ranks(self, temporary: Path, ranks: int) -> dict[str, CheckpointFile]:
        """The files of all ranks, once all have written theirs. Removes the JSON files: the manifest replaces them."""
        files: dict[str, CheckpointFile] = {}
        deadline_s = time.monotonic() + self._timeout_s
        for rank in range(ranks):
            path = temporary / _sealed_file(rank)
            while not path.exists():
                if time.monotonic() > deadline_s:
                    raise StrataError(Code.DEADLINE, f"rank {rank} has not written its part in {self._timeout_s:g} s")
                time.sleep(POLL_S)
            sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
            if sealed.error is not None:
                raise StrataError(Code.UNAVAILABLE, f"rank {rank}: {sealed.error}")
            files |= sealed.files
        for rank in range(ranks):
            (temporary / _sealed_file(rank)).unlink()
        return files


def commit(folder: Path, manifest: SnapshotManifest) -> tuple[str, int]:
    """Write the manifest and rename the folder: it can be restored now. Returns the manifest's digest and all bytes."""
    temporary = temporary_folder(folder)
    failpoint("train.snapshot.before_manifest")
    data = msgspec.json.encode(manifest)
    (temporary / MANIFEST).write_bytes(data)
    sync_file(temporary / MANIFEST)
    sync_folder(temporary)
    failpoint("train.snapshot.before_name")
    temporary.rename(folder)
    for parent in folder.parents[:2]:
        sync_folder(parent)
    failpoint("train.snapshot.after_name")
    return sha256_hex(data), sum(file.size for file in manifest.files.values())


def read_manifest(folder: Path, digest: str) -> SnapshotManifest:
    """The manifest with this digest, of a folder that holds the manifest's files and nothing else."""
    file = folder / MANIFEST
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MANIFEST_LIMIT:
            raise _damaged(folder, MANIFEST)
        data = file.read_bytes()
        names = {entry.name for entry in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StrataError(Code.NOT_FOUND, f"there is no snapshot {folder.name!r}") from error
    if sha256_hex(data) != digest:
        raise _damaged(folder, MANIFEST)
    try:
        check_format(f"the snapshot {folder.name!r}", data, FORMAT)
        manifest = msgspec.json.decode(data, type=SnapshotManifest)
    except msgspec.MsgspecError as error:
        raise StrataError(Code.UNSUPPORTED, f"the snapshot {folder.name!r} is of another version: {error}") from error
    if names != {MANIFEST, *manifest.files}:
        raise _damaged(folder, sorted(names ^ {MANIFEST, *manifest.files})[0])
    return manifest


def verify(folder: Path, manifest: SnapshotManifest, *, rank: int, ranks: int) -> None:
    """Verify this rank's share of the files. No file may be opened before all ranks have verified theirs."""
    share = sorted(manifest.files)[rank::ranks]
    for name in share:
        status = (folder / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != manifest.files[name].size:
            raise _damaged(folder, name)
    damaged = find_damaged(folder, {name: manifest.files[name] for name in share})
    if damaged is not None:
        raise _damaged(folder, damaged)
    for name in share:
        check_header(folder / name)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def temporary_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.part")


def _sealed_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _write_sealed(folder: Path, rank: int, sealed: _Sealed) -> None:
    write_file(folder / _sealed_file(rank), msgspec.json.encode(sealed), durable=False)


def _damaged(folder: Path, name: str) -> StrataError:
    return StrataError(Code.CORRUPT, f"the snapshot {folder.name!r} is not as it was written: {name}")
