"""Messages about commands in running jobs: default timeout 60 s, at most 3,600 s."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from strata.fleet.wire.base import ClaimId, HubReply, Message, Offset, Reason, WaitS

MAX_EXEC_S: Final = 3600.0
Argument = Annotated[str, msgspec.Meta(max_length=65_536, pattern=r"\A[^\0]*\Z")]


class ExecRequest(Message, frozen=True, kw_only=True):
    command: Annotated[tuple[Argument, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """The program and its arguments; it is found in the PATH of the job."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_EXEC_S)] = 60.0
    """It is stopped after so long."""


class ExecReply(HubReply, frozen=True, kw_only=True):
    id: str
    job_id: str
    epoch: int
    host_id: str


class ExecQuery(Message, frozen=True, kw_only=True):
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=4 * 1024 * 1024)] = 1024 * 1024
    wait_s: WaitS = 0.0
    """Wait so long for something behind `offset`, unless the command has ended."""


class ExecStartRequest(Message, frozen=True, kw_only=True):
    run: ClaimId
    """An id of the agent's choice. Sent again after a lost reply, it gets the same reply; another one does not."""


class ExecGiven(HubReply, frozen=True, kw_only=True):
    id: str
    command: tuple[str, ...]
    timeout_s: float


class ExecEndRequest(Message, frozen=True, kw_only=True):
    run: ClaimId
    status: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    """The exit status as a shell has it: 128 and the number of the signal that killed it. None: it did not run to its
    end."""
    error: Reason = ""
