"""`RemoteBackend`: the orchestrator's connections to rank 0, with the handshake (2 s) and the errors while ranks are
away.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from strata.base import log
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.train.core import commands
from strata.train.link.ports import Links, RankSide
from strata.train.link.rank import ConnectRequest
from strata.train.link.sockets import read_address
from strata.train.settings import ServerSettings

HANDSHAKE_S: Final = 2.0
"""How long rank 0 may take to reply before the connect request is sent again. A busy rank 0 reads them all when it is
idle, and only the last one counts."""
FILE_POLL_S: Final = 0.25

_log = log.get(__name__)

RankMessage = commands.DispatchReply | commands.Restored | commands.SnapshotWritten | commands.SampleProgress
"""What a session gets from rank 0."""


class RemoteBackend:
    """Holds at most one connection at a time. Dispatches are numbered; replies are returned as they are."""

    def __init__(self, links: Links, settings: ServerSettings, clock: Clock, generation: int) -> None:
        self._links = links
        self._settings = settings
        self._clock = clock
        self._generation = generation
        self._connection: RankSide | None = None
        self._requests: dict[int, asyncio.Future[commands.HealthReply]] = {}
        self._request_count = 0
        self._connect_attempts = 0

    async def attach(self) -> commands.AttachReply:
        """Connect, with retries until rank 0 replies. STALE if it is attached to a newer orchestrator, or another run.

        DEADLINE when it has not replied for as long as ranks may take to start and then to run an operation: they are
        stuck.
        """
        self.close()
        limit_s = self._settings.ranks.start_timeout_s + self._settings.limits.operation_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._attach()
        except TimeoutError as error:
            raise StrataError(Code.DEADLINE, f"rank 0 has not answered for {limit_s:g} seconds") from error

    async def _attach(self) -> commands.AttachReply:
        while True:
            endpoint = await self._find_endpoint()
            self._connect_attempts += 1
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    connection = await self._links.connect_rank(
                        endpoint, ConnectRequest(self._generation, self._connect_attempts)
                    )
            except TimeoutError:
                if self._connect_attempts % 30 == 0:
                    _log.info("rank_connect_pending", attempts=self._connect_attempts)
                continue
            if connection is None:
                raise StrataError(Code.STALE, "rank 0 speaks with a newer orchestrator")
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    attached = await self._shake_hands(connection)
            except TimeoutError:
                connection.close()
            except BaseException:
                connection.close()
                raise
            else:
                self._connection = connection
                return attached

    async def _shake_hands(self, connection: RankSide) -> commands.AttachReply:
        await connection.send(commands.Attach(self._generation, self._settings.stream))
        while True:
            match await connection.receive():
                case commands.AttachReply() as attached if attached.generation == self._generation:
                    return attached
                case commands.Fenced() as fenced:
                    raise StrataError(Code.STALE, f"rank 0 does not take orders from here: {fenced.reason}")
                case _:
                    # A reply to an earlier orchestrator.
                    continue

    async def _find_endpoint(self) -> str:
        """The address of rank 0, or that in its file, which rank 0 may write at any time: it is polled."""
        endpoint = self._settings.rank0
        if not endpoint.startswith("file:"):
            return endpoint
        while (found := read_address(Path(endpoint.removeprefix("file:")))) is None:
            await self._clock.sleep(FILE_POLL_S)
        return found

    async def send(self, number: int, work: commands.Work, durable: int, traceparent: str = "") -> None:
        await self._connected().send(commands.DispatchCommand(self._generation, number, work, durable, traceparent))

    async def restore(self, number: int, path: Path, digest: str) -> None:
        await self._connected().send(commands.Restore(self._generation, number, str(path), digest))

    async def receive(self) -> RankMessage:
        """The next message of rank 0. STALE if it is attached to another orchestrator now."""
        while True:
            match await self._connected().receive():
                case (
                    commands.DispatchReply()
                    | commands.Restored()
                    | commands.SnapshotWritten()
                    | commands.SampleProgress() as message
                ) if message.generation == self._generation:
                    return message
                case commands.HealthReply() as healthy:
                    reply = self._requests.pop(healthy.ask_id, None)
                    if reply is not None and not reply.done():
                        reply.set_result(healthy)
                case commands.Fenced() as fenced:
                    raise StrataError(Code.STALE, f"rank 0 does not take orders from here: {fenced.reason}")
                case _:
                    _log.debug("foreign_rank_message_ignored")

    async def lost(self) -> None:
        await self._connected().lost()

    async def request(self, work: commands.Requested, timeout_s: float) -> commands.HealthReply:
        """DEADLINE if there is no reply in time: rank 0 replies between two dispatches."""
        connection = self._connected()
        self._request_count += 1
        request_id = self._request_count
        reply: asyncio.Future[commands.HealthReply] = asyncio.get_running_loop().create_future()
        self._requests[request_id] = reply
        try:
            async with asyncio.timeout(timeout_s):
                await connection.send(commands.RankRequest(self._generation, request_id, work))
                return await reply
        except TimeoutError as error:
            raise StrataError(Code.DEADLINE, f"rank 0 did not answer within {timeout_s:g} seconds") from error
        finally:
            self._requests.pop(request_id, None)

    async def shut_down(self) -> None:
        """Request the ranks to shut down, without waiting for it."""
        if self._connection is not None:
            self._request_count += 1
            await self._connection.send(
                commands.RankRequest(self._generation, self._request_count, commands.Shutdown())
            )

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        for reply in self._requests.values():
            if not reply.done():
                reply.set_exception(StrataError(Code.UNAVAILABLE, "the connection to rank 0 has ended"))
        self._requests.clear()

    def _connected(self) -> RankSide:
        if self._connection is None:
            raise StrataError(Code.UNAVAILABLE, "there is no connection to rank 0", hint="the ranks are starting")
        return self._connection
