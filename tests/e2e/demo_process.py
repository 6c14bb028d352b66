"""`strata demo` as a process of a person."""

from __future__ import annotations

import fcntl
import re
import signal
import subprocess
import termios
from functools import partial
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from tests.e2e.machines import STRATA, Person
from tests.shell.fleet_agent.waiting import eventually

WITHIN_S: Final = 500.0
WITHOUT_TORCH: Final = "import sys\nsys.modules['torch'] = None\n"
"""A module that every Python imports at its start: in these processes torch is not installed."""
LINK: Final = r"http://127\.0\.0\.1:\d+/login\?code=\w+"
"""Of the login, which a demo prints when all of its work is there."""


class Demo:
    """One run of the command, whose folder lies below that of a test."""

    def __init__(self, person: Person, place: Path, *, terminal: int | None = None, with_model: bool = False) -> None:
        self._log = person.home / "demo.log"
        own = {"XDG_RUNTIME_DIR": str(place), "TMPDIR": str(place), "STRATA_URL": "http://127.0.0.1:9"}
        if not with_model:
            (person.home / "sitecustomize.py").write_text(WITHOUT_TORCH, encoding="utf-8")
            own["PYTHONPATH"] = str(person.home)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [STRATA, "demo"],
                env={**person.environ, **own},
                cwd=person.home,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # This test has one thread.
                preexec_fn=None if terminal is None else partial(_take_terminal, terminal),  # noqa: PLW1509
            )

    @property
    def printed(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def until_it_prints(self, pattern: str) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.printed)
            assert found or self.process.poll() is None, self.printed
            return found

        try:
            return eventually(look, WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.printed}") from error

    def below(self) -> list[int]:
        """Its processes and those of its jobs."""
        return [each.pid for each in psutil.Process(self.process.pid).children(recursive=True)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)


def _take_terminal(terminal: int) -> None:
    """Make it the terminal of this session: the kernel sends SIGHUP when it is closed."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
