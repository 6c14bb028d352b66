"""Failpoints of a server that runs already: each of its processes dies at the one that a file names.

Python imports `sitecustomize` when it starts. A server whose PYTHONPATH leads to one that calls `watch` has this in
every process, from its first moment, and is told what to do by a file that can appear at any time.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Final

from strata.base import failpoint
from strata.base.settings import process_environment

ROOT: Final = Path(__file__).parents[2]
LOOK_S: Final = 0.02
ORDER: Final = "order"
TAKEN: Final = "taken"
DIED: Final = "died"
JOURNAL: Final = (
    "journal.replica.after_lead",
    "journal.replica.before_commit",
    "database.sqlite.before_commit",
    "database.sqlite.after_commit",
)
"""What the orchestrator comes by, and at the last two the API server as well."""
ELSEWHERE: Final = {
    "train.store.": "only with an object store",
    "train.checkpoint.after_shard": "only where the whole model is trained",
    "train.checkpoint.after_exchange": "a server gives each save a folder of its own, and exchanges none",
    "train.checkpoint.before_removal": "the same",
    "train.orchestrator.import_": "nothing is imported here",
}
"""What this server does not come by; tests of these parts kill there."""
MODULES: Final = {
    "orchestrator": "strata.train.orchestrator",
    "api": "strata.train.api",
    "rank": "strata.train.runner",
}


def failpoints() -> list[str]:
    """All that the source of the training server names and that this one comes by, and those of its journal."""
    sources = (ROOT / "src/strata/train").rglob("*.py")
    named = {name for path in sources for name in re.findall(r'failpoint\("([^"]+)"\)', path.read_text("utf-8"))}
    return [*sorted(name for name in named if not name.startswith(tuple(ELSEWHERE))), *JOURNAL]


def prepare(folder: Path) -> str:
    """The PYTHONPATH of a server that `order` can be used with."""
    folder.mkdir(parents=True)
    call = f"from soak.train.armed import watch\nwatch({str(folder)!r})\n"
    (folder / "sitecustomize.py").write_text(call, encoding="utf-8")
    return f"{folder}:{ROOT}"


def order(folder: Path, name: str) -> None:
    """Whichever process comes there first dies. Earlier orders are forgotten."""
    withdraw(folder)
    beside = folder / f".{ORDER}"
    beside.write_text(name, encoding="utf-8")
    beside.rename(folder / ORDER)


def withdraw(folder: Path) -> bool:
    """False if it is too late."""
    late = (folder / TAKEN).exists()
    for name in (ORDER, TAKEN, DIED):
        (folder / name).unlink(missing_ok=True)
    return not late


def died(folder: Path) -> str | None:
    """Who did as told."""
    try:
        return (folder / DIED).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def watch(folder: str) -> None:
    """In a process of the server."""
    watcher = _Watcher(Path(folder))
    watcher.look()
    Thread(target=watcher.run, daemon=True, name="armed").start()


class _Watcher:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._armed = ""

    def run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
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
            # One alone can take it.
            (self._folder / ORDER).rename(self._folder / TAKEN)
        except FileNotFoundError:
            return
        beside = self._folder / f".{DIED}"
        beside.write_text(_who(), encoding="utf-8")
        beside.rename(self._folder / DIED)
        failpoint.kill(name)


def _who() -> str:
    (found,) = [who for who, module in MODULES.items() if module in sys.orig_argv]
    return f"{found} {process_environment()['RANK']}" if found == "rank" else found
