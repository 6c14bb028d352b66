"""The database of a hub that has run for days: 100,000 jobs, 10,000 hosts, and what belongs to them.

The same rows for both databases, written directly: as requests they would take hours. Most jobs have ended, a thousand
of them in each of the last hours; two run on every host; the newest ones wait.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from strata.fleet.artifacts.manifest import ArtifactFile, ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.core.amounts import Taken
from strata.fleet.core.capability import Capability, Gpu
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.store.rows import encode
from strata.hub.tables import open_tables

OWNERS: Final = 20
PROJECTS: Final = ("default", "vision", "speech", "text", "robots")
KINDS: Final = {
    "resnet": Needs(require_cuda=True, min_gpus=1),
    "whisper": Needs(require_cuda=True, min_gpus=1, min_ram_gib=32.0),
    "llama": Needs(require_cuda=True, min_gpus=2),
    "gemma": Needs(require_cuda=True, min_gpus=1, min_vram_gib=60.0),
    "huge": Needs(require_cuda=True, min_gpus=8),
    "probe": Needs(),
}
"""What the jobs of each model need. Those that wait are of the last two: the one needs a whole host, and every host has
jobs; hosts without cards take the other."""
MODELS: Final = tuple(KINDS)
TRIALS: Final = 200
"""Of each sweep."""
WIDE: Final = 1000
"""Trials of the largest sweep."""
EVERY_S: Final = 3.6
"""A job ends after the other."""
CARDS: Final = 8
SERVERS: Final = 20
STALE_S: Final = 36_000.0
"""No host is lost while the bench looks at it."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class FleetSize:
    jobs: int
    hosts: int

    @property
    def running(self) -> int:
        return 2 * self.hosts

    @property
    def pending(self) -> int:
        return self.jobs // 25

    @property
    def ended(self) -> int:
        return self.jobs - self.running - self.pending

    def status(self, number: int) -> str:
        if number > self.jobs - self.pending:
            return "pending"
        if number > self.ended:
            return "running"
        return "failed" if number % 50 == 0 else "cancelled" if number % 50 == 1 else "completed"


def job_id(number: int) -> str:
    return f"job1_{_digest(number)}"


def host_id(number: int) -> str:
    return f"host_{number:06d}"


def artifact_id(number: int) -> str:
    return f"artifact1_{_digest(-number)}"


