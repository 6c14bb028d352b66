"""Commands of operators at the worker (stop, rebalance, checkpoint, reload, drain): each is executed once, however
often it arrives, and acknowledged afterwards.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from strata.base import log
from strata.coord.core.checkpoint_requests import AFTER, STEP
from strata.coord.core.facts import IF_HUNG, CommandKind
from strata.coord.pb import coordinator_pb2 as pb

KINDS: Final = frozenset(kind.value for kind in CommandKind)
"""The kinds that this version knows; a later coordinator may send others."""

_log = log.get(__name__)


@dataclass(frozen=True)
class Command:
    command_id: int
    kind: CommandKind
    arguments: Mapping[str, str]
    reason: str


OnCommand = Callable[[Command], Awaitable[None] | None]


@dataclass
class Commands:
    """`waiting` is for the training loop; the worker itself executes the others."""

    drained: Path | None
    """Where a worker that is drained puts a file with its process id as its name, if a launcher said so."""
    stopping: bool = False
    draining: bool = False
    waiting: list[Command] = field(default_factory=list)
    to_ack: set[int] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)

    def receive(self, messages: Iterable[pb.Command]) -> list[Command]:
        """The new ones, in order. A known one was not acknowledged yet, or its ack got lost."""
        new: list[Command] = []
        for message in messages:
            if message.command_id in self._seen:
                if all(each.command_id != message.command_id for each in self.waiting):
                    self.to_ack.add(message.command_id)
            elif int(message.kind) in KINDS:
                self._seen.add(message.command_id)
                new.append(
                    Command(message.command_id, CommandKind(message.kind), dict(message.arguments), message.reason)
                )
        for command in new:
            self._carry_out(command)
        return new

    def drain(self) -> None:
        """This worker has to leave, and the others go on without it."""
        if self.draining:
            return
        self.draining = True
        if self.drained is None:
            return
        try:
            # At once, not when it leaves: its launcher may end it before.
            (self.drained / str(os.getpid())).touch()
        except OSError as error:
            _log.warning("drain_not_marked", folder=str(self.drained), reason=str(error))

    def take(self, kind: CommandKind | None = None) -> list[Command]:
        """The pending ones, all or of one kind; taking a command acknowledges it."""
        taken = [each for each in self.waiting if kind in (None, each.kind)]
        self.waiting = [each for each in self.waiting if each not in taken]
        self.to_ack.update(each.command_id for each in taken)
        return taken

    async def run(self, on_command: OnCommand, command: Command, heartbeat_soon: Callable[[], None]) -> None:
        """Runs the callback in a thread of its own unless it is a coroutine: heartbeats go on meanwhile."""
        if inspect.iscoroutinefunction(on_command):
            await on_command(command)
        else:
            await asyncio.to_thread(on_command, command)
        self.finish(command)
        heartbeat_soon()

    def finish(self, command: Command) -> None:
        """The command was executed by the `on_command` callback."""
        self.waiting = [each for each in self.waiting if each != command]
        self.to_ack.add(command.command_id)

    def _carry_out(self, command: Command) -> None:
        match command.kind:
            case CommandKind.STOP:
                # Else the process ends if it hangs, and goes on if it moves.
                self.stopping |= IF_HUNG not in command.arguments
                self.to_ack.add(command.command_id)
            case CommandKind.DRAIN:
                # Else the reply to the report of a checkpoint says when.
                if AFTER not in command.arguments:
                    self.drain()
                self.to_ack.add(command.command_id)
            case CommandKind.REBALANCE:
                # The session returns leases; a new generation comes with every heartbeat.
                self.to_ack.add(command.command_id)
            case CommandKind.CHECKPOINT_NOW if STEP in command.arguments:
                # One that named no step was sent before all programs agreed on steps.
                self.take(CommandKind.CHECKPOINT_NOW)
                self.to_ack.add(command.command_id)
            case CommandKind.CHECKPOINT_NOW | CommandKind.RELOAD:
                self.waiting.append(command)
