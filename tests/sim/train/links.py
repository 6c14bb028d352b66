"""The two links of the orchestrator in the simulation: real `OrchestratorClient`s, and the door of rank 0."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from strata.train.core import commands
from strata.train.link import messages
from strata.train.link.api import OrchestratorClient
from strata.train.link.rank import ConnectRequest
from strata.train.settings import ServerSettings
from tests.sim.train.wires import Connection, TrainWorld
from tests.support.simloop import PROCESS, Process

RECONNECT_S = 0.1


class Router:
    """An API server's ROUTER: whoever connects says hello under its name; the newest of a name is heard."""

    def __init__(self) -> None:
        self._last_request: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.peers: dict[bytes, Connection] = {}

    def hello(self, name: bytes, connection: Connection) -> None:
        self.peers[name] = connection
        self._last_request.put_nowait([name, b""])

    def send_multipart(self, frames: Sequence[bytes], flags: int = 0) -> asyncio.Future[None]:
        del flags
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        name, body = frames
        peer = self.peers.get(name)
        if peer is None or peer.lost.is_set():
            sent.set_exception(zmq.ZMQError(zmq.EHOSTUNREACH))
        else:
            peer.to_first.send(body)
            sent.set_result(None)
        return sent

    async def recv_multipart(self) -> list[bytes]:
        return await self._last_request.get()


class Pull:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def recv(self) -> bytes:
        return await self.heard.get()


class SimClient(OrchestratorClient):
    """All of the real one but its sockets."""

    def __init__(self, settings: ServerSettings, router: Router, pull: Pull) -> None:
        super().__init__(settings)
        self._requests = router  # type: ignore[assignment]
        self._replies = pull  # type: ignore[assignment]
        self._tasks = [asyncio.create_task(self._accept_handshakes()), asyncio.create_task(self._receive_replies())]


class RankListener:
    """`RankLink` in the simulation: a listener that accepts orchestrators, one connection at a time."""

    def __init__(self, world: TrainWorld) -> None:
        self._world = world
        self._process = PROCESS.get()
        self._requests: deque[tuple[ConnectRequest, Process, Callable[[SimRankSide | None], None]]] = deque()
        self._inbox: deque[bytes] = deque()
        self._connection: Connection | None = None
        self._last_request = ConnectRequest(0, 0)
        self._came = asyncio.Event()

    @property
    def process(self) -> Process:
        return self._process

    def request_connection(
        self, request: ConnectRequest, who: Process, answer: Callable[[SimRankSide | None], None]
    ) -> None:
        self._requests.append((request, who, answer))
        self._came.set()

    async def receive(self) -> commands.ToRank:
        while True:
            if self._requests:
                self._accept(*self._requests.popleft())
            elif self._inbox:
                message: commands.ToRank = commands.decode_to_rank(self._inbox.popleft())
                return message
            else:
                self._came.clear()
                await self._came.wait()

    def send(self, message: commands.FromRank) -> None:
        if self._connection is not None:
            self._connection.to_first.send(commands.encode(message))

    def _accept(self, request: ConnectRequest, who: Process, answer: Callable[[SimRankSide | None], None]) -> None:
        if (request.generation, request.attempt) <= (self._last_request.generation, self._last_request.attempt):
            answer(None)
            return
        self._last_request = request
        if self._connection is not None:
            self._connection.cut()
        inbox: deque[bytes] = deque()
        self._inbox = inbox

        def arrived(data: bytes) -> None:
            inbox.append(data)
            self._came.set()

        side = SimRankSide()
        self._connection = self._world.connect((who, self._process), (side.heard.put_nowait, arrived))
        side.connection = self._connection
        answer(side)


class SimRankSide:
    """The orchestrator's end of a conversation."""

    connection: Connection

    def __init__(self) -> None:
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, message: commands.ToRank) -> None:
        self.connection.to_second.send(commands.encode(message))

    async def receive(self) -> commands.FromRank:
        message: commands.FromRank = commands.decode_from_rank(await self.heard.get())
        return message

    async def lost(self) -> None:
        await self.connection.lost.wait()

    def close(self) -> None:
        self.connection.cut()


