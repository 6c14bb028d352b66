"""`python -m strata.train.runner.single_node --settings FILE`: forks all ranks of one machine without torchrun, starts
a group again that died, with backoff (0.1 to 10 s), and ends the others 30 s after the first that ended. With
`--events-fd` it forks the ranks of one host of several, of the generation that its standard input names.

This process imports the engine once and forks the ranks, so that a group that follows a dead one need not import it
again. The ranks rendezvous through a file in the folder of the sockets, which only its owner can access: torchrun's
rendezvous would be a TCP server on all interfaces, which unpickles what any client sends.

A group dies as a whole. If it was ready before, the next one is forked here; else this process ends, and the launcher
decides whether to start it again. Of several hosts the launcher of the first decides, for all of them.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from strata.base import log
from strata.base.parent import end_with_parent, name_process
from strata.base.retry import Backoff, no_jitter
from strata.base.settings import put_variables
from strata.train.device_permit import wait_to_start_ranks
from strata.train.link.keys import ClientKeys, read_invite
from strata.train.plan.host_plan import RankGeneration
from strata.train.runner.collectives import SINGLE_NODE
from strata.train.runner.host_files import FETCHED, OUTGOING, JoinedFiles, OwnFiles
from strata.train.runner.model.base import import_architecture
from strata.train.runner.runner_dispatcher import HostRank, run_rank
from strata.train.settings import ServerSettings, load_settings

BACKOFF: Final = Backoff(first_s=0.1, most_s=10.0)
STEADY_S: Final = 30.0
"""A group that ran so long before it died is followed by the next one without backoff."""
SHUTDOWN_S: Final = 30.0
"""How long the ranks may take to end after the first one ended well."""
POLL_S: Final = 0.2
"""How long a wait for the end of a rank lasts before its status is read."""
READY: Final = b"ready"
KILLED: Final = 137
"""The exit status of ranks that the launcher ended, as a shell reports it."""
MEETING: Final = timedelta(seconds=60)
"""How long ranks wait for each other at the store: on all hosts they are forked within a moment."""
MEETING_BACKLOG: Final = 1024
"""Ranks that may connect at once."""
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
    parser.add_argument("--events-fd", type=int, help="For events; orders are read from standard input.")
    parser.add_argument("--address", default="", help="The address of the first host, on which ranks meet.")
    parser.add_argument("--first-host", default="", help="Where a host that joined finds files.")
    parser.add_argument("--invite", type=Path, help="The keys for that.")
    options = parser.parse_args()
    settings = load_settings(options.settings)
    log.configure(settings.server.log_format or "json", settings.server.log_level, colour=False)
    size = settings.by_device.nproc
    settings.rendezvous_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    import_architecture(settings.model.path)
    # What was imported stays: no collection of a rank has to look at it, or to copy its pages.
    gc.freeze()
    if options.events_fd is not None:
        keys = read_invite(options.invite) if options.first_host else None
        return run_generations(settings, options.events_fd, options.address, options.first_host, keys)

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


def run_generations(
    settings: ServerSettings, events: int, address: str, first_host: str, keys: ClientKeys | None
) -> int:
    """Run the generations that the launcher names, until it is gone: the exit status of this process.

    On the first host the ranks meet at a socket of this process, which listens at the private address and nowhere else.
    Rank 0 has the store there. A store does not unpickle; keys of each generation have a prefix of their own.
    """
    meeting = socket.create_server((address, 0), backlog=MEETING_BACKLOG) if address else None
    orders, size = Orders(sys.stdin.fileno()), settings.by_device.nproc
    port = meeting.getsockname()[1] if meeting is not None else 0

    def notify(event: str) -> None:
        os.write(events, f"{event}\n".encode())

    notify(f"prepared {port}")
    while (generation := orders.next()) is not None:
        # What ranks that were killed left. The first host has other files under such names.
        for folder in (settings.data / FETCHED, settings.data / OUTGOING) if keys is not None else ():
            shutil.rmtree(folder, ignore_errors=True)

        def run(local_rank: int, notify_ready: Callable[[], object], of: RankGeneration = generation) -> int:
            rank = of.first_rank + local_rank
            name_process(f"strata-rank-{rank}")
            put_variables(_variables(local_rank, size, of))
            files = JoinedFiles(first_host, keys, of, settings.data, rank) if keys is not None else OwnFiles()
            on_mesh = msgspec.structs.replace(settings, parallel=of.parallel)
            return run_rank(on_mesh, notify_ready, HostRank(lambda: _store(of, rank, meeting), files))

        notify(f"running {generation.number}")
        end = run_group(run, size, orders=orders)
        notify(f"ended {generation.number} {end.status}")
    return 0


class Orders:
    """What the launcher writes to this process, a line each: the generation to run, or `null`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._line = b""
        self._generation: RankGeneration | None = None
        self._taken: RankGeneration | None = None
        self.closed = False

    def next(self) -> RankGeneration | None:
        """Wait for a generation that has not run here; None when the launcher is gone."""
        while not self.closed and (self._generation is None or self._generation == self._taken):
            self.read()
        self._taken = self._generation
        return None if self.closed else self._taken

    @property
    def is_over(self) -> bool:
        """Says whether the generation that `next` returned is not to run any more."""
        return self.closed or self._generation != self._taken

    def read(self) -> None:
        data = os.read(self.descriptor, 65536)
        self.closed = not data
        *lines, self._line = (self._line + data).split(b"\n")
        if lines:
            self._generation = msgspec.json.decode(lines[-1], type=RankGeneration | None)


