"""What the agent must not forget: which claim is under way and which attempts it has.

state/lock                       one agent at a time
state/claim.json                 written before a claim is sent: after a crash the same claim is sent again
state/attempts/KEY/record.json   an attempt and how far it is; beside it what the waiter reads and writes
work/attempts/KEY/               what the job itself sees
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.disk import private_folder, read_json, write_json
from strata.fleet.agent.lease_paths import PathName, attempt_name
from strata.fleet.core.job import Cause
from strata.fleet.wire import LeaseGiven


class Phase(StrEnum):
    PREPARING = "preparing"
    STARTING = "starting"
    """A waiter may have been started: look before starting one."""
    RUNNING = "running"
    ENDED = "ended"
    """There is an outcome that the hub has not acknowledged."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What will be reported. Without a cause the attempt is complete."""

    cause: Cause | None = None
    error: str = ""
    facts: dict[str, Any] = {}
    drop: bool = False
    """Somebody else has the job, or nobody wants it: nothing is reported."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why this agent ended the child."""

    cause: Cause
    reason: str
    drop: bool = False


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lease: LeaseGiven
    claimed_at_s: float
    phase: Phase = Phase.PREPARING
    code: str = ""
    """The commit or the source that is run."""
    devices: tuple[int, ...] | None = None
    """GPUs by number; None: whatever there is."""
    stop: Stop | None = None
    outcome: Outcome | None = None
    sent: tuple[str, ...] = ()
    """Names of the checkpoints that are at the hub."""
    checkpoint: str = ""
    """The artifact of the last of them."""

    @property
    def key(self) -> PathName:
        return attempt_name(self.lease.job_id, self.lease.epoch)


class Claiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    claim_id: str
    count: int
    slots: int


class State:
    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self._attempts = private_folder(folder / "attempts")

    def folder_of(self, record: Record) -> Path:
        return self._attempts / record.key

    def save(self, record: Record) -> None:
        folder = private_folder(self.folder_of(record))
        write_json(folder / "record.json", record)

    def add(self, record: Record) -> bool:
        """Whether it is new: a claim that was repeated brings the same leases."""
        known = read_json(self.folder_of(record) / "record.json", Record)
        if known is None:
            # What an attempt of the same key left behind when it was removed halfway.
            shutil.rmtree(self.folder_of(record), ignore_errors=True)
            self.save(record)
            return True
        if known.lease.job_id != record.lease.job_id:
            raise StrataError(
                Code.INTERNAL, f"{record.lease.job_id} and {known.lease.job_id} share the key {known.key}"
            )
        return False

    def records(self) -> Iterator[Record]:
        for folder in sorted(self._attempts.iterdir()):
            record = read_json(folder / "record.json", Record)
            if record is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                yield record

    def remove(self, record: Record) -> None:
        # The record goes first: without it the rest is rubbish, with it the rest is needed.
        (self.folder_of(record) / "record.json").unlink(missing_ok=True)
        failpoint("agent.state.removed")
        shutil.rmtree(self.folder_of(record), ignore_errors=True)

    def claiming(self) -> Claiming | None:
        return read_json(self.folder / "claim.json", Claiming)

    def claim(self, claiming: Claiming) -> None:
        write_json(self.folder / "claim.json", claiming)

    def claimed(self) -> None:
        with suppress(FileNotFoundError):
            (self.folder / "claim.json").unlink()
