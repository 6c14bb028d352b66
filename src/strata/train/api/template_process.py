"""Renders chat templates, and checks grammars, in a process with limits of memory (512 MiB), CPU time (5 s) and waiting
(30 s); and what such a template sees.

A template is code of whoever published the model. jinja2's sandbox keeps it from the machine, and bounds neither its
time nor its memory; the limits of a process do. The process that serves requests only waits, and without a thread.
"""

from __future__ import annotations

import asyncio
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.parent import end_with_parent
from strata.base.settings import process_environment

MEMORY_BYTES: Final = 512 << 20
"""What rendering may take beside the program itself."""
CPU_S: Final = 5
"""Processor time of one chat. The templates of known models take about a millisecond."""
WAIT_S: Final = 30.0
"""Time to wait for the chats before, and for the process, which may share its cores with others."""
TRIED_CHARACTERS: Final = 1 << 20
"""Characters of the text that a template may make of one message."""
TOO_MUCH: Final = f"it takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB"
_HEAD_BYTES: Final = 4
_INHERITED: Final = ("PATH", "PYTHONPATH", "LANG")
"""Variables of this process: none with a secret."""
_FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What code in a template raises when the data of a request does not have the form that it expects."""


Work = Literal["templates", "grammars"]
"""What a process is for. Templates are of models, and grammars of clients."""


class ChatRendering(msgspec.Struct, frozen=True, tag="chat"):
    """A chat, and the template that makes a text of it."""

    template: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]
    most_characters: int
    cpu_s: int = CPU_S


class GrammarCheck(msgspec.Struct, frozen=True, tag="grammar"):
    """A grammar that may be too complex. Nothing is rendered; the error is why it cannot be compiled."""

    grammar: str
    cpu_s: int = 1


class RenderedChat(msgspec.Struct, frozen=True):
    text: str = ""
    error: str = ""
    """Why there is no text."""
    over_limit: bool = False
    """Whether the template needs more than it may have."""


class TemplateRenderer:
    """One process, started for the first chat and replaced when a template has ended it. It renders one at a time."""

    def __init__(self, work: Work = "templates") -> None:
        self._work = work
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[RenderedChat]] = set()

    async def render(self, chat: ChatRendering | GrammarCheck) -> RenderedChat:
        """EXHAUSTED if others take all of its time."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            message = f"the server is busy with the {self._work} of other chats"
            raise StrataError(Code.EXHAUSTED, message) from None
        # It goes on when the client disconnects: the process must not be left in the middle of a message.
        task = asyncio.create_task(self._render(chat))
        self._running.add(task)
        task.add_done_callback(self._end_turn)
        return await asyncio.shield(task)

    def _end_turn(self, task: asyncio.Task[RenderedChat]) -> None:
        self._running.discard(task)
        self._turn.release()

    async def _render(self, chat: ChatRendering | GrammarCheck) -> RenderedChat:
        try:
            async with asyncio.timeout(WAIT_S):
                child = self._child = self._child or await _start(self._work)
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write(_frame(chat))
                await child.stdin.drain()
                size = int.from_bytes(await child.stdout.readexactly(_HEAD_BYTES))
                return _decode_reply(await child.stdout.readexactly(size))
        except (TimeoutError, EOFError, ConnectionError):
            await self._stop()
            return RenderedChat(error=TOO_MUCH, over_limit=True)

    async def aclose(self) -> None:
        for task in (running := [*self._running]):
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._stop()

    async def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.communicate()


def render_once(chat: ChatRendering) -> RenderedChat:
    """The same by a process for this chat alone. Blocking."""
    try:
        command, content = _command("templates"), _frame(chat)
        done = subprocess.run(
            command, input=content, capture_output=True, env=_environment(), timeout=WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return RenderedChat(error=TOO_MUCH, over_limit=True)
    if not done.stdout:
        return RenderedChat(error=TOO_MUCH, over_limit=True)
    return _decode_reply(done.stdout[_HEAD_BYTES:])


def try_template(folder: Path) -> RenderedChat | None:
    """Returns what the chat template in the files of a model makes of one message; None if there is none. Blocking."""
    config = _read_json(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    if isinstance(template, list):
        template = next((each["template"] for each in template if each["name"] == "default"), None)
    if not isinstance(template, str):
        return None
    tokens = {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}
    return render_once(ChatRendering(template, [{"role": "user", "content": "Hello"}], None, tokens, TRIED_CHARACTERS))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


async def _start(work: Work) -> asyncio.subprocess.Process:
    pipe = subprocess.PIPE
    return await asyncio.create_subprocess_exec(*_command(work), stdin=pipe, stdout=pipe, env=_environment())


def _command(work: Work) -> list[str]:
    return [sys.executable, "-P", "-m", "strata.train.api.template_process", work]


def _environment() -> dict[str, str]:
    return {name: value for name, value in process_environment().items() if name in _INHERITED}


def _frame(message: ChatRendering | GrammarCheck | RenderedChat) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(_HEAD_BYTES) + content


_decode_reply: Final = msgspec.msgpack.Decoder(RenderedChat).decode
_decode_request: Final[Callable[[bytes], ChatRendering | GrammarCheck]] = msgspec.msgpack.Decoder(
    ChatRendering | GrammarCheck
).decode


def run_renderer(work: str) -> None:
    """Render chats, or check grammars, from stdin to stdout until it ends."""
    end_with_parent(signal.SIGKILL)
    reply: Any = _grammar_checker() if work == "grammars" else _chat_renderer()
    _limit_process()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(_HEAD_BYTES):
        request = _decode_request(source.read(int.from_bytes(head)))
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + request.cpu_s, hard))
        sink.write(_frame(reply(request)))
        sink.flush()


def _grammar_checker() -> Callable[[GrammarCheck], RenderedChat]:
    from strata.train.grammar import validate_grammar

    # Loads the library before the limits are set.
    validate_grammar('start: "a"')
    return lambda request: RenderedChat(error=" ".join(validate_grammar(request.grammar).split())[:300])


def _chat_renderer() -> Callable[[ChatRendering], RenderedChat]:
    import jinja2
    from transformers.utils import chat_template_utils

    utils: Any = chat_template_utils

    def render(chat: ChatRendering) -> RenderedChat:
        try:
            (text,), _ = utils.render_jinja_template(
                conversations=[list(chat.messages)],
                tools=None if chat.tools is None else list(chat.tools),
                chat_template=chat.template,
                add_generation_prompt=True,
                **chat.variables,
            )
        except MemoryError:
            return RenderedChat(error=TOO_MUCH, over_limit=True)
        except (jinja2.TemplateError, *_FAILURES) as error:
            return RenderedChat(error=" ".join(str(error).split())[:300])
        if len(text) > chat.most_characters:
            return RenderedChat(error=f"they become a text of {len(text)} characters", over_limit=True)
        return RenderedChat(text=text)

    return render


def _limit_process() -> None:
    program = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    most = program + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    run_renderer(sys.argv[1])