def _store(generation: RankGeneration, rank: int, meeting: socket.socket | None) -> Store:
    """Rank 0 serves the store; the others find it at the address of the first host."""
    store = TCPStore(
        generation.address,
        generation.port,
        None,
        rank == 0,
        MEETING,
        wait_for_workers=False,
        # A copy: the store closes it, and the next generation needs it too.
        master_listen_fd=os.dup(meeting.fileno()) if rank == 0 and meeting is not None else None,
    )
    return PrefixStore(f"{generation.run}/{generation.number}", store)


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


def run_group(run: RunRank, size: int, shutdown_s: float = SHUTDOWN_S, *, orders: Orders | None = None) -> GroupEnd:
    """Fork a group of ranks and wait for its end. A rank that dies takes the others with it, and so does the order
    for another group."""
    reading, writing = os.pipe()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run_forked, args=(run, rank, os.getpid(), writing)) for rank in range(size)]
    for process in ranks:
        process.start()
    os.close(writing)
    try:
        while not (ended := [rank for rank, process in enumerate(ranks) if process.exitcode is not None]):
            _wait_for_any(ranks, orders)
            if orders is not None and orders.is_over:
                _kill(ranks)
                return GroupEnd(0, KILLED, _was_ready(reading))
        first = ended[0]
        status = _end_group(ranks, first, shutdown_s)
        return GroupEnd(first, status, _was_ready(reading))
    finally:
        os.close(reading)


def _wait_for_any(ranks: Sequence[ForkProcess], orders: Orders | None = None) -> None:
    """Return when one has ended, when there is an order, or after a moment: the sentinel of a rank that left a process
    behind stays open."""
    told = [orders.descriptor] if orders is not None else []
    ready = wait([*told, *(process.sentinel for process in ranks)], POLL_S)
    if orders is not None and orders.descriptor in ready:
        orders.read()


def _kill(ranks: Sequence[ForkProcess]) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join()


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
    _kill(ranks)
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


def _variables(rank: int, size: int, generation: RankGeneration | None = None) -> dict[str, str]:
    """Returns the variables as torchrun sets them, of a rank of this machine."""
    return {
        "RANK": str(rank if generation is None else generation.first_rank + rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size if generation is None else generation.ranks),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1" if generation is None else generation.address,
        "TORCHELASTIC_RUN_ID": SINGLE_NODE,
    }


if __name__ == "__main__":
    sys.exit(main())
