"""The launcher as a process: until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from strata.base.clock import SystemClock
from strata.base.private import make_private, write_privately
from strata.base.settings import own_environment
from strata.train.folder import held
from strata.train.launch.launcher import Launcher
from strata.train.settings import ServerSettings


def run(settings: ServerSettings, file: Path, announce: Callable[[str], None]) -> None:
    write_privately()
    asyncio.run(_run(settings, file.absolute(), announce))


async def _run(settings: ServerSettings, file: Path, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    make_private(settings.data, "the server's files")
    with held(settings.data):
        await Launcher(settings, file, own_environment(), SystemClock()).run(stop, announce)
