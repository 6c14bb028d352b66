"""Starts the workers of a gang on one host where torch is not installed: in the place of torchrun, and with its
variables RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

    python -m strata.coord.local_workers N MAX_RESTARTS PROGRAM…

When a worker fails, all are started again, and the coordinator takes them back to the last committed checkpoint. A gang
on several hosts needs torchrun, whose rendezvous starts all hosts together.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from strata.base.parent import TIED_COMMAND
from strata.base.settings import process_environment

STOP_S: Final = 30.0
"""How long workers have to end after a signal; torchrun gives as much."""
LOOK_S: Final = 0.1


class Stopped(Exception):  # noqa: N818 - a signal, not an error
    """A signal came that ends this process."""


def main(arguments: Sequence[str]) -> int:
    count, restarts, *program = arguments
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        return run_all(int(count), int(restarts), program)
    except Stopped:
        return 128 + signal.SIGTERM


def run_all(count: int, restarts: int, program: Sequence[str]) -> int:
    status = run_once(count, program)
    while status and restarts:
        restarts -= 1
        status = run_once(count, program)
    return status


def run_once(count: int, program: Sequence[str]) -> int:
    """Run all workers until they end; 0, or the status of the first that fails, after which the others are ended."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        # One by one into the list: a signal may come between two.
        workers.extend(_start(program, _variables(rank, count)) for rank in range(count))
        while True:
            statuses = [worker.poll() for worker in workers]
            failed = next((status for status in statuses if status), None)
            if failed is not None:
                return failed if failed > 0 else 128 - failed
            if all(status == 0 for status in statuses):
                return 0
            time.sleep(LOOK_S)
    finally:
        _end(workers)


def _start(program: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = {**process_environment(), **variables}
    return subprocess.Popen([*TIED_COMMAND, sys.executable, "-u", *program], env=environment)


def _variables(rank: int, count: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        # The worker takes its rank from these variables, and ends with this process.
        "STRATA_WORKER_TORCHRUN": "yes",
    }


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    until_s = time.monotonic() + STOP_S
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(max(0.0, until_s - time.monotonic()))
        worker.kill()
        worker.wait()


def _stop(number: int, frame: object) -> None:
    del frame
    # Another signal while the workers end would leave them.
    signal.signal(number, signal.SIG_IGN)
    raise Stopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
