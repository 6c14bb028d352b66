"""`RemoteBackend`: the orchestrator's end of the link to rank 0, over any number of connections and groups."""

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
"""How long rank 0 may take to answer before it is asked again. While it computes it does not; then it hears all of it,
and only the last connect request counts."""
FILE_POLL_S: Final = 0.25

_log = log.get(__name__)


class RemoteBackend:
    """At most one connection at a time. What is sent is numbered; what is heard is handed on as it is."""

    def __init__(self, links: Links, settings: ServerSettings, clock: Clock, generation: int) -> None:
        self._links = links
        self._settings = settings
        self._clock = clock
        self._generation = generation
        self._connection: RankSide | None = None
        self._asked: dict[int, asyncio.Future[commands.Healthy]] = {}
        self._asks = 0
        self._connect_attempts = 0

    async def attach(self) -> commands.Attached:
        """Connect, over and over until rank 0 answers. STALE if it obeys a newer orchestrator, or another run.

        DEADLINE when it has not answered for as long as ranks may take to start and then to do an operation: whatever
        they do now, they will not come to an end with it.
        """
        self.close()
        limit_s = self._settings.ranks.start_timeout_s + self._settings.limits.operation_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._attach()
        except TimeoutError as error:
            raise StrataError(Code.DEADLINE, f"rank 0 has not answered for {limit_s:g} seconds") from error

    async def _attach(self) -> commands.Attached:
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

    async def _shake_hands(self, connection: RankSide) -> commands.Attached:
        await connection.send(commands.Attach(self._generation, self._settings.stream))
        while True:
            match await connection.receive():
                case commands.Attached() as attached if attached.generation == self._generation:
                    return attached
                case commands.Fenced() as fenced:
                    raise StrataError(Code.STALE, f"rank 0 does not take orders from here: {fenced.reason}")
                case _:
                    # Said to the one before us.
                    continue

    async def _find_endpoint(self) -> str:
        """Rank 0 may write its address into a file, and may do so when it pleases: nobody tells when."""
        endpoint = self._settings.rank0
        if not endpoint.startswith("file:"):
            return endpoint
        while (found := read_address(Path(endpoint.removeprefix("file:")))) is None:
            await self._clock.sleep(FILE_POLL_S)
        return found

    async def send(self, number: int, work: commands.Work, durable: int) -> None:
        await self._connected().send(commands.Command(self._generation, number, work, durable))

    async def restore(self, number: int, path: Path, digest: str) -> None:
        await self._connected().send(commands.Restore(self._generation, number, str(path), digest))

    async def receive(self) -> commands.Reply | commands.Restored | commands.SnapshotWritten:
        """What rank 0 says next. STALE if it obeys somebody else now."""
        while True:
            match await self._connected().receive():
                case commands.Reply() | commands.Restored() | commands.SnapshotWritten() as said if (
                    said.generation == self._generation
                ):
                    return said
                case commands.Healthy() as healthy:
                    asked = self._asked.pop(healthy.ask_id, None)
                    if asked is not None and not asked.done():
                        asked.set_result(healthy)
                case commands.Fenced() as fenced:
                    raise StrataError(Code.STALE, f"rank 0 does not take orders from here: {fenced.reason}")
                case _:
                    _log.debug("rank 0 said something that is not for us")

    async def lost(self) -> None:
        await self._connected().lost()

    async def ask(self, work: commands.HealthCheck | commands.Shutdown, timeout_s: float) -> commands.Healthy:
        """DEADLINE if there is no answer in time: rank 0 answers between two dispatches."""
        connection = self._connected()
        self._asks += 1
        ask_id = self._asks
        asked: asyncio.Future[commands.Healthy] = asyncio.get_running_loop().create_future()
        self._asked[ask_id] = asked
        try:
            async with asyncio.timeout(timeout_s):
                await connection.send(commands.Ask(self._generation, ask_id, work))
                return await asked
        except TimeoutError as error:
            raise StrataError(Code.DEADLINE, f"rank 0 did not answer within {timeout_s:g} seconds") from error
        finally:
            self._asked.pop(ask_id, None)

    async def shut_down(self) -> None:
        """Tell the ranks to end; whether they hear it is not waited for."""
        if self._connection is not None:
            self._asks += 1
            await self._connection.send(commands.Ask(self._generation, self._asks, commands.Shutdown()))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(StrataError(Code.UNAVAILABLE, "the connection to rank 0 has ended"))
        self._asked.clear()

    def _connected(self) -> RankSide:
        if self._connection is None:
            raise StrataError(Code.UNAVAILABLE, "there is no connection to rank 0", hint="the ranks are starting")
        return self._connection
