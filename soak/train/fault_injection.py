"""Fault injection in a running server: the first of its processes that reaches the failpoint named in a file dies.

Python imports `sitecustomize` when it starts. The server's PYTHONPATH leads to one that calls `watch`, so every process
of the server polls for that file, which can appear at any time.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Final

from soak.train.noisy_kernels import add_noise
from strata.base import failpoint
from strata.base.settings import process_environment

ROOT: Final = Path(__file__).parents[2]
POLL_S: Final = 0.02
ORDER: Final = "order"
TAKEN: Final = "taken"
DIED: Final = "died"
JOURNAL: Final = (
    "journal.replica.after_lead",
    "journal.replica.before_commit",
    "database.sqlite.before_commit",
    "database.sqlite.after_commit",
)
"""Failpoints that the orchestrator reaches; the last two are reached by the API server too."""
NOT_REACHED: Final = {
    "train.store.": "only with an object store",
    "train.checkpoint.after_shard": "only where the whole model is trained",
    "train.checkpoint.after_exchange": "a server gives each save a folder of its own, and exchanges none",
    "train.checkpoint.before_removal": "the same",
    "train.orchestrator.import_": "nothing is imported here",
}
"""Failpoints that this server does not reach, and why; other tests kill there."""
MODULES: Final = {
    "orchestrator": "strata.train.orchestrator",
    "api": "strata.cli.serve.api_process",
    "rank": "strata.train.runner",
}

PARENT_OF_RANKS: Final = "strata.train.runner.single_node"


def failpoints() -> list[str]:
    """All failpoints in the source of the training server that this one reaches, and those of its journal."""
    sources = (ROOT / "src/strata/train").rglob("*.py")
    named = {name for path in sources for name in re.findall(r'failpoint\("([^"]+)"\)', path.read_text("utf-8"))}
    return [*sorted(name for name in named if not name.startswith(tuple(NOT_REACHED))), *JOURNAL]


def prepare(folder: Path) -> str:
    """The PYTHONPATH of a server that `arm_on_file` can be used with."""
    folder.mkdir(parents=True)
    call = f"from soak.train.fault_injection import watch\nwatch({str(folder)!r})\n"
    (folder / "sitecustomize.py").write_text(call, encoding="utf-8")
    return f"{folder}:{ROOT}"


def arm_on_file(folder: Path, name: str) -> None:
    """The first process that reaches the failpoint dies. Earlier orders are withdrawn."""
    disarm(folder)
    temporary = folder / f".{ORDER}"
    temporary.write_text(name, encoding="utf-8")
    temporary.rename(folder / ORDER)


def disarm(folder: Path) -> bool:
    """False if a process has taken the order already."""
    late = (folder / TAKEN).exists()
    for name in (ORDER, TAKEN, DIED):
        (folder / name).unlink(missing_ok=True)
    return not late


def died(folder: Path) -> str | None:
    """The process that died at the failpoint; None if none has."""
    try:
        return (folder / DIED).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def watch(folder: str) -> None:
    """Start polling in a process of the server."""
    watcher = _Watcher(Path(folder))
    watcher.start()
    # A fork has no thread but the one that forked: ranks are forked.
    if PARENT_OF_RANKS in sys.orig_argv:
        os.register_at_fork(after_in_child=watcher.start)
        os.register_at_fork(after_in_child=lambda: add_noise(Path(folder)))


class _Watcher:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._armed = ""

    def start(self) -> None:
        self.poll_once()
        Thread(target=self.run, daemon=True, name="armed").start()

    def run(self) -> None:
        while True:
            time.sleep(POLL_S)
            self.poll_once()

    def poll_once(self) -> None:
        try:
            name = (self._folder / ORDER).read_text(encoding="utf-8")
        except FileNotFoundError:
            name = ""
        if name != self._armed:
            failpoint.disarm_all()
            if name:
                failpoint.arm(name, self._die)
            self._armed = name

    def _die(self, name: str) -> None:
        try:
            # Only one process can take the order.
            (self._folder / ORDER).rename(self._folder / TAKEN)
        except FileNotFoundError:
            return
        temporary = self._folder / f".{DIED}"
        temporary.write_text(_process_name(), encoding="utf-8")
        temporary.rename(self._folder / DIED)
        failpoint.kill(name)


def _process_name() -> str:
    if rank := process_environment().get("RANK"):
        return f"rank {rank}"
    (found,) = [who for who, module in MODULES.items() if module in sys.orig_argv]
    return found
