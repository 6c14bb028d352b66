"""The sandbox of an environment's process: what it sees (interpreter, its own code, a socket), and nothing else.

Its tools and rewards are code of strangers. The namespaces and the filter of system calls are those of the fleet's
jobs. Its mounts begin with an empty root instead of the host's: a run knows only where its own secrets lie, and not
where a server of this machine keeps its.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError
from strata.fleet import seccomp
from strata.fleet.bubblewrap import PROGRAMS, link_chain, load_filter, namespace_options

_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
_ETC: Final = ("alternatives", "hosts", "ld.so.cache", "localtime", "nsswitch.conf", "ssl/certs", "ssl/openssl.cnf")
_NOBODY: Final = "65534"
TMP: Final = "/tmp"  # noqa: S108 - of the process alone
TMP_BYTES: Final = 256 << 20
MISSING: Final = 'install bubblewrap, or run the environment without a sandbox: env.sandbox = "off"'


@dataclass(frozen=True)
class Confinement:
    """What a process needs to see of this machine."""

    python: Path
    readable: Sequence[tuple[Path, Path]]
    """Files and folders, and where the process sees them."""
    hidden: Sequence[Path]
    """What no shown folder may hold."""


@contextmanager
def confined(confinement: Confinement, command: Sequence[str]) -> Iterator[tuple[list[str], list[int]]]:
    """The command in a sandbox, and the descriptors to pass to it; PRECONDITION where this machine has none."""
    bwrap = shutil.which("bwrap", path=PROGRAMS) if sys.platform == "linux" else None
    if bwrap is None or not seccomp.is_supported():
        what = "bubblewrap" if bwrap is None else "filter of system calls"
        raise StrataError(
            Code.PRECONDITION, f"no sandbox for the environment: this machine has no {what}", hint=MISSING
        )
    with load_filter(seccomp.build_filter()) as (options, passed):
        namespaces = namespace_options(as_root=False, network=False)
        user = ("--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL", "--new-session", "--chdir", TMP)
        yield [bwrap, *namespaces, *user, *_mounts(confinement), *options, "--", *command], passed


def _mounts(confinement: Confinement) -> Iterator[str]:
    """Yields the mounts in the order in which they are made."""
    for name in _SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for name in _ETC:
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    yield from ("--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", TMP)
    for path in _interpreter(confinement.python):
        _require_harmless(path, confinement.hidden)
        if path.is_symlink() and not path.is_dir():
            yield from ("--symlink", str(path.readlink()), str(path))
        else:
            yield from ("--ro-bind", str(path), str(path))
    for source, target in confinement.readable:
        _require_harmless(source, confinement.hidden)
        yield from ("--ro-bind", str(source), str(target))
    yield from ("--remount-ro", "/")


def _interpreter(python: Path) -> list[Path]:
    """The virtual environment, the links, and the installation of an interpreter, without what the system shows."""
    found: dict[Path, None] = {}
    for path in link_chain(python):
        folder = path.parent.parent
        whole = (folder / "pyvenv.cfg").exists() or not path.is_symlink()
        found[folder if whole else path] = None
    shown = [path for path in found if not path.is_relative_to("/usr") and path != Path("/")]
    # A link in a folder that is shown is there already.
    return [path for path in shown if not any(other in path.parents for other in shown)]


def _require_harmless(shown: Path, hidden: Sequence[Path]) -> None:
    for folder in (*hidden, Path.home()):
        if folder.resolve().is_relative_to(shown.resolve()):
            raise StrataError(
                Code.INVALID,
                f"the sandbox of the environment would show {shown}, which holds {folder}",
                hint="give the environment an interpreter and a folder of its own",
            )