class SimApiSide:
    """A DEALER and a PUSH to every API server; each comes back by itself."""

    def __init__(self, board: Board, generation: int) -> None:
        self._board = board
        self._world = board.world
        self._name = f"orchestrator-{generation}".encode()
        self._process = PROCESS.get()
        self._last_request: asyncio.Queue[bytes] = asyncio.Queue()
        self._open = True
        self._asked_by: dict[str, str] = {}
        self._pushes: dict[str, Connection] = {}
        self._dealers: dict[str, Connection] = {}
        for api in board.apis:
            self._connect(api, self._connect_dealer)
            self._connect(api, self._connect_push)

    def _connect(self, api: str, connect: Callable[[str, Process], None]) -> None:
        """Now or as soon as somebody listens."""
        if not self._open or self._process.crashed:
            return
        process = self._world.life(api)
        if process in self._board.listening and not process.crashed:
            connect(api, process)
        else:
            self._later(api, connect)

    def _later(self, api: str, connect: Callable[[str, Process], None]) -> None:
        wait_s = self._world.rng.expovariate(1 / RECONNECT_S)
        self._world.loop.call_later(wait_s, self._connect, api, connect, context=contextvars.Context())

    def _connect_dealer(self, api: str, process: Process) -> None:
        router, _ = self._board.listening[process]

        def asked(body: bytes) -> None:
            self._asked_by[messages.decode_request(body).request_id] = api
            self._last_request.put_nowait(body)

        connection = self._world.connect(
            (self._process, process), (asked, lambda _: router.hello(self._name, connection))
        )
        connection.after = lambda: self._later(api, self._connect_dealer)
        self._dealers[api] = connection
        # The probe.
        connection.to_second.send(b"")

    def _connect_push(self, api: str, process: Process) -> None:
        _, pull = self._board.listening[process]
        connection = self._world.connect((self._process, process), (lambda _: None, pull.heard.put_nowait))
        connection.after = lambda: self._later(api, self._connect_push)
        self._pushes[api] = connection

    async def receive(self) -> messages.OrchestratorRequest:
        return messages.decode_request(await self._last_request.get())

    def send(self, outputs: messages.OrchestratorOutputs) -> None:
        connection = self._pushes.get(self._asked_by.pop(outputs.request_id, ""))
        if connection is not None:
            connection.to_second.send(messages.encode(outputs))

    def close(self) -> None:
        self._open = False
        for connection in (*self._pushes.values(), *self._dealers.values()):
            connection.cut()


class Board:
    """Where the processes of one server find each other."""

    def __init__(self, world: TrainWorld, apis: Sequence[str]) -> None:
        self.world = world
        self.apis = apis
        self.listening: dict[Process, tuple[Router, Pull]] = {}
        self.listener: RankListener | None = None
        self._doors = asyncio.Event()

    def listen(self) -> tuple[Router, Pull]:
        places = Router(), Pull()
        self.listening[PROCESS.get()] = places
        return places

    def open_listener(self) -> RankListener:
        self.listener = RankListener(self.world)
        self._doors.set()
        self._doors = asyncio.Event()
        return self.listener

    async def found_listener(self) -> RankListener:
        while self.listener is None or self.listener.process.crashed:
            await self._doors.wait()
        return self.listener


class SimLinks:
    def __init__(self, board: Board) -> None:
        self._board = board
        self._api: SimApiSide | None = None

    def api(self, generation: int, number: int = 0) -> SimApiSide:
        assert number == 0, "one API server is simulated"
        self._api = SimApiSide(self._board, generation)
        return self._api

    async def connect_rank(self, endpoint: str, request: ConnectRequest) -> SimRankSide | None:
        del endpoint
        found = await self._board.found_listener()
        who, world = PROCESS.get(), self._board.world
        answered: asyncio.Future[SimRankSide | None] = asyncio.get_running_loop().create_future()

        def answer(side: SimRankSide | None) -> None:
            def arrive() -> None:
                if not answered.done():
                    answered.set_result(side)

            world.loop.call_later(
                world.rng.expovariate(1 / world.faults.delay_s), arrive, context=contextvars.Context()
            )

        def arrive() -> None:
            if not found.process.crashed:
                found.request_connection(request, who, answer)

        world.loop.call_later(world.rng.expovariate(1 / world.faults.delay_s), arrive, context=contextvars.Context())
        return await answered

    def close(self) -> None:
        if self._api is not None:
            self._api.close()
