"""A process that carries out one order at a time: the clients of a bench, away from the servers it measures."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

STRATA: Final = str(Path(sys.executable).with_name("strata"))


class Figures(msgspec.Struct, frozen=True):
    values: list[float]


class Clients:
    """The load process: one order at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def carry_out(self, order: msgspec.Struct) -> list[float]:
        sent, answers = self._process.stdin, self._process.stdout
        assert sent is not None
        assert answers is not None
        sent.write(msgspec.json.encode(order) + b"\n")
        await sent.drain()
        line = await answers.readline()
        if not line:
            raise RuntimeError("the load process died; see above")
        return msgspec.json.decode(line, type=Figures).values


@asynccontextmanager
async def started(*command: str, settings: Mapping[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command,
        env={"PATH": os.defpath, **settings},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # A server says where it listens, which nobody asked for here; so does that of an older commit.
        stderr=asyncio.subprocess.DEVNULL if Path(command[0]).name == Path(STRATA).name else None,
        limit=1 << 24,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