def _digest(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


async def fill(database: str, size: FleetSize, now_s: float) -> None:
    async with open_tables(database):
        pass
    tables = {name: list(rows) for name, rows in _tables(size, now_s).items()}
    if database.startswith("sqlite:"):
        with closing(sqlite3.connect(database.partition(":")[2])) as db, db:
            for name, rows in tables.items():
                db.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            db.execute(_READY)
        return
    async with await psycopg.AsyncConnection.connect(database) as connection, connection.cursor() as cursor:
        for name, rows in tables.items():
            async with cursor.copy(f"COPY {name} FROM STDIN") as copy:
                for row in rows:
                    await copy.write_row(row)
        await cursor.execute(_READY)
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute("VACUUM ANALYZE")


_READY: Final = (
    "INSERT INTO ready (seq, class_id, priority, since, owner)"
    " SELECT seq, class_id, priority, created_at, owner FROM job WHERE status = 'pending'"
)


def _tables(size: FleetSize, now_s: float) -> Mapping[str, Iterator[Row]]:
    """By table and its columns; those with references come after what they refer to."""
    return {
        "req_class (key, spec)": _classes(),
        "trainer (digest, spec)": iter([_TRAINER]),
        "trainer_name (project, name, digest)": ((project, "default", _TRAINER[0]) for project in PROJECTS),
        "project (name, owner, made_at)": ((project, "owner-0", 0.0) for project in PROJECTS[1:]),
        "host (id, name, capability, registered_at, state, state_reason, agent_version, pool)": _hosts(size, now_s),
        # As if each had sent a heartbeat a moment ago, for as long as the bench runs.
        "host_beat (host_id, seen)": ((host_id(each), now_s + STALE_S / 2) for each in range(size.hosts)),
        "host_sample (step, host_id, at, body)": _samples(now_s),
        "job (id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason, artifact,"
        " declared, orphaned, waits_for, model, sweep, priority, trainer, charged, lost, excused, checkpoint, attempts,"
        " project, trainer_digest, submitted_by, owner, label)": _jobs(size, now_s),
        "lease (job_id, host_id, epoch, expires_at, expired)": _leases(size, now_s),
        "attempt (job_id, epoch, host_id, claim_id, claimed_at, started_at, ended_at, outcome, cause, error, artifact,"
        " checkpoint, facts, number, trainer_digest, taken)": _attempts(size, now_s),
        "server (job_id, epoch, address, models, used_at)": (
            (job_id(number), 1, "127.0.0.1:1", encode(["llama"]), now_s)
            for number in range(size.ended + 1, size.ended + 1 + SERVERS)
        ),
        "event (at, actor, kind, subject, body)": _events(size, now_s),
        "artifact (id, manifest, size, committed_at, pinned, owner)": _artifacts(size, now_s),
        "artifact_lineage (id, artifact_id, committed_at, kind, job_id, epoch, model, mode, actor, body)": _lineages(
            size, now_s
        ),
        "artifact_metric (lineage, name, value)": (
            (place, "val_loss", _loss(number)) for place, number in enumerate(_completed(size), start=1)
        ),
    }


_TRAINER: Final = (
    "trainer1_0",
    encode(TrainerSpec(name="default", command=("python", "train.py"), directory="/srv/train")),
)


def _classes() -> Iterator[Row]:
    for model, needs in KINDS.items():
        requirement = JobSpec(model=model, needs=needs).requirement
        yield requirement.key, encode(requirement)


def _sweep(number: int) -> str:
    """Three of five jobs are trials."""
    if number <= WIDE:
        return "wide"
    return f"sweep-{number // TRIALS:04d}" if number % 5 < 3 else ""


def _model(size: FleetSize, number: int) -> str:
    return MODELS[4 + number % 2] if size.status(number) == "pending" else MODELS[number % 4]


def _spec(size: FleetSize, number: int) -> JobSpec:
    sweep = _sweep(number)
    return JobSpec(
        model=_model(size, number),
        name=f"{sweep}/{number}" if sweep else f"train-{number}",
        sweep=sweep,
        project=PROJECTS[number // TRIALS % len(PROJECTS)],
        hyper={"rate": 1e-4 * (1 + number % 97), "layers": number % 7, "optimizer": "adam"},
        seed=number,
        needs=KINDS[_model(size, number)],
        kind="server" if size.ended < number <= size.ended + SERVERS else "train",
    )


def _ended_at(size: FleetSize, number: int, now_s: float) -> float:
    return now_s - (size.ended - number) * EVERY_S


def _times(size: FleetSize, number: int, now_s: float) -> tuple[float, float]:
    """When a job was queued, and when it changed last."""
    status = size.status(number)
    if status == "pending":
        since_s = now_s - (size.jobs - number) * 10.0
        return since_s, since_s
    if status == "running":
        return now_s - 90_000.0, now_s - 3600.0 - number % 80_000
    ended_s = _ended_at(size, number, now_s)
    return ended_s - 7200.0, ended_s


def _host(size: FleetSize, number: int) -> str:
    return "" if size.status(number) == "pending" else host_id(number % size.hosts)


def _jobs(size: FleetSize, now_s: float) -> Iterator[Row]:
    for number in range(1, size.jobs + 1):
        status = size.status(number)
        spec = _spec(size, number)
        created_s, changed_s = _times(size, number, now_s)
        reason = "exited with status 1: ValueError: Input X contains NaN." if status == "failed" else ""
        tries = 0 if status == "pending" else _tries(number)
        yield (
            job_id(number), encode(spec), MODELS.index(spec.model) + 1, status, tries, created_s, changed_s, 0.0,
            _host(size, number), reason, artifact_id(number) if status == "completed" else "", True, False, 0,
            spec.model, spec.sweep, number % 3, "default", 0, 0, 0, "", tries, spec.project, _TRAINER[0],
            f"key:{number % OWNERS}", f"owner-{number % OWNERS}", spec.label,
        )  # fmt: skip


def _tries(number: int) -> int:
    """The host of every tenth job was lost once."""
    return 2 if number % 10 == 0 else 1


def _leases(size: FleetSize, now_s: float) -> Iterator[Row]:
    for number in range(size.ended + 1, size.ended + size.running + 1):
        yield job_id(number), _host(size, number), _tries(number), now_s + STALE_S, False


def _attempts(size: FleetSize, now_s: float) -> Iterator[Row]:
    for number in range(1, size.ended + size.running + 1):
        status, (_, changed_s) = size.status(number), _times(size, number, now_s)
        taken = encode(Taken(cores=4, ram_gib=32.0, cards=(f"GPU-{number // size.hosts % CARDS}",)))
        running, tries = status == "running", _tries(number)
        for epoch in range(1, tries + 1):
            last = epoch == tries
            began_s = (changed_s if running else changed_s - 3600.0) - (0.0 if last else 1200.0)
            ended_s = None if running and last else changed_s if last else began_s + 600.0
            outcome = "lost" if not last else "" if running else status
            facts = {"ran_s": 3000.0, "metrics": {"loss": _loss(number), "accuracy": 1 - _loss(number)}}
            yield (
                job_id(number), epoch, _host(size, number), f"c{number}-{epoch}", began_s, began_s + 20.0, ended_s,
                outcome, "", "", "", "", encode(facts if status == "completed" else {}), epoch, _TRAINER[0], taken,
            )  # fmt: skip


def _loss(number: int) -> float:
    return 0.1 + number % 1009 / 1009


def _events(size: FleetSize, now_s: float) -> Iterator[Row]:
    for number in range(1, size.ended + size.running + 1):
        status, (_, changed_s) = size.status(number), _times(size, number, now_s)
        began_s = changed_s if status == "running" else changed_s - 3600.0
        actor, job = f"host:{_host(size, number)}", job_id(number)
        if _tries(number) > 1:
            yield began_s - 600.0, "hub", "job.expired", job, encode({"epoch": 1, "seen_at_s": began_s - 645.0})
        yield began_s, actor, "job.claimed", job, encode({"epoch": _tries(number)})
        yield began_s + 20.0, actor, "job.started", job, encode({"epoch": _tries(number)})
        if status != "running":
            yield changed_s, actor, f"job.{status}", job, encode({"epoch": _tries(number)})


def _hosts(size: FleetSize, now_s: float) -> Iterator[Row]:
    for number in range(size.hosts):
        cards = tuple(Gpu(name="A100", vram_bytes=80 << 30, uuid=f"GPU-{card}") for card in range(CARDS))
        capability = Capability(
            hostname=f"node-{number:05d}",
            cores=64,
            ram_bytes=512 << 30,
            gpus=cards,
            cuda="12.4",
            labels={"rack": str(number % 99)},
        )
        yield host_id(number), f"node-{number:05d}", encode(capability), now_s - 9e6, "active", "", "", f"p{number % 4}"


def _samples(now_s: float) -> Iterator[Row]:
    """Of the fleet, a day of minutes."""
    for minute in range(1440):
        values = {"running": 2e4, "waiting": 2e3 + minute, "busy_cards": 2e4 + math.sin(minute), "goodput": 0.9}
        yield 60, "fleet", (now_s // 60 - minute) * 60, encode(values)


def _completed(size: FleetSize) -> Sequence[int]:
    return [number for number in range(1, size.ended + 1) if size.status(number) == "completed"]


def _artifacts(size: FleetSize, now_s: float) -> Iterator[Row]:
    manifest = ArtifactManifest(
        files=(ArtifactFile(path="model.bin", size=1 << 20, sha256=_digest(0), chunks=(_digest(0),)),)
    )
    for number in _completed(size):
        made_s = _ended_at(size, number, now_s)
        yield artifact_id(number), manifest.encode(), 1 << 20, made_s, "", f"owner-{number % OWNERS}"


def _lineages(size: FleetSize, now_s: float) -> Iterator[Row]:
    for number in _completed(size):
        spec = _spec(size, number)
        made = Lineage(
            kind=ArtifactKind.RESULT,
            job_id=job_id(number),
            epoch=_tries(number),
            model=spec.model,
            mode=spec.mode,
            metrics={"val_loss": _loss(number)},
        )
        yield (
            f"lineage1_{_digest(-number)}", artifact_id(number), _ended_at(size, number, now_s), str(made.kind),
            made.job_id, made.epoch, made.model, made.mode, f"host:{_host(size, number)}", encode(made),
        )  # fmt: skip
