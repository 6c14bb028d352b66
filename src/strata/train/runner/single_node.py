"""`python -m strata.train.runner.single_node --settings FILE`: forks all ranks of one machine without torchrun, starts
a group again that died, with backoff (0.1 to 10 s), and ends the others 30 s after the first that ended.

This process imports the engine once and forks the ranks, so that a group that follows a dead one need not import it
again. The ranks rendezvous through a file in the folder of the sockets, which only its owner can access: torchrun's
rendezvous would be a TCP server on all interfaces, which unpickles what any client sends.

A group dies as a whole. If it was ready before, the next one is forked here; else this process ends, and the launcher
decides whether to start it again.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Final, NamedTuple

from strata.base import log
from strata.base.parent import end_with_parent, name_process
from strata.base.retry import Backoff, no_jitter
from strata.base.settings import put_variables
from strata.train.device_permit import wait_to_start_ranks
from strata.train.runner.collectives import SINGLE_NODE
from strata.train.runner.model.base import import_architecture
from strata.train.runner.runner_dispatcher import run_rank
from strata.train.settings import load_settings

BACKOFF: Final = Backoff(first_s=0.1, most_s=10.0)
STEADY_S: Final = 30.0
"""A group that ran so long before it died is followed by the next one without backoff."""
SHUTDOWN_S: Final = 30.0
"""How long the ranks may take to end after the first one ended well."""
POLL_S: Final = 0.2
"""How long a wait for the end of a rank lasts before its status is read."""
READY: Final = b"ready"
RunRank = Callable[[int, Callable[[], object]], int]
"""Runs the rank with this number to its end and returns its exit status. It calls the function when it is ready."""
_log = log.get(__name__)


class GroupEnd(NamedTuple):
    """How a group of ranks ended: the rank that ended first, its exit status, and whether the group had been ready."""

    rank: int
    status: int
    was_ready: bool


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m strata.train.runner.single_node", description="All ranks of one machine."
    )
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE", help="The server's settings, TOML.")
    settings = load_settings(parser.parse_args().settings)
    log.configure(settings.server.log_format or "json", settings.server.log_level, colour=False)
    size = settings.by_device.nproc
    settings.rendezvous_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    import_architecture(settings.model.path)
    # What was imported stays: no collection of a rank has to look at it, or to copy its pages.
    gc.freeze()

    def run(rank: int, notify_ready: Callable[[], object]) -> int:
        name_process(f"strata-rank-{rank}")
        put_variables(_variables(rank, size))
        return run_rank(settings, notify_ready)

    def run_one_group() -> GroupEnd:
        wait_to_start_ranks(settings)
        # The file of an earlier group would be mistaken for this one's.
        settings.rendezvous_file.unlink(missing_ok=True)
        return run_group(run, size)

    return run_groups(run_one_group)


def run_groups(run_one_group: Callable[[], GroupEnd]) -> int:
    """Run one group after the other, until one ends well or was never ready: the exit status of this process."""
    failures = 0
    while True:
        started_s = time.monotonic()
        end = run_one_group()
        lasted_s = time.monotonic() - started_s
        if end.status == 0 or not end.was_ready:
            return end.status
        _log.warning("rank_died", rank=end.rank, status=end.status, after_s=round(lasted_s, 1))
        failures = 1 if lasted_s >= STEADY_S else failures + 1
        time.sleep(BACKOFF.delay_s(failures, no_jitter()))


def run_group(run: RunRank, size: int, shutdown_s: float = SHUTDOWN_S) -> GroupEnd:
    """Fork a group of ranks and wait for its end. A rank that dies takes the others with it."""
    reading, writing = os.pipe()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run_forked, args=(run, rank, os.getpid(), writing)) for rank in range(size)]
    for process in ranks:
        process.start()
    os.close(writing)
    try:
        while not (ended := [rank for rank, process in enumerate(ranks) if process.exitcode is not None]):
            _wait_for_any(ranks)
        first = ended[0]
        status = _end_group(ranks, first, shutdown_s)
        return GroupEnd(first, status, _was_ready(reading))
    finally:
        os.close(reading)


def _wait_for_any(ranks: Sequence[ForkProcess]) -> None:
    """Return when one has ended, or after a moment: the sentinel of a rank that left a process behind stays open."""
    wait([process.sentinel for process in ranks], POLL_S)


def _was_ready(reading: int) -> bool:
    """A process that a rank left behind may hold the other end of the pipe open: reading must not wait for it."""
    os.set_blocking(reading, False)
    try:
        return os.read(reading, len(READY)) == READY
    except BlockingIOError:
        return False


def _end_group(ranks: Sequence[ForkProcess], first: int, shutdown_s: float) -> int:
    """The status of the first rank that failed; 0 if none did, even if some were so slow to end that they are killed
    here."""
    if ranks[first].exitcode == 0:
        deadline_s = time.monotonic() + shutdown_s
        while (running := [each for each in ranks if each.exitcode is None]) and time.monotonic() < deadline_s:
            _wait_for_any(running)
    failed = [process.exitcode for process in (ranks[first], *ranks) if process.exitcode]
    slow = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join()
    if failed:
        return _shell_status(failed[0])
    if slow:
        _log.warning("slow_ranks_killed", ranks=slow, after_s=shutdown_s)
    return 0


def _shell_status(status: int) -> int:
    """A signal as a shell reports it: a process cannot end with a negative status."""
    return 128 - status if status < 0 else status


def _run_forked(run: RunRank, rank: int, parent: int, ready: int) -> None:
    """A rank that lost its parent would keep the socket for ever."""
    end_with_parent(signal.SIGKILL, parent=parent)
    sys.exit(run(rank, lambda: os.write(ready, READY)))


def _variables(rank: int, size: int) -> dict[str, str]:
    """Returns the variables as torchrun sets them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": SINGLE_NODE,
    }


if __name__ == "__main__":
    sys.exit(main())
