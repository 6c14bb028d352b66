"""A terminal that a document is played in: one shell, a command at a time, with all that it prints."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

_END: Final = "--- end of output, status "


class Terminal:
    """Folder, variables and the active environment last from one command to the next, as in a window."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._shell = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self._status = 0

    def run(self, command: str) -> tuple[str, int]:
        """What it printed, and its status; `$?` is that of the command before."""
        # Its input is not ours: what it would read are the commands that come after it.
        self._type(f"(exit {self._status})\n{{ {command}\n}} </dev/null\nstatus=$?; echo; echo '{_END}'$status\n")
        printed: list[str] = []
        for line in self._lines():
            if line.startswith(_END):
                self._status = int(line.removeprefix(_END))
                # The line end before the mark is ours: a command need not print one at its end.
                return "".join(printed).removesuffix("\n"), self._status
            printed.append(line)
        raise AssertionError(f"the shell ended in {command!r}: {''.join(printed)}")

    def start(self, command: str, until: str) -> str:
        """Begin something that stays, and has the window from now on; what it printed up to the line with `until`."""
        self._type(f"exec {command}\n")
        printed: list[str] = []
        for line in self._lines():
            printed.append(line)
            if until in line:
                return "".join(printed)
        raise AssertionError(f"{command!r} ended: {''.join(printed)}")

    def interrupt(self) -> tuple[str, int]:
        """Ctrl-C: what it printed since it started, and its status."""
        self._shell.send_signal(signal.SIGINT)
        rest, _ = self._shell.communicate(timeout=60)
        return rest, self._shell.returncode

    def _type(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(text)
        self._shell.stdin.flush()

    def _lines(self) -> Iterator[str]:
        assert self._shell.stdout is not None
        return iter(self._shell.stdout.readline, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shell.poll() is None:
            self._shell.kill()
        self._shell.communicate(timeout=30)
