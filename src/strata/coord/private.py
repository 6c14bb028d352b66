"""The coordinator that a command starts for itself on loopback: its free port, its token secret, and how it is
restarted (1 to 30 s) and stopped.

It is started again when it dies, and ends with the command. No gRPC here: whoever starts it need not speak to it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from strata.base.clock import Clock
from strata.base.parent import end_with_parent
from strata.base.retry import Backoff, no_jitter
from strata.base.settings import process_environment

BACKOFF: Final = Backoff(first_s=1.0, most_s=30.0)
STOP_S: Final = 45.0
"""torchrun gives its workers 30 s to end."""


@dataclass(frozen=True, kw_only=True)
class PrivateCoordinator:
    command: Sequence[str]
    """`strata coordinator`, of this Python."""
    address: str
    folder: Path
    """Its journal and log."""
    secret: Path
    """The file with the secret of its tokens."""

    async def keep(self, clock: Clock, say: Callable[[str], None]) -> None:
        """Run it until this is cancelled. `say` gets lines for a person."""
        log_file = self.folder / "coordinator.log"
        failures = 0
        while True:
            with log_file.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *(*self.command, "--listen", self.address, "--log-format", "json"),
                    *("--database", f"sqlite:{self.folder / 'coordinator.db'}"),
                    env={
                        **with_secret_file("COORDINATOR_TOKEN_SECRET", self.secret),
                        "STRATA_COORDINATOR_BACKUPS": str(self.folder / "backups"),
                    },
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=partial(end_with_parent, parent=os.getpid()),
                )
            try:
                status = await process.wait()
            finally:
                await stop_process(process, STOP_S)
            failures += 1
            say(f"the coordinator ended with status {status} (see {log_file}): starting it again")
            await clock.sleep(BACKOFF.delay_s(failures, no_jitter()))


def reserve_port(port: int = 0) -> socket.socket:
    """Bound and never listening: the port stays ours while the coordinator is down, and it can bind it too."""
    guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        guard.bind(("127.0.0.1", port))
    except OSError:
        guard.close()
        raise
    return guard


def with_secret_file(setting: str, file: Path) -> Mapping[str, str]:
    """This process's variables, with the file of a secret in place of any other way to give it."""
    name = f"STRATA_{setting}"
    return {key: value for key, value in process_environment().items() if key != name} | {f"{name}_FILE": str(file)}


async def stop_process(process: asyncio.subprocess.Process, within_s: float) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
