"""Checkpoints of a worker: writing and digest of its part, reporting it until all ranks have committed (polled every
0.02 to 0.5 s), and verifying parts before a load.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strata.base.digest import file_digest
from strata.base.errors import Code, StrataError
from strata.coord.core.facts import CommandKind
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.leases import Capture
from strata.coord.worker.session import WorkerSession

if TYPE_CHECKING:
    from strata.coord.worker.checkpoint_store import MemberCheckpoints

COMMIT_POLL_S: Final = (0.02, 0.5)
"""First and longest pause between two looks at a checkpoint that others have not reported."""


@dataclass(frozen=True)
class Part:
    rank: int
    uri: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint: what to load. Its world size is the number of parts."""

    checkpoint_id: str
    step: int
    generation: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Reported:
    step: int
    committed: bool
    missing_ranks: tuple[int, ...]
    tombstones: tuple[str, ...]
    """Paths of older parts that no recovery needs any more: delete them."""
    drained: bool = False
    """An operator has drained this worker: it has to leave now, and the others go on from this checkpoint."""


def manifest(message: pb.CheckpointManifest) -> Manifest:
    parts = tuple(Part(each.rank, each.uri, each.size_bytes, each.digest) for each in message.parts)
    return Manifest(message.checkpoint_id, message.step, message.generation, parts)


@dataclass(frozen=True)
class StoredPart:
    """This worker's part, as it is stored."""

    uri: str
    size: int
    digest: str


def stored_part(path: str, digest: str | None, size: int | None) -> StoredPart:
    """Size and digest of a local file are read from it unless given."""
    if "://" in path:
        if size is None or digest is None:
            raise StrataError(Code.INVALID, f"the size and the digest of {path} have to be given: it is no local file")
        return StoredPart(path, size, digest)
    file = Path(path).absolute()
    try:
        return StoredPart(
            str(file),
            file.stat().st_size if size is None else size,
            file_digest(file) if digest is None else digest,
        )
    except OSError as error:
        raise StrataError(Code.INVALID, f"cannot read the part {file}: {error.strerror}") from error


def verify_part(path: str | Path, digest: str) -> None:
    """CORRUPT unless the bytes of a local file have this digest; an empty digest was never taken and says nothing."""
    try:
        found = file_digest(Path(path))
    except OSError as error:
        raise StrataError(Code.CORRUPT, f"cannot read the part {path}: {error.strerror}") from error
    if digest and found != digest:
        raise StrataError(Code.CORRUPT, f"the part {path} is not what was written: {found}, not {digest}")


@dataclass(frozen=True)
class CheckpointReporter:
    session: WorkerSession
    store: MemberCheckpoints | None = None
    """Fetches parts on hosts that share no storage."""

    def begin(self, step: int) -> Capture:
        self.session.check()
        self.session.commands.take(CommandKind.CHECKPOINT_NOW)
        capture = self.session.leases.begin(self.session.ids.new("checkpoint"), step)
        self.session.liveness.status = pb.WORKER_STATUS_CHECKPOINTING
        return capture

    def give_up(self, capture: Capture) -> None:
        self.session.leases.end(capture)

    async def report(self, capture: Capture, path: str | Path, digest: str | None, size: int | None) -> Reported:
        return await self._report(capture, await self._stored(path, digest, size))

    async def commit(
        self, step: int, path: str | Path, digest: str | None, size: int | None, within_s: float | None
    ) -> Reported:
        """Begin, report and, unless `within_s` is 0, wait for the other ranks; the last reply."""
        capture = self.begin(step)
        try:
            stored = await self._stored(path, digest, size)
            reported = await self._report(capture, stored)
        finally:
            self.give_up(capture)
        if within_s == 0:
            return reported
        until_s = self.session.clock.monotonic_s() + (within_s or float("inf"))
        backoff_s, longest_s = COMMIT_POLL_S
        while not reported.committed:
            if self.session.clock.monotonic_s() > until_s:
                missing = ", ".join(map(str, reported.missing_ranks))
                raise StrataError(Code.DEADLINE, f"the checkpoint of step {step} lacks the ranks {missing}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(longest_s, backoff_s * 1.5)
            reported = await self._report(capture, stored)
        return reported

    async def _report(self, capture: Capture, stored: StoredPart) -> Reported:
        session = self.session
        generation = 0

        def make() -> pb.CheckpointInfo:
            nonlocal generation
            generation = session.generation
            return pb.CheckpointInfo(
                checkpoint_id=capture.checkpoint_id,
                path=stored.uri,
                size_bytes=stored.size,
                job_id=session.job,
                worker_id=session.worker_id,
                incarnation=session.incarnation,
                generation=generation,
                step=capture.step,
                rank=session.rank,
                world_size=session.world_size,
                digest=stored.digest,
                consumed=capture.consumed,
                explicit_consumed=True,
            )

        ack = await session.call(lambda stub: stub.ReportCheckpoint, make, even_stale=True)
        session.leases.end(capture)
        if capture.step == session.agreement.step:
            session.agreement.end()
        session.liveness.status = pb.WORKER_STATUS_TRAINING
        if ack.drain:
            session.commands.drain()
        elif ack.generation_ends and session.generation == generation:
            session.mark_stale(generation + 1)
        if ack.committed and self.store is not None:
            await asyncio.to_thread(self.store.publish, stored.uri)
        return Reported(ack.step, ack.committed, tuple(ack.missing_ranks), tuple(ack.tombstones), ack.drain)

    async def _stored(self, path: str | Path, digest: str | None, size: int | None) -> StoredPart:
        stored = await asyncio.to_thread(stored_part, os.fspath(path), digest, size)
        return stored if self.store is None else await asyncio.to_thread(self.store.named, stored)
