"""The mounts and namespaces of a job as options of bubblewrap: what it sees of its host, which devices, and what is
hidden. The environment of a recipe gets the same namespaces and filter, and mounts of its own.

Bubblewrap applies the options in their order, and the order is the protection: what must stay hidden is hidden after
everything that a person may open, and only the attempt's own folder comes after that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError

PROGRAMS: Final = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin"
"""Where bubblewrap and nft are found, whatever a process has in its environment."""
_MAX_LINKS: Final = 40
_TEMPORARY: Final = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - hidden from jobs
_RUN: Final = Path("/run")
"""Hidden: it has the sockets of the services of the host."""
_GPU_DEVICES: Final = ("nvidia*", "dri", "kfd", "infiniband")


@dataclass(frozen=True, slots=True)
class MountView:
    """The folders of the host that jobs see or do not see."""

    state: Path = Path("/nonexistent")
    work: Path = Path("/nonexistent")
    homes: tuple[Path, ...] = ()
    programs: tuple[Path, ...] = ()
    """Folders, links and files of the interpreters of agent and trainers: readable, wherever they are."""
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()

    def mount_options(
        self,
        attempt: Path,
        *,
        tmp: Path,
        readable: Sequence[Path] = (),
        writable: Sequence[Path] = (),
        gpus: bool = False,
    ) -> Iterator[str]:
        """`readable` and `writable` are folders of the agent, below its work folder, that this job may use so."""
        yield from _system(gpus=gpus)
        for folder in _TEMPORARY:
            yield from ("--bind", str(tmp), str(folder))
        for home in self.homes:
            yield from _empty(home)
        for path in self._hidden_programs():
            yield from _parents(path, self._hidden_root(path))
            yield from (
                ("--symlink", str(path.readlink()), str(path))
                if path.is_symlink()
                else ("--ro-bind", str(path), str(path))
            )
        for mode, folders in (("--ro-bind", self.readable), ("--bind", self.writable)):
            for folder in folders:
                yield from _bind(mode, folder, self._hidden_root(folder))
        for folder in filter(Path.is_dir, (self.state, self.work, *self.hidden)):
            yield from _parents(folder, self._hidden_root(folder))
            yield from _empty(folder)
        for folder in readable:
            yield from _bind("--ro-bind", folder, self.work)
        for folder in (*writable, attempt):
            yield from _bind("--bind", folder, self.work)

    def hides(self, folder: Path) -> bool:
        """Says whether a job does not see this folder unless it is shown."""
        shown = (*self.readable, *self.writable, *self.programs)
        return self._hidden_root(folder) is not None and not any(folder.is_relative_to(each) for each in shown)

    def check_visible(self, path: Path, shown: Sequence[Path]) -> None:
        """PRECONDITION if a job that sees `shown` in addition would not see this folder or program of a trainer."""
        shown = [*shown, *self.readable, *self.writable, *self.programs]
        if self._hidden_root(path) is not None and not any(path.is_relative_to(each) for each in shown):
            raise StrataError(
                Code.PRECONDITION,
                f"the sandbox of this host hides {path}, which the trainer needs",
                hint="upload the folder, or add it to readable in [agent.sandbox] of the host",
            )

    def _hidden_programs(self) -> Iterator[Path]:
        for folder in self.programs:
            root = self._hidden_root(folder)
            if root is not None and root != folder:
                yield folder

    def _hidden_root(self, path: Path) -> Path | None:
        """The hidden folder that this path lies in; None if it can be seen."""
        roots = [root for root in (*_TEMPORARY, _RUN, *self.homes) if path.is_relative_to(root)]
        return max(roots, key=lambda root: len(root.parts), default=None)


def namespace_options(*, as_root: bool, network: bool) -> Iterator[str]:
    """`as_root`: without a user namespace, for a process that becomes the job's user inside. `network`: the host's."""
    yield from ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent")
    if not network:
        yield "--unshare-net"
    if as_root:
        yield from ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    else:
        yield "--unshare-user"


@contextmanager
def load_filter(program: bytes) -> Iterator[tuple[list[str], list[int]]]:
    """The options that load this filter of system calls, and the descriptors that bubblewrap needs for it."""
    if not program:
        yield [], []
        return
    with os.fdopen(os.memfd_create("filter"), "w+b") as file:
        file.write(program)
        file.seek(0)
        yield ["--seccomp", str(file.fileno())], [file.fileno()]


def link_chain(path: Path) -> Iterator[Path]:
    """The path, each one that its links name, and where they end."""
    path = path.absolute()
    for _ in range(_MAX_LINKS):
        yield path
        if not path.is_symlink():
            break
        path = Path(os.path.normpath(path.parent / path.readlink()))
    yield path.resolve()


def _system(*, gpus: bool) -> Iterator[str]:
    yield from ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", *_empty(_RUN))
    # For all users: data loaders share memory there.
    yield from ("--perms", "1777", "--tmpfs", "/dev/shm")  # noqa: S108 - of the job alone
    for device in sorted(Path("/dev").iterdir()) if gpus else ():
        if any(device.match(pattern) for pattern in _GPU_DEVICES):
            yield from ("--dev-bind", str(device), str(device))
    resolver = Path("/etc/resolv.conf").resolve()
    if resolver.is_relative_to(_RUN) and resolver.exists():
        yield from _bind("--ro-bind", resolver, _RUN)


def _empty(folder: Path) -> tuple[str, ...]:
    return ("--perms", "0755", "--tmpfs", str(folder))


def _bind(mode: str, folder: Path, hidden_root: Path | None) -> Iterator[str]:
    yield from _parents(folder, hidden_root)
    yield from (mode, str(folder), str(folder))


def _parents(folder: Path, hidden_root: Path | None) -> Iterator[str]:
    """The folders between a hidden one and this. Bubblewrap would make them as well, but for root alone."""
    for parent in reversed(folder.parents) if hidden_root is not None else ():
        if hidden_root is not None and parent != hidden_root and parent.is_relative_to(hidden_root):
            yield from ("--perms", "0755", "--dir", str(parent))
