"""A machine of its own to install on: this one, with everything that is written to /etc, /opt and /var/lib thrown away.

A mount namespace with overlays, so users are made and removed for real, and nobody outside sees any of it. Needs root.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = "/usr/bin/python3"
"""One that every user can execute: the system's, as a person would have it."""
MOUNTS: Final = """
set -e
mount -t tmpfs tmpfs "$1"
for folder in etc opt var/lib; do
    mkdir -p "$1/$folder/upper" "$1/$folder/work"
    mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$1/$folder/upper,workdir=$1/$folder/work" "/$folder"
done
echo ready
read -r _
"""


class Machine:
    def __init__(self, holder: subprocess.Popen[str]) -> None:
        self._enter = ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt"]

    def runs(self, *command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if "input" not in more else {}
        return subprocess.run(
            [*self._enter, *command], capture_output=True, text=True, timeout=240, check=False, **given, **more
        )

    def starts(self, command: Sequence[str], output: IO[bytes], **more: Any) -> subprocess.Popen[bytes]:
        """In a namespace, `nsenter` becomes the program, so its number is the program's."""
        return subprocess.Popen(
            [*self._enter, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, **more
        )

    def has(self, path: str) -> bool:
        return self.runs("test", "-e", path).returncode == 0

    def mode(self, path: str) -> str:
        """Owner and mode."""
        return self.runs("stat", "-c", "%U %a", path).stdout.strip()


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    scratch = folder / "machine"
    scratch.mkdir()
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", MOUNTS, "sh", str(scratch)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        try:
            yield Machine(holder)
        finally:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(30)


def clone_without(folder: Path, *missing: str) -> Path:
    """A clone with the installers and the units, but not with those that are missing; and without pins."""
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    (folder / "scripts").mkdir()
    for script in (ROOT / "scripts").glob("install-*.sh"):
        shutil.copy(script, folder / "scripts")
    for name in missing:
        (folder / "deploy" / "systemd" / name).unlink()
    return folder


class Watch:
    """Looks for words among the arguments of every process of the machine, again and again, while it is open.

    And in the environments of those that are not excepted: the process that is given a variable has it, its children
    must not.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word.encode() for word in words]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.arguments: set[str] = set()
        self.environments: set[str] = set()
        self.rounds = 0
        self.seen: set[str] = set()
        """Every command line, so that a test can tell that it looked at what it meant."""

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.rounds += 1
            for process in Path("/proc").glob("[0-9]*"):
                self._look_at(process)

    def _look_at(self, process: Path) -> None:
        try:
            arguments, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            return
        shown = arguments.replace(b"\0", b" ").decode(errors="replace").strip()
        self.seen.add(shown)
        if any(word in arguments for word in self._words):
            self.arguments.add(shown)
        if any(word in environment for word in self._words):
            self.environments.add(shown)
