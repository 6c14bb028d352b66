"""Machines of a network that is nobody else's: each has a network namespace, and with it addresses and a loopback of
its own; a bridge on the first of them joins them. Files are those of this machine, as on a file system they share.

Nothing of it touches the interfaces, addresses or ports that this machine has.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.machines import clean_environment
from tests.shell.fleet_agent.waiting import eventually, is_alive

PATIENCE_S: Final = 120.0
_BIN: Final = Path(sys.executable).parent


class Task:
    """A command that runs on a machine. What it says goes to a file, so that it never waits for a reader."""

    def __init__(self, machine: Machine, command: str, folder: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                machine.words(command),
                cwd=folder,
                env=machine.environ,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def until_it_says(self, pattern: str) -> None:
        def look() -> bool:
            assert self.running, f"it ended: {self.said()[-3000:]}"
            return re.search(pattern, self.said()) is not None

        eventually(look, PATIENCE_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        self._process.terminate()
        return self.end()

    def end(self) -> int:
        """The status it ends with by itself."""
        return self._process.wait(PATIENCE_S)

    def reap(self) -> None:
        if self.running:
            self._process.kill()
        self._process.wait(PATIENCE_S)


class Machine:
    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._tasks: list[Task] = []
        self.environ = clean_environment() | {"PATH": f"{_BIN}:{os.defpath}:/usr/sbin:/sbin"}

    def words(self, command: str) -> list[str]:
        """A command as one types it; the shell gives its process to it, so that a signal reaches it."""
        return ["ip", "netns", "exec", self._namespace, "bash", "-c", f"exec env {command}"]

    def start(self, command: str, folder: Path, log: Path) -> Task:
        task = Task(self, command, folder, log)
        self._tasks.append(task)
        return task

    def run(self, command: str, folder: Path) -> str:
        """To its end, which must be a good one. What it printed."""
        done = subprocess.run(
            self.words(command),
            cwd=folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End whatever runs in the namespace, also what a command left behind. Nobody else is in it."""
        pids = [int(pid) for pid in _ip("netns", "pids", self._namespace).split()]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for task in self._tasks:
            task.reap()
        eventually(lambda: not any(is_alive(pid) for pid in pids), PATIENCE_S)


@contextmanager
def network(*addresses: str) -> Iterator[list[Machine]]:
    """A machine for each of these addresses, on `eth0` except for the first, whose interface is the bridge."""
    assert os.geteuid() == 0, "only root can make network namespaces: run this test as root"
    names = [f"strata-{os.getpid()}-{number}" for number in range(len(addresses))]
    head = names[0]
    with ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            # With a namespace its interfaces go too.
            undo.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", head, "link", "add", "bridge", "type", "bridge")
        for number, name in enumerate(names[1:], start=1):
            port = f"port{number}"
            _ip("-n", head, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", head, "link", "set", port, "master", "bridge", "up")
        for name, address in zip(names, addresses, strict=True):
            interface = "bridge" if name == head else "eth0"
            _ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")
        machines = [Machine(name) for name in names]
        for machine in machines:
            undo.callback(machine.close)
        yield machines


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
