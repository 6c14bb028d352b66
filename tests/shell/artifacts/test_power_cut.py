"""Cut the power between any two system calls of a put: what is visible afterwards is whole, what was acked is visible.

The calls that reach the disk are recorded from a real put. Then, for each moment, the states the disk may be in are
built: content that was not synced is there, half there, or zeros; a name that was not synced is the old or the new one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from strata.base.digest import sha256_hex
from strata.fleet.artifacts import disk
from strata.fleet.artifacts.disk import DiskChunks
from strata.fleet.artifacts.manifest import ArtifactChunk
from tests.conformance.artifacts.making import chunk_of, in_pieces, noise

CONTENTS = [noise(2_500_000, seed=seed) for seed in range(2)]


@dataclass
class Tape:
    """`("write", inode, bytes)`, `("sync", inode)`, `("name", new, inode)`, `("folder", path)`, `("acked", digest)`."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()
    real_fsync, real_replace, real_write = os.fsync, Path.replace, disk._Incoming.write

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        tape.calls.append(("folder", str(path)) if path.is_dir() else ("sync", os.fstat(descriptor).st_ino))

    def replace(path: Path, target: Path) -> Path:
        inode = path.stat().st_ino
        done = real_replace(path, target)
        tape.calls.append(("name", str(target), inode))
        return done

    def write(incoming: disk._Incoming, parts: list[bytes]) -> None:
        real_write(incoming, parts)
        inode = os.fstat(incoming.file.fileno()).st_ino
        tape.calls.append(("write", inode, b"".join(parts)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(disk._Incoming, "write", write)
    return tape


@dataclass
class Disk:
    """What surely is on the disk, and what only may be."""

    written: dict[int, bytes] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    """Chunks whose name is durable."""
    pending: dict[str, int] = field(default_factory=dict)
    acked: set[str] = field(default_factory=set)

    def play(self, call: tuple[Any, ...]) -> None:
        match call:
            case ("write", inode, content):
                self.written[inode] = self.written.get(inode, b"") + content
            case ("sync", inode):
                self.synced[inode] = self.written[inode]
            case ("name", new, inode):
                self.pending[new] = inode
            case ("folder", path):
                for name in [name for name in self.pending if str(Path(name).parent) == path]:
                    self.names[name] = self.pending.pop(name)
            case ("acked", digest):
                self.acked.add(digest)

    def states(self) -> Iterator[dict[str, bytes]]:
        """Each way the disk may look after the cut: path to content."""
        for visible in ({}, self.pending):
            for loss in ("kept", "half", "zeros", "empty"):
                yield {Path(name).name: self._content(inode, loss) for name, inode in {**self.names, **visible}.items()}

    def _content(self, inode: int, loss: str) -> bytes:
        sure, written = self.synced.get(inode, b""), self.written.get(inode, b"")
        rest = written[len(sure) :]
        match loss:
            case "kept":
                return written
            case "half":
                return sure + rest[: len(rest) // 2]
            case "zeros":
                return sure + bytes(len(rest))
            case _:
                return sure


async def record(tape: Tape, folder: Path) -> None:
    store = await DiskChunks.open(folder, keep_free_bytes=0)
    tape.calls.clear()
    for content in CONTENTS:
        chunk: ArtifactChunk = chunk_of(content)
        await store.put(chunk, in_pieces(content))
        tape.calls.append(("acked", chunk.digest))
    await store.close()


def cuts(tape: Tape) -> Iterator[tuple[Disk, dict[str, bytes]]]:
    for end in range(len(tape.calls) + 1):
        disk = Disk()
        for call in tape.calls[:end]:
            disk.play(call)
        for state in disk.states():
            yield disk, state


async def test_after_a_power_cut_every_visible_chunk_is_whole_and_every_acked_one_visible(
    tape: Tape, tmp_path: Path
) -> None:
    await record(tape, tmp_path / "store")
    assert [call[0] for call in tape.calls if call[0] != "write"] == ["sync", "name", "folder", "acked"] * len(CONTENTS)
    seen = 0
    for after, state in cuts(tape):
        assert after.acked <= state.keys()
        for digest, content in state.items():
            assert sha256_hex(content) == digest
        seen += 1
    assert seen > 8 * 10


@pytest.mark.parametrize("left_out", ["sync", "folder"])
async def test_without_either_sync_the_same_check_finds_a_loss(tape: Tape, tmp_path: Path, left_out: str) -> None:
    await record(tape, tmp_path / "store")
    tape.calls = [call for call in tape.calls if call[0] != left_out]
    losses = [
        True
        for after, state in cuts(tape)
        if not after.acked <= state.keys() or any(sha256_hex(content) != name for name, content in state.items())
    ]
    assert losses
