"""Presence streams to workers: they push generations, commands and agreed checkpoint steps, and a broken one makes the
worker suspect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from strata.coord.core import members
from strata.coord.core.inputs import Attached, Caller, Detached
from strata.coord.core.state import PendingCommand
from strata.coord.server.service import CoordinatorService, not_leading


@dataclass(frozen=True)
class PresenceUpdate:
    """A message of a presence stream."""

    generation: int
    commands: tuple[PendingCommand, ...]
    checkpoint_step: int | None


class Presence:
    """One open stream of one incarnation. Its end makes the worker suspect, unless a newer stream of it is open."""

    def __init__(self, service: CoordinatorService, caller: Caller) -> None:
        self._service = service
        self._caller = caller
        self._delivered: set[int] = set()
        self._sent: tuple[int, int | None] = (-1, None)
        """The generation and the agreed step of the last update."""

    async def next_update(self) -> PresenceUpdate:
        """The next update: at once if the worker lacks something, else when something happens."""
        caller, service = self._caller, self._service
        while True:
            with service.notifier.events.subscribe(("worker", caller.job, caller.worker_id)) as happened:
                job = members.job_of(service.state, caller)
                members.member_of(job, caller)
                telemetry = service.telemetry.of(caller.job)
                commands = tuple(
                    each
                    for each in job.commands.values()
                    if caller.worker_id in each.waiting and self._is_new(each.command_id, telemetry.last_command)
                )
                found = (telemetry.generation, telemetry.checkpoint_step)
                if commands or self._sent != found:
                    self._sent = found
                    self._delivered.update(each.command_id for each in commands)
                    return PresenceUpdate(telemetry.generation, commands, telemetry.checkpoint_step)
                if not await happened.wait():
                    raise not_leading()

    def _is_new(self, command_id: int, last_command: int) -> bool:
        return command_id <= last_command and command_id not in self._delivered


@contextmanager
def open_presence(
    service: CoordinatorService, caller: Caller, on_broken_hop: Callable[[Caller], None] | None = None
) -> Iterator[Presence]:
    """`on_broken_hop` is for a stream that another process forwards: its end says nothing yet about the worker."""
    job = members.job_of(service.state, caller)
    # An empty incarnation means the current one: a break of this stream must say nothing about the next.
    caller = replace(caller, incarnation=members.member_of(job, caller).worker.incarnation)
    service.observe(Attached(caller))
    presence = Presence(service, caller)
    streams = service.telemetry.of(caller.job).streams
    streams[caller.worker_id] = presence
    try:
        yield presence
    finally:
        if streams.get(caller.worker_id) is presence:
            del streams[caller.worker_id]
            service.observe(Detached(caller, suspect=on_broken_hop is None))
            if on_broken_hop is not None:
                on_broken_hop(caller)


async def suspect_unless(
    service: CoordinatorService, caller: Caller, is_hop_broken: Callable[[], Awaitable[bool]]
) -> None:
    """Make a worker suspect whose forwarded stream ended, if the process that forwarded it is well."""
    broke_s = service.clock.monotonic_s()
    if await is_hop_broken():
        return
    state = service.state_if_leading
    if state is None or caller.job not in state.jobs:
        return
    is_back = caller.worker_id in service.telemetry.of(caller.job).streams
    if not is_back and state.soft_of(caller.job).seen_s.get(caller.worker_id, 0.0) < broke_s:
        service.observe(Detached(caller))
