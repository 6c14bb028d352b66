"""`python -m strata.train.orchestrator --settings FILE`: the orchestrator as a process of its own, for the launcher."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from strata.base import log
from strata.base.clock import SystemClock
from strata.base.errors import StrataError
from strata.base.ids import Ids
from strata.base.private import require_private_folder
from strata.base.settings import process_environment
from strata.http import otel
from strata.journal.open import open_journal
from strata.journal.sqlite import SqliteJournal
from strata.train.orchestrator.orchestrator import Orchestrator
from strata.train.settings import ServerSettings, load_settings

_log = log.get(__name__)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m strata.train.orchestrator", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the server's TOML file")
    parser.add_argument("--events-fd", type=int, help="the pipe to notify the launcher on, one event a line")
    parser.add_argument(
        "--holder", help="name of the leader of the journal; the same holder need not wait for its own lease"
    )
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(options.settings)
        style = settings.server.log_format or ("console" if sys.stderr.isatty() else "json")
        log.configure(style, settings.server.log_level)
        holder = options.holder or Ids(SystemClock()).new("orchestrator")
        stop_traces = otel.configure("strata-orchestrator", process_environment())
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_run(settings, options.events_fd, holder))
        finally:
            stop_traces()
    except StrataError as error:
        _log.error("orchestrator_failed", code=error.code.value, reason=str(error))
        return 1
    return 0


async def _run(settings: ServerSettings, events_fd: int | None, holder: str) -> None:
    stop, stop_ranks = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def stop_all() -> None:
        stop_ranks.set()
        stop.set()

    # The ranks outlive an orchestrator unless the launcher stops them too.
    loop.add_signal_handler(signal.SIGUSR1, stop_all)

    def notify(event: str) -> None:
        if events_fd is not None:
            os.write(events_fd, f"{event}\n".encode())

    require_private_folder(settings.data, "the server's files")
    clock = SystemClock()
    async with await open_journal(settings.database, clock) as journal:
        copy = journal.copy_to if isinstance(journal, SqliteJournal) else None
        await Orchestrator(settings, journal, clock, notify, copy_journal=copy).run(stop, holder, stop_ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
