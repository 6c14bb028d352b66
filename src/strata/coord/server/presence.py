"""Presence streams: what an attached worker is told, and what the end of its stream means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from strata.coord.core import members
from strata.coord.core.inputs import Attached, Caller, Detached
from strata.coord.core.state import PendingCommand
from strata.coord.server.service import CoordinatorService, not_leading


@dataclass(frozen=True)
class PresenceUpdate:
    """What a presence stream has to tell."""

    generation: int
    commands: tuple[PendingCommand, ...]


class Presence:
    """One open stream of one life of a worker. Its end is suspicion, unless a newer stream of that life is open."""

    def __init__(self, service: CoordinatorService, caller: Caller) -> None:
        self._service = service
        self._caller = caller
        self._delivered: set[int] = set()
        self._generation = -1

    async def next_update(self) -> PresenceUpdate:
        """At once what is not known yet, else the next thing that happens."""
        caller, service = self._caller, self._service
        while True:
            with service.events.subscribe(("worker", caller.job, caller.worker_id)) as happened:
                job = members.job_of(service.state, caller)
                members.member_of(job, caller)
                watch = service.telemetry_of(caller.job)
                commands = tuple(
                    each
                    for each in job.commands.values()
                    if caller.worker_id in each.waiting and self._is_new(each.command_id, watch.last_command)
                )
                if commands or self._generation != watch.generation:
                    self._generation = watch.generation
                    self._delivered.update(each.command_id for each in commands)
                    return PresenceUpdate(watch.generation, commands)
                if not await happened.wait():
                    raise not_leading()

    def _is_new(self, command_id: int, last_command: int) -> bool:
        return command_id <= last_command and command_id not in self._delivered


@contextmanager
def open_presence(service: CoordinatorService, caller: Caller) -> Iterator[Presence]:
    job = members.job_of(service.state, caller)
    # An unnamed life is the current one: the break of this stream must say nothing about the next.
    caller = replace(caller, incarnation=members.member_of(job, caller).worker.incarnation)
    service.observe(Attached(caller))
    presence = Presence(service, caller)
    streams = service.telemetry_of(caller.job).streams
    streams[caller.worker_id] = presence
    try:
        yield presence
    finally:
        if streams.get(caller.worker_id) is presence:
            del streams[caller.worker_id]
            service.observe(Detached(caller))
