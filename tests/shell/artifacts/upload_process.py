"""A hub that uploads artifacts into its own store, one after the other, printing each id once its commit returned.

    python upload_process.py FOLDER TURNS [FAILPOINT SKIP]

With a failpoint it kills itself there. Between the uploads it removes, collects and erases, so that a crash finds it
in the middle of these too. The content of a turn follows from its number, so a later process repeats it.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from strata.base.digest import sha256_hex
from strata.base.failpoint import arm, kill
from strata.database import events
from strata.database.migrations import SqliteComponents
from strata.database.sqlite import SqliteThread
from strata.database.transaction import SqliteDatabase
from strata.fleet.artifacts import maintenance, tables
from strata.fleet.artifacts.disk import DiskChunks
from strata.fleet.artifacts.index import ArtifactIndex
from strata.fleet.artifacts.manifest import (
    CHUNK_BYTES,
    ArtifactChunk,
    ArtifactFile,
    ArtifactKind,
    ArtifactManifest,
    Lineage,
)
from strata.fleet.artifacts.service import Artifacts, once
from strata.fleet.store.sqlite import tables as sqlite_tables
from tests.support.manual_clock import ManualClock

SMALL = 20_000
GRACE_S = 1000.0


def files_of(turn: int) -> dict[str, bytes]:
    """One part that every turn has, one of its own."""
    return {"own": f"{turn} ".encode() * SMALL, "same": b"common " * SMALL}


def manifest_of(files: dict[str, bytes]) -> ArtifactManifest:
    assert all(len(content) <= CHUNK_BYTES for content in files.values())
    described = [
        ArtifactFile(path=path, size=len(content), sha256=sha256_hex(content), chunks=(sha256_hex(content),))
        for path, content in sorted(files.items())
    ]
    return ArtifactManifest(files=tuple(described))


async def open_artifacts(folder: Path, stack: AsyncExitStack) -> Artifacts:
    components = SqliteComponents([events.SQLITE, sqlite_tables.COMPONENT, tables.SQLITE])
    thread = await SqliteThread.open(folder / "hub.db", components)
    stack.push_async_callback(thread.close)
    chunks = await DiskChunks.open(folder / "artifacts", keep_free_bytes=0)
    stack.push_async_callback(chunks.close)
    # Time goes on from one process to the next.
    opened = len(list(folder.glob("opened-*")))
    (folder / f"opened-{opened}").touch()
    return Artifacts(ArtifactIndex(SqliteDatabase(thread)), chunks, ManualClock(1.7e9 + 1e6 * opened), grace_s=GRACE_S)


async def upload(artifacts: Artifacts, turn: int) -> str:
    files = files_of(turn)
    manifest = manifest_of(files)
    parts = {sha256_hex(content): content for content in files.values()}
    for each in (await artifacts.plan(manifest.chunks(), "host")).missing:
        await artifacts.put_chunk(ArtifactChunk(each.digest, each.size), once(parts[each.digest]), "host")
    done = await artifacts.commit(manifest, Lineage(kind=ArtifactKind.RESULT, model="m"), "host:a")
    return done.artifact_id


async def scrub(artifacts: Artifacts) -> None:
    assert isinstance(artifacts.clock, ManualClock)
    await artifacts.clock.advance(1)
    await maintenance.scrub(artifacts, max_bytes=1 << 40, bytes_per_s=float("inf"), every_s=0)


async def main(folder: Path, turns: int) -> None:
    async with AsyncExitStack() as stack:
        artifacts = await open_artifacts(folder, stack)
        assert isinstance(artifacts.clock, ManualClock)
        for turn in range(turns):
            artifact_id = await upload(artifacts, turn)
            sys.stdout.write(f"+{artifact_id}\n")
            sys.stdout.flush()
            if turn % 2:
                sys.stdout.write(f"-{artifact_id}\n")
                sys.stdout.flush()
                await artifacts.remove(artifact_id, "odd", "operator")
            await damage(artifacts, folder, turn)
            for _ in range(2):
                await artifacts.clock.advance(GRACE_S)
                await maintenance.collect_garbage(artifacts, dry_run=False)


async def damage(artifacts: Artifacts, folder: Path, turn: int) -> None:
    """Damage what every turn has, read it, and heal it."""
    content = files_of(turn)["same"]
    digest = sha256_hex(content)
    (folder / "artifacts/chunks" / digest[:2] / digest).write_bytes(b"rot")
    await scrub(artifacts)
    await artifacts.put_chunk(ArtifactChunk(digest, len(content)), once(content), "host")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        arm(sys.argv[3], kill, skip=int(sys.argv[4]))
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
