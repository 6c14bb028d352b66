"""The agent's durable state as files: the claim in flight, the record and phase of each attempt, and the orders to stop
one.

state/lock                       one agent at a time
state/claim.json                 written before a claim is sent: after a crash the same claim is sent again
state/attempts/KEY/record.json   an attempt and its phase; beside it the files of the supervisor
work/attempts/KEY/               the folder that the job itself sees
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from strata.base.atomic import read_json, write_json
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.private import private_folder
from strata.fleet.agent.path_names import PathName, attempt_name
from strata.fleet.core.job import Cause
from strata.fleet.wire.leases import LeaseGiven


class AttemptPhase(StrEnum):
    PREPARING = "preparing"
    STARTING = "starting"
    """A supervisor may have been started: read its files before starting one."""
    RUNNING = "running"
    ENDED = "ended"
    """The outcome is known and the hub has not acknowledged it."""


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome to report. Without a cause the attempt is complete."""

    cause: Cause | None = None
    error: str = ""
    facts: dict[str, Any] = {}
    drop: bool = False
    """Another host has the job, or it was cancelled: nothing is reported."""


class StopOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why this agent stops the child."""

    cause: Cause
    reason: str
    drop: bool = False


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: LeaseGiven
    claimed_at_s: float
    phase: AttemptPhase = AttemptPhase.PREPARING
    code: str = ""
    """The commit or the bundle that runs."""
    prepared: dict[str, Any] = {}
    """Facts of the preparation, which the report carries."""
    devices: tuple[int | str, ...] | None = None
    """UUIDs or numbers of GPUs; None: all GPUs of the host."""
    stop: StopOrder | None = None
    outcome: AttemptOutcome | None = None
    sent: tuple[str, ...] = ()
    """Names of the checkpoints that were uploaded."""
    checkpoint: str = ""
    """The artifact of the last of them."""

    @property
    def key(self) -> PathName:
        return attempt_name(self.lease.job_id, self.lease.epoch)


class SavedRecord:
    """The record of one attempt, saved with every change."""

    def __init__(self, record: AttemptRecord, state: AgentState) -> None:
        self.record = record
        self.folder = state.folder_of(record)
        self._state = state

    def change(self, **changes: Any) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)
        self._state.save(self.record)

    def remove(self) -> None:
        self._state.remove(self.record)


class PendingClaim(msgspec.Struct, frozen=True, kw_only=True):
    claim_id: str
    count: int


class AgentState:
    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self._attempts = private_folder(folder / "attempts")

    def folder_of(self, record: AttemptRecord) -> Path:
        return self._attempts / record.key

    def save(self, record: AttemptRecord) -> None:
        folder = private_folder(self.folder_of(record))
        write_json(folder / "record.json", record)

    def add(self, record: AttemptRecord) -> bool:
        """Says whether it is new: a repeated claim returns the same leases."""
        existing = read_json(self.folder_of(record) / "record.json", AttemptRecord)
        if existing is None:
            # Leftovers of an attempt with the same key whose removal was interrupted.
            shutil.rmtree(self.folder_of(record), ignore_errors=True)
            self.save(record)
            return True
        if existing.lease.job_id != record.lease.job_id:
            raise StrataError(
                Code.INTERNAL, f"{record.lease.job_id} and {existing.lease.job_id} share the key {existing.key}"
            )
        return False

    def records(self) -> Iterator[AttemptRecord]:
        for folder in sorted(self._attempts.iterdir()):
            record = read_json(folder / "record.json", AttemptRecord)
            if record is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                yield record

    def remove(self, record: AttemptRecord) -> None:
        # The record goes first: without it the other files are garbage, with it they are needed.
        (self.folder_of(record) / "record.json").unlink(missing_ok=True)
        failpoint("agent.state.removed")
        shutil.rmtree(self.folder_of(record), ignore_errors=True)

    def pending_claim(self) -> PendingClaim | None:
        return read_json(self.folder / "claim.json", PendingClaim)

    def save_claim(self, claim: PendingClaim) -> None:
        write_json(self.folder / "claim.json", claim)

    def clear_claim(self) -> None:
        with suppress(FileNotFoundError):
            (self.folder / "claim.json").unlink()
