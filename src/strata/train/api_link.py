"""Between API server and orchestrator: questions one way, answers the other.

An API server listens on a ROUTER (questions) and a PULL (answers); the orchestrator connects a DEALER and a PUSH to
each API server. A DEALER is named after the orchestrator's generation and probes every connection it makes: that is its
hello, after its own restart and after the other side's.
"""

from __future__ import annotations

import asyncio
import re
from types import TracebackType
from typing import Final, Self

import zmq
import zmq.asyncio

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.core import messages
from strata.train.settings import ServerSettings
from strata.train.sockets import at_once, bounded, decoded, keys_of, listen

_NAME: Final = re.compile(rb"orchestrator-([0-9]{1,18})")

_log = log.get(__name__)


class OrchestratorClient:
    """The API server's side. It survives the orchestrator: what was not answered is asked again of the next one.

    That is safe because every question may be asked twice: an operation is known by its model and sequence number, and
    the rest only looks, or says what is so already.
    """

    def __init__(self, settings: ServerSettings, number: int = 0) -> None:
        self._settings = settings
        self._number = number
        self._asked: dict[str, tuple[bytes, asyncio.Future[messages.Output]]] = {}
        self._speaker: tuple[int, bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        keys = keys_of(self._settings)
        self._gate = keys.admit(self._context) if keys is not None else None
        self._questions = self._context.socket(zmq.ROUTER)
        # A name that nobody has is an error and not a message thrown away; a name that comes back is taken over.
        self._questions.router_mandatory = True
        self._questions.router_handover = True
        self._answers = self._context.socket(zmq.PULL)
        settings, number = self._settings, self._number
        places = ((self._questions, settings.requests_of(number)), (self._answers, settings.outputs_of(number)))
        try:
            for socket, endpoint in places:
                bounded(socket)
                listen(socket, endpoint, keys)
        except StrataError:
            self._close()
            raise
        self._tasks = [asyncio.create_task(self._hear_hellos()), asyncio.create_task(self._hear_answers())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for _, answer in self._asked.values():
            answer.cancel()
        self._close()

    def _close(self) -> None:
        self._questions.close(linger=0)
        self._answers.close(linger=0)
        if self._gate is not None:
            self._gate.stop()
        self._context.term()

    @property
    def generation(self) -> int | None:
        """Of the orchestrator that was heard last; None before the first."""
        return self._speaker[0] if self._speaker else None

    async def ask(self, request: messages.OrchestratorRequest, *, timeout_s: float) -> messages.Output:
        """The answer, a refusal being one too. UNAVAILABLE if there is none in time: whether it was heard is unknown.

        EXHAUSTED if the orchestrator does not take questions as fast as they come.
        """
        if request.request_id in self._asked:
            raise StrataError(Code.CONFLICT, f"{request.request_id!r} is being asked already")
        answer: asyncio.Future[messages.Output] = asyncio.get_running_loop().create_future()
        body = messages.encode(request)
        self._asked[request.request_id] = body, answer
        try:
            self._send(body)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise StrataError(
                Code.UNAVAILABLE,
                f"the orchestrator gave no answer within {timeout_s:g} seconds",
                hint="ask again: it may be starting",
            ) from error
        finally:
            self._asked.pop(request.request_id, None)

    def _send(self, body: bytes) -> None:
        if self._speaker is None:
            return
        try:
            at_once(self._questions.send_multipart((self._speaker[1], body), flags=zmq.NOBLOCK))
        except zmq.Again as error:
            raise StrataError(Code.EXHAUSTED, "the orchestrator is behind with questions", hint="ask later") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # It is gone. The next one says hello and is asked again.

    async def _hear_hellos(self) -> None:
        while True:
            name, *frames = await self._questions.recv_multipart()
            found = _NAME.fullmatch(name)
            if found is None or frames != [b""]:
                _log.warning("dropped what is no hello", bytes=sum(map(len, frames)))
                continue
            generation = int(found[1])
            if self._speaker is not None and generation < self._speaker[0]:
                _log.warning("an orchestrator whose time is over said hello", generation=generation)
                continue
            self._speaker = generation, name
            _log.info("the orchestrator is there", generation=generation, asked_again=len(self._asked))
            for body, answer in list(self._asked.values()):
                try:
                    self._send(body)
                except StrataError as error:
                    if not answer.done():
                        answer.set_exception(error)

    async def _hear_answers(self) -> None:
        while True:
            outputs = decoded(messages.decode_outputs, await self._answers.recv())
            if outputs is not None:
                # One that nobody waits for any longer is not news: the question was asked again, or given up.
                _, answer = self._asked.get(outputs.request_id, (b"", None))
                if answer is not None and not answer.done():
                    answer.set_result(outputs.output)


class ApiLink:
    """The orchestrator's side of the link to one API server."""

    def __init__(
        self, context: zmq.asyncio.Context, settings: ServerSettings, generation: int, number: int = 0
    ) -> None:
        keys = keys_of(settings) if settings.server.transport == "tcp" else None
        self._questions = context.socket(zmq.DEALER)
        self._questions.identity = f"orchestrator-{generation}".encode()
        # The probe goes out with every new pipe, and only with this option a connection that comes back has a new one.
        self._questions.probe_router = True
        self._questions.immediate = True
        self._answers = context.socket(zmq.PUSH)
        places = ((self._questions, settings.requests_of(number)), (self._answers, settings.outputs_of(number)))
        for socket, endpoint in places:
            bounded(socket)
            if keys is not None:
                keys.present(socket)
            socket.connect(endpoint)

    async def receive(self) -> messages.OrchestratorRequest:
        """The next question that is one."""
        while True:
            frames = await self._questions.recv_multipart()
            request = decoded(messages.decode_request, frames[-1]) if len(frames) == 1 else None
            if request is not None:
                return request

    def send(self, outputs: messages.OrchestratorOutputs) -> None:
        """At once. Beyond what the link holds an answer is dropped: whoever asked is not listening."""
        try:
            at_once(self._answers.send(messages.encode(outputs), flags=zmq.NOBLOCK))
        except zmq.Again:
            _log.warning("an API server does not take its answers", request_id=outputs.request_id)

    def close(self) -> None:
        self._questions.close(linger=0)
        # A last answer may still go out; it must not hold up the end.
        self._answers.close(linger=200)
