"""Processes of the command line as they stand on machines: people with a home each, a hub with TLS, agents of hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.shell.fleet_agent.waiting import eventually

ROOT: Final = Path(__file__).parents[2]
STRATA: Final = str(Path(sys.executable).with_name("strata"))
_LISTEN: Final = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_HUB: Final = re.compile(r"hub on (http://[0-9.:]+)")
_LISTENS: Final = re.compile(r"listening on (https?://[0-9.:]+)")


class Person:
    """Somebody with a home folder, who knows what they logged in to and nothing else."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(parents=True)
        self.environ: Mapping[str, str] = clean_environment() | {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_DATA_HOME": str(home / "data"),
            "COLUMNS": "80",
        }

    def says(self, *words: str, status: int = 0, stdin: str = "") -> str:
        done = subprocess.run(
            [STRATA, *words],
            env=self.environ,
            cwd=self.home,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def knows(self, *words: str) -> Any:
        return json.loads(self.says(*words, "-o", "json"))


class Machine(Person):
    """A person, and `strata up` in a window of theirs."""

    def __init__(self, home: Path, name: str, listen: str = "127.0.0.1:0") -> None:
        super().__init__(home)
        self._name = name
        self._listen = listen
        self.environ = {**self.environ, "STRATA_HUB_KEEP_FREE_BYTES": "0", "STRATA_AGENT_MIN_FREE_GIB": "0"}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = home / "up.log"
        self.url = ""
        """Of the hub, for SDKs."""

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def up(self) -> None:
        words = [STRATA, "up", "--listen", self._listen, "--name", self._name]
        # To a file: nobody reads it while the machine runs, and a full pipe would stop it.
        with self._log.open("wb") as said:
            self._process = subprocess.Popen(words, env=self.environ, stderr=said, cwd=self.home)

        def ready() -> bool:
            assert self.is_up, f"strata up ended: {self._log.read_text()}"
            return any(
                "ready" in line for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")
            )

        eventually(ready, 120.0)
        serving = _HUB.search(self._log.read_text())
        self.url = serving[1] if serving else self.url

    def down(self) -> int:
        """As Ctrl-C does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        # Its jobs have time to end well, and a training server to save its state.
        self._process.wait(120)
        said = self._log.read_text()
        assert said.endswith("strata up: stopped\n"), said
        return self._process.returncode

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)


class Program:
    """A server of the command line. What it says goes to a file, so that it never waits for a reader."""

    def __init__(self, folder: Path, *words: str, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "said.log"
        with self._log.open("ab") as said:
            environ = clean_environment() | {"HOME": str(folder)} | variables
            self._process = subprocess.Popen([STRATA, *words], env=environ, cwd=folder, stderr=said, stdout=said)

    def said(self) -> str:
        return self._log.read_text()

    def until_it_says(self, pattern: re.Pattern[str]) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            assert self._process.poll() is None, f"it ended: {self.said()}"
            return pattern.search(self.said())

        return eventually(look)

    def listens(self) -> bool:
        """Whether somebody could connect to it."""
        links = [str(each.readlink()) for each in Path(f"/proc/{self._process.pid}/fd").iterdir() if each.is_symlink()]
        tables = "".join(Path(f"/proc/{self._process.pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
        rows = [line.split() for line in tables.splitlines()]
        listening = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN}
        return not listening.isdisjoint(links)

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)


class SecureHub(Program):
    """`strata hub` with TLS by its own authority."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.data = folder / "data"
        address = ("--listen", "127.0.0.1:0", "--data", str(self.data), "--tls", "--name", "127.0.0.1")
        super().__init__(folder, "hub", *address, *words, STRATA_HUB_KEEP_FREE_BYTES="0")
        self.url = self.until_it_says(_LISTENS)[1]


class Agent(Program):
    """`strata agent` of a machine that has joined."""

    def __init__(self, folder: Path, state: Path) -> None:
        # The folders of a test are its own user's alone: no other user could run jobs there.
        own = {"STRATA_AGENT_MIN_FREE_GIB": "0", "STRATA_AGENT_SANDBOX_MODE": "off"}
        super().__init__(folder, "agent", "--state", str(state), **own)


def checkout(to: Path) -> None:
    """What a clone has, and what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("strata_train-*.whl")
    return wheel


def newcomer_environment(folder: Path) -> dict[str, str]:
    """Of a person who has a Python and no Strata yet.

    Settings of ours and not HOME, which pip reads as well. A port of its own: somebody may have a hub running here.
    """
    environ = clean_environment() | {
        "STRATA_CLIENT_CONFIG_HOME": str(folder / "config"),
        "STRATA_CLIENT_DATA_HOME": str(folder / "data"),
        "STRATA_HUB_LISTEN": "127.0.0.1:0",
        "STRATA_HUB_KEEP_FREE_BYTES": "0",
        "STRATA_AGENT_MIN_FREE_GIB": "0",
        "COLUMNS": "80",
        "PATH": f"{Path(sys.base_prefix) / 'bin'}:{os.defpath}",
    }
    environ.pop("VIRTUAL_ENV", None)
    return environ


def clean_environment() -> dict[str, str]:
    """That of the tests, without what would lead our programs to another hub."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}  # noqa: TID251
