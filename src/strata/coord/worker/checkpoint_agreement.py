"""The worker's part in a checkpoint that an operator requested: it promises not to go past the named step, and waits
until all ranks have promised or its membership is over.

The coordinator names a step. A worker promises not to go past it, and writes the checkpoint when all have promised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.step_clock import AskedSteps

if TYPE_CHECKING:
    from strata.coord.worker.session import WorkerSession

AGREEMENT_S: Final = 1.0
"""How long a worker waits for an agreement before it looks whether it is still a member."""


class CheckpointAgreement:
    def __init__(self, session: WorkerSession, heartbeat_soon: Callable[[], None]) -> None:
        self._session, self._heartbeat_soon = session, heartbeat_soon
        self.step: int | None = None
        """The step that this worker goes past only when the ranks agree on it, or whose checkpoint it writes; 0: none.
        None: the program does not agree on steps."""
        self.asked = AskedSteps()
        self.reached: tuple[int, int] = (0, 0)
        """The generation and the step that its ranks agreed on."""
        self.changed = asyncio.Event()

    def promise(self, step: int) -> None:
        """Promises not to go past this step, unless it is finished; then the ack of the command without it refuses."""
        finished = self._session.liveness.step
        if self.step is not None:
            self.step = step if finished is not None and step > finished else 0

    async def is_reached(self) -> bool:
        """Says whether all ranks write a checkpoint of the step that is finished; waits if that is not known yet."""
        session = self._session
        if session.liveness.step is not None:
            self.asked.ask(session.liveness.step)
        if self.step is None:
            self.step = 0
            self._heartbeat_soon()
        if self.step < (session.liveness.step or 0) and session.leases.capture is None:
            # The program did not write the checkpoint: the coordinator names another step.
            self.step = 0
        until_s = session.clock.monotonic_s() + session.settings.patience_s
        while self.step and self.step == session.liveness.step:
            session.check()
            if self.reached == (session.generation, session.liveness.step):
                # The program writes its files now; the report of the checkpoint ends it.
                session.liveness.status = pb.WORKER_STATUS_CHECKPOINTING
                return True
            if session.is_stale:
                self.end()
                break
            if session.clock.monotonic_s() > until_s:
                message = f"whether step {session.liveness.step} is a checkpoint was not decided in time"
                raise StrataError(Code.UNAVAILABLE, message)
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(AGREEMENT_S):
                    await self.changed.wait()
        return False

    def end(self) -> None:
        """The checkpoint is reported, or its generation is over."""
        if self.step:
            self.step = 0
