"""Artifacts on the hub's disk beside bare writing: `python -m bench artifacts`.

Everything lies under the system's temporary directory; point TMPDIR at the disk that is to be measured.

- `upload`: plan, chunks in pieces as a server hands them on, commit; four chunks at once, as an agent sends them.
  Bare is one thread that hashes the same bytes, writes them to one file and syncs it once.
- `upload.scan`: the same with the sender's part, who reads and hashes the files before; nobody asked for a goal.
- `resume`: an upload whose line is cut at random places; how much was sent more than once. Bare is a sender who begins
  the chunk that was cut from its start.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.interleave import Comparison, interleave
from bench.report import Report
from strata.base.clock import SystemClock
from strata.database import events
from strata.database.migrations import SqliteComponents
from strata.database.sqlite import SqliteThread
from strata.database.transaction import SqliteDatabase
from strata.fleet.artifacts import files, tables
from strata.fleet.artifacts.disk import DiskChunks
from strata.fleet.artifacts.index import ArtifactIndex
from strata.fleet.artifacts.manifest import CHUNK_BYTES, ArtifactChunk, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.artifacts.service import Artifacts
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.wire.artifacts import MissingChunk

PIECE: Final = 64 << 10
AT_ONCE: Final = 4
CUTS: Final = 20
OWNER: Final = "host_bench"
MADE: Final = Lineage(kind=ArtifactKind.RESULT, model="bench")
FILE_BYTES: Final = 100_000_000
"""Not a multiple of a chunk: every file ends in a short one."""


@dataclass(frozen=True)
class Turns:
    rounds: int
    upload_bytes: int
    resume_bytes: int
    resumes: int


QUICK: Final = Turns(rounds=6, upload_bytes=256 << 20, resume_bytes=256 << 20, resumes=1)
LONG: Final = Turns(rounds=8, upload_bytes=1 << 30, resume_bytes=1 << 30, resumes=2)


async def run(report: Report, *, quick: bool) -> None:
    turns = QUICK if quick else LONG
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        folder = Path(name)
        source = make(folder / "source", turns.upload_bytes)
        report.progress("uploads")
        await uploads(report, folder, source, turns)
        report.progress("uploads that are cut")
        shutil.rmtree(source)
        await resumes(report, folder, make(folder / "source", turns.resume_bytes), turns)


def make(folder: Path, size: int) -> Path:
    folder.mkdir()
    chance = random.Random(0)
    for number, start in enumerate(range(0, size, FILE_BYTES)):
        content = chance.randbytes(min(FILE_BYTES, size - start))
        (folder / f"part-{number:03}.bin").write_bytes(content)
    return folder


async def uploads(report: Report, folder: Path, source: Path, turns: Turns) -> None:
    manifest = files.scan(source)
    content = load(source, manifest)

    async def ours() -> float:
        return await stored(folder, lambda hub: upload(hub, manifest, content))

    async def with_scan() -> float:
        async def whole(hub: Artifacts) -> None:
            scanned = await asyncio.to_thread(files.scan, source)
            await upload(hub, scanned, content)

        return await stored(folder, whole)

    async def bare() -> float:
        return await asyncio.to_thread(write_bare, folder / "bare.bin", list(content.values()))

    rate = manifest.size / 1e6
    for case, measure, goal in (("upload", ours, 0.7), ("upload.scan", with_scan, None)):
        found = await interleave(measure, bare, turns.rounds, better="lower")
        rates = Comparison([rate / each for each in found.ours], [rate / each for each in found.bare])
        report.add(case, "MB/s", rates, goal=goal, note=f"{manifest.size >> 20} MiB, {AT_ONCE} chunks at once")


def load(source: Path, manifest: ArtifactManifest) -> dict[str, bytes]:
    return {piece.digest: files.read_piece(source, piece) for piece in files.pieces(manifest, manifest.chunks())}


def write_bare(path: Path, parts: Sequence[bytes]) -> float:
    started = time.perf_counter()
    whole = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for part in parts:
            whole.update(part)
            file.write(part)
        os.fsync(file.fileno())
    took = time.perf_counter() - started
    path.unlink()
    return took


async def open_hub(folder: Path, stack: AsyncExitStack) -> Artifacts:
    components = SqliteComponents([events.SQLITE, sqlite_tables.COMPONENT, tables.SQLITE])
    thread = await SqliteThread.open(folder / "hub.db", components)
    stack.push_async_callback(thread.close)
    chunks = await DiskChunks.open(folder / "artifacts")
    stack.push_async_callback(chunks.close)
    return Artifacts(ArtifactIndex(SqliteDatabase(thread)), chunks, SystemClock())


async def stored(folder: Path, act: Callable[[Artifacts], Awaitable[None]]) -> float:
    """How long `act` takes in a hub that is new and is thrown away; opening and removing it do not count."""
    place = folder / "hub"
    place.mkdir()
    async with AsyncExitStack() as stack:
        hub = await open_hub(place, stack)
        started = time.perf_counter()
        await act(hub)
        took = time.perf_counter() - started
    shutil.rmtree(place)
    return took


async def upload(hub: Artifacts, manifest: ArtifactManifest, content: Mapping[str, bytes]) -> None:
    plan = await hub.plan(manifest.chunks(), OWNER)
    slots = asyncio.Semaphore(AT_ONCE)

    async def put(each: MissingChunk) -> None:
        async with slots:
            await hub.put_chunk(ArtifactChunk(each.digest, each.size), in_pieces(content[each.digest]), OWNER)

    await asyncio.gather(*map(put, plan.missing))
    await hub.commit(manifest, MADE, OWNER)


async def in_pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]


@dataclass
class Line:
    """A connection that counts what was sent and is cut after each of these amounts."""

    cuts: list[int]
    sent: int = 0
    happened: int = field(default=0)

    async def body(self, content: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(content), PIECE):
            piece = content[start : start + PIECE]
            self.sent += len(piece)
            if self.cuts and self.sent >= self.cuts[0]:
                # The piece that was on the way is lost.
                self.cuts.pop(0)
                self.happened += 1
                raise ConnectionResetError
            yield piece


async def resumes(report: Report, folder: Path, source: Path, turns: Turns) -> None:
    manifest = files.scan(source)
    content = load(source, manifest)
    figures: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns.resumes):
        for goes_on in (True, False):
            cuts = sorted(random.Random(turn).sample(range(manifest.size), CUTS))
            place = folder / "resumed"
            place.mkdir()
            figures[goes_on].append(100 * await resent(place, manifest, content, Line(cuts), goes_on=goes_on))
            shutil.rmtree(place)
    found = Comparison(figures[True], figures[False], "lower")
    note = f"{manifest.size >> 20} MiB, {CUTS} cuts; bare: from the start of the chunk ({CHUNK_BYTES >> 20} MiB)"
    report.add("resume", "% sent again", found, limit=5.0, note=note)


async def resent(
    place: Path, manifest: ArtifactManifest, content: Mapping[str, bytes], line: Line, *, goes_on: bool
) -> float:
    """The share of the bytes that was sent in vain, until the artifact is committed."""
    async with AsyncExitStack() as stack:
        hub = await open_hub(place, stack)
        while missing := (await hub.plan(manifest.chunks(), OWNER)).missing:
            try:
                for each in missing:
                    offset = each.received if goes_on else 0
                    body = line.body(content[each.digest][offset:])
                    await hub.put_chunk(ArtifactChunk(each.digest, each.size), body, OWNER, offset=offset)
            except ConnectionResetError:
                continue
        await hub.commit(manifest, MADE, OWNER)
    assert line.happened == CUTS
    return (line.sent - sum(manifest.chunks().values())) / manifest.size
