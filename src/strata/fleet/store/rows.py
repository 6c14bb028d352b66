"""SQL fragments and decoders that several stores share: columns of a job, conditions such as hidden, unfinished and
held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from strata.fleet.core.amounts import UNKNOWN, Amounts, Taken
from strata.fleet.core.claiming import OpenAttempt, OpenReservation
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.records import JobLease, JobRow

JOB: Final = (
    "id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason, artifact, declared,"
    " orphaned, waits_for, attempts, trainer_digest, submitted_by, owner, archived, superseded, seq"
)
_JOB_FIELDS: Final = (
    "id", "spec", "class_id", "status", "epoch", "created_at_s", "changed_at_s", "not_before_s", "host_id", "reason",
    "artifact", "declared", "orphaned", "waits_for", "attempt", "trainer_digest", "submitted_by", "owner", "archived",
    "superseded", "seq", "newer",
)  # fmt: skip
"""The fields of `JOB`, and one that lists alone have."""
HIDDEN: Final = "((archived OR superseded) AND status IN ('completed', 'failed', 'cancelled'))"
"""Jobs that a list leaves out unless it is asked for all."""
UNFINISHED_JOB: Final = "status IN ('pending', 'claimed', 'running')"
HELD_JOBS: Final = "job /* sqlite: INDEXED BY job_held */"
LEASED: Final = "a.job_id = l.job_id AND a.epoch = l.epoch AND a.ended_at IS NULL AND NOT l.expired"
"""Stands after a CROSS JOIN, whose order SQLite keeps: it would else read all attempts that there ever were, and look
for the lease of each."""

encode: Final = msgspec.json.Encoder().encode
decode_spec: Final = msgspec.json.Decoder(JobSpec).decode
decode_trainer: Final = msgspec.json.Decoder(TrainerSpec).decode
decode_facts: Final = msgspec.json.Decoder(dict[str, Any]).decode
_decode_taken: Final = msgspec.json.Decoder(Taken).decode
_decode_amounts: Final = msgspec.json.Decoder(dict[str, Any]).decode


def class_keys(specs: Iterable[JobSpec]) -> dict[bytes, str]:
    """The keys of the classes of these jobs, by the encoded class: jobs are many and their classes few."""
    written = {encode(requirement): requirement for requirement in (spec.requirement for spec in specs)}
    return {text: requirement.key for text, requirement in written.items()}


def decode_job(row: Sequence[Any]) -> JobRow:
    fields: dict[str, Any] = dict(zip(_JOB_FIELDS, row, strict=False))
    fields["spec"], fields["status"] = decode_spec(fields["spec"]), JobStatus(fields["status"])
    fields |= {name: bool(fields[name]) for name in ("declared", "orphaned", "archived", "superseded")}
    return JobRow(**fields)


def decode_taken(text: bytes) -> Taken:
    """Empty for an attempt that began before amounts were counted."""
    return _decode_taken(text) if text else UNKNOWN


def encode_amounts(amounts: Amounts) -> bytes:
    """Encodes the fields of a `Taken`: a hub of the version before counts what is reserved as taken."""
    return encode(amounts._asdict())


def decode_amounts(text: bytes) -> Amounts:
    return Amounts(**_decode_amounts(text))


def decode_lease(job_id: str, epoch: int, row: Sequence[Any]) -> JobLease:
    host_id, expires_at_s, spec, checkpoint, digest, trainer, taken = row
    decoded = None if trainer is None else decode_trainer(trainer)
    taken = taken if isinstance(taken, Taken) else decode_taken(taken)
    return JobLease(job_id, epoch, host_id, expires_at_s, decode_spec(spec), decoded, checkpoint, digest, taken)


def decode_open_attempt(row: Sequence[Any]) -> OpenAttempt:
    host_id, job_id, epoch, taken, expired = row
    return OpenAttempt(host_id, job_id, epoch, decode_taken(taken), bool(expired))


def decode_open_reservation(row: Sequence[Any]) -> OpenReservation:
    host_id, amounts, seq, kind, expires_at_s = row
    return OpenReservation(host_id, decode_amounts(amounts), seq, kind, expires_at_s)
