"""Unix sockets: addresses `unix:PATH`, private folders, length limit (100), backlog, and checks of whose process
listens.

On loopback TCP any user of a machine can take a free port and be taken for the server. A socket in a folder that only
its owner can write to cannot be taken: the process that listens there belongs to that owner, or to root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError

SCHEME: Final = "unix:"
BACKLOG: Final = 2048
LONGEST: Final = 100
"""Characters of a path that a Unix socket can have on every system, with a little room."""
_folders: Final[dict[Path, int]] = {}
"""Descriptors of folders whose sockets have paths that are too long."""


def format_unix_address(path: Path) -> str:
    return f"{SCHEME}{path.expanduser().absolute()}"


def parse_unix_address(address: str) -> Path:
    """The path of `unix:PATH`; a relative one counts from the working folder."""
    text = address.removeprefix(SCHEME)
    if not address.startswith(SCHEME) or not text.strip("/") or "\0" in text:
        raise StrataError(Code.INVALID, f"{address[:200]!r} is not the address of a Unix socket", hint="unix:PATH")
    return Path(text).expanduser().absolute()


def listen_unix(path: Path) -> socket.socket:
    """A listener that only the owner of this process can connect to. CONFLICT if another process listens there."""
    with _opened(path.parent, for_reading=False) as folder:
        _refuse_writable(path.parent, os.fstat(folder))
        _remove_stale(path, folder)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Before `bind`: on Linux the file then never has another mode.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(_short(path, folder))
            path.chmod(0o600)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise StrataError(Code.UNAVAILABLE, f"cannot listen on {format_unix_address(path)}: {error}") from error
    return listener


def connect_unix(path: Path, timeout_s: float | None = None) -> socket.socket:
    """FORBIDDEN if another user could listen there: nothing has been sent by then. OSError if no process listens."""
    with _opened(path.parent, for_reading=True) as folder:
        found = os.fstat(folder)
        _refuse_writable(path.parent, found)
        caller = os.geteuid()
        if found.st_uid not in (caller, 0) and caller != 0:
            raise StrataError(Code.FORBIDDEN, f"{path.parent} belongs to another user (uid {found.st_uid})")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(_short(path, folder))
            _refuse_peer(path, connection, (caller, 0, found.st_uid))
        except BaseException:
            connection.close()
            raise
    return connection


def open_socket(folder: Path, inside: str) -> int:
    """A descriptor of the socket at this path inside the folder, to connect to through `/proc/self/fd`. No link inside
    the folder is followed, so who may write there cannot lead to another socket. OSError if there is no socket."""
    path = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    *folders, name = inside.split("/")
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part, flags in [*((each, path | os.O_DIRECTORY) for each in folders), (name, path)]:
        try:
            inner = os.open(part, flags, dir_fd=opened)
        finally:
            os.close(opened)
        opened = inner
    if not stat.S_ISSOCK(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(folder / inside))
    return opened


def is_listening(path: Path) -> bool:
    """Says whether a process listens there."""
    try:
        connect_unix(path, 5.0).close()
    except (OSError, StrataError):
        return False
    return True


def lasting_path(path: Path) -> Path:
    """The same place by a path that is short enough for a socket, for libraries that connect whenever they have to.

    A path that is too long leads through the descriptor of its folder, which stays open as long as this process lives.
    """
    if len(str(path)) <= LONGEST:
        return path
    folder = _folders.get(path.parent)
    if folder is None or not os.path.samestat(os.fstat(folder), path.parent.stat()):
        folder = _folders[path.parent] = _open_folder(path.parent)
    return Path(_short(path, folder))


@contextlib.contextmanager
def _opened(folder: Path, *, for_reading: bool) -> Iterator[int]:
    """Opens the folder, so that what is checked is what is used: the folder cannot be exchanged in between."""
    try:
        descriptor = _open_folder(folder)
    except OSError as error:
        if for_reading:
            raise
        raise StrataError(Code.UNAVAILABLE, f"cannot open {folder}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY))


def _refuse_writable(folder: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        raise StrataError(
            Code.FORBIDDEN,
            f"others can write to {folder} (mode {mode:04o}) and could put a socket of theirs there",
            hint=f"chmod 700 {folder}",
        )


def _short(path: Path, folder: int) -> str:
    """The same place by a name that is short enough for a socket."""
    if Path("/proc/self/fd").is_dir():
        return f"/proc/self/fd/{folder}/{path.name}"
    if len(str(path)) > LONGEST:
        raise StrataError(
            Code.INVALID, f"{path} is too long for a Unix socket", hint="choose a folder with a short path"
        )
    return str(path)


def _remove_stale(path: Path, folder: int) -> None:
    """The file of a process that was killed."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StrataError(Code.CONFLICT, f"{path} is there and no socket", hint="move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(_short(path, folder))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise StrataError(Code.UNAVAILABLE, f"cannot listen on {format_unix_address(path)}: {error}") from error
    raise StrataError(Code.CONFLICT, f"another process listens on {format_unix_address(path)}")


def _refuse_peer(path: Path, connection: socket.socket, expected: tuple[int, ...]) -> None:
    """Compare the user of the listening process, as the kernel reports it; elsewhere the folder's mode counts."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", packed)
    if uid not in expected:
        raise StrataError(Code.FORBIDDEN, f"another user (uid {uid}) listens on {format_unix_address(path)}")
