"""Decides which artifacts, chunks and sources a host may read: those that the jobs of its live leases name, remembered
for 10 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.manifest import ArtifactKind
from strata.fleet.artifacts.ports import LineageFilter
from strata.fleet.artifacts.service import Artifacts
from strata.fleet.core.job import HELD
from strata.fleet.core.jobspec import TrainerSpec, gang_ids
from strata.fleet.ports import JobStore, PlanStore
from strata.fleet.records import JobFilter, JobRow

REMEMBER_S: Final = 10.0
"""How long a host may go on reading what a lease named: a download asks for every chunk."""
LAST_CHECKPOINTS: Final = 4
"""Checkpoints of each member of a gang that the others may read: the last one may not have been uploaded by all of
them."""
_MAX_LEASES: Final = 1024
_MAX_HOSTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Named:
    until_s: float
    artifacts: frozenset[str]
    blobs: frozenset[str]
    """SHA-256 of sources that were uploaded as one file."""
    chunks: frozenset[str]


class LeasedReads:
    def __init__(self, jobs: JobStore, plans: PlanStore, artifacts: Artifacts, clock: Clock) -> None:
        self._jobs = jobs
        self._plans = plans
        self._artifacts = artifacts
        self._clock = clock
        self._named: dict[str, _Named] = {}

    async def check_artifact(self, host_id: str, artifact_id: str) -> None:
        """FORBIDDEN unless a live lease of the host names it; whether it exists is not told."""
        if not self._known(host_id) or artifact_id not in self._named[host_id].artifacts:
            _refuse_unless(artifact_id in (await self._look_up(host_id)).artifacts, "artifact")

    async def check_chunk(self, host_id: str, digest: str) -> None:
        if not self._known(host_id) or digest not in self._named[host_id].chunks:
            _refuse_unless(digest in (await self._look_up(host_id)).chunks, "chunk")

    async def check_source(self, host_id: str, sha256: str) -> None:
        if not self._known(host_id) or sha256 not in self._named[host_id].blobs:
            _refuse_unless(sha256 in (await self._look_up(host_id)).blobs, "source")

    async def check_job(self, host_id: str, job_id: str) -> None:
        _refuse_unless(job_id in {row.id for row in await self._leased_jobs(host_id)}, "job")

    async def check_inputs(self, trainer: TrainerSpec) -> None:
        """FORBIDDEN if it names an artifact that an attempt made: the state of a server has the keys of its tenants.

        An artifact that does not exist passes: no host can read it, also if an attempt makes it later.
        """
        for artifact_id in _named_artifacts(trainer):
            made = await self._artifacts.index.lineages(LineageFilter(artifact_ids=[artifact_id], limit=1))
            if made and not await self._is_input(artifact_id):
                raise StrataError(
                    Code.FORBIDDEN,
                    f"the trainer {trainer.name!r} names {artifact_id}, which is neither data nor a source",
                    hint="upload it: strata data push FOLDER NAME",
                )

    async def _is_input(self, artifact_id: str) -> bool:
        """Says whether a person uploaded it as data or as a source."""
        for kind in (ArtifactKind.DATA, ArtifactKind.SOURCE):
            if await self._artifacts.index.lineages(LineageFilter(artifact_ids=[artifact_id], kind=kind, limit=1)):
                return True
        return False

    async def last_checkpoints(self, job_id: str) -> list[str]:
        """Returns what the attempts of a job uploaded last, the latest first."""
        wanted = LineageFilter(job_id=job_id, kind=ArtifactKind.CHECKPOINT, attempted=True, limit=LAST_CHECKPOINTS)
        return [row.artifact_id for row in await self._artifacts.index.lineages(wanted)]

    def _known(self, host_id: str) -> bool:
        named = self._named.get(host_id)
        return named is not None and self._clock.monotonic_s() < named.until_s

    async def _leased_jobs(self, host_id: str) -> list[JobRow]:
        return list(await self._jobs.select(JobFilter(status=tuple(HELD), host_id=host_id, limit=_MAX_LEASES)))

    async def _look_up(self, host_id: str) -> _Named:
        artifacts: set[str] = set()
        blobs: set[str] = set()
        for row in await self._leased_jobs(host_id):
            if row.spec.gang is not None:
                for member in gang_ids(row.id, row.spec):
                    artifacts.update(await self.last_checkpoints(member))
            for attempt in await self._jobs.attempts(row.id):
                artifacts |= {attempt.checkpoint} - {""}
                if attempt.epoch == row.epoch and attempt.trainer_digest:
                    trainer = await self._plans.trainer(attempt.trainer_digest)
                    # Checked here, too: trainers are stored from before they were checked.
                    named_artifacts = _named_artifacts(trainer)
                    artifacts |= {each for each in named_artifacts if await self._is_input(each)}
                    blobs |= {trainer.bundle.removeprefix("sha256:")} - named_artifacts
        named = _Named(
            until_s=self._clock.monotonic_s() + REMEMBER_S,
            artifacts=frozenset(artifacts),
            blobs=frozenset(blobs),
            chunks=await self._chunks(artifacts),
        )
        if len(self._named) >= _MAX_HOSTS:
            self._named.clear()
        self._named[host_id] = named
        return named

    async def _chunks(self, artifacts: set[str]) -> frozenset[str]:
        chunks: set[str] = set()
        for artifact_id in artifacts:
            try:
                chunks |= set((await self._artifacts.open(artifact_id)).manifest.chunks())
            except StrataError as error:
                # Removed since: then nobody can read it.
                if error.code not in (Code.NOT_FOUND, Code.GONE):
                    raise
        return frozenset(chunks)


def _named_artifacts(trainer: TrainerSpec) -> frozenset[str]:
    named = {source.digest for source in trainer.data.values() if source.dataset}
    return frozenset(named | ({trainer.bundle} if trainer.bundle.startswith("artifact1_") else set()))


def _refuse_unless(allowed: bool, what: str) -> None:  # noqa: FBT001 - the decision itself
    if not allowed:
        raise StrataError(Code.FORBIDDEN, f"no lease of this host names this {what}")
