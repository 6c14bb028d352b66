"""The process that handles what a job brings: it unpacks a source or a checkpoint and runs git, as the job's user.

`unprivileged.run` starts it, one for each request. With `run_as` it begins as root, loads its own program, becomes the
job's user for good, and only then reads the request; an archive that breaks a parser breaks a process that has nothing.
It ends with status 0, or with 1 and the reason on stderr.

    python -I -m strata.fleet.agent.job_input [UID GID GROUP,GROUP]    < request, a newline, the bytes of an archive
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.agent import git
from strata.fleet.agent.unpack import UnpackLimits, unpack

# All modules are loaded here, by root: the job's user may not be able to read where they lie.
if sys.platform != "win32":
    import resource

MAX_REQUEST: Final = 1 << 20
MEMORY_BYTES: Final = 1 << 30
"""Of an unpacking: compressed streams may ask for a window of any size."""
_FILES: Final = 256
_MAX_REASON: Final = 4000
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38


class Unpack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The archive on stdin, into a folder that is there."""

    target: str
    max_bytes: int
    max_members: int
    any_link: bool = False


class Checkout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The files of a commit, as a tar file on stdout."""

    url: str
    commit: str
    scratch: str
    """A folder of the job's user, for the repository."""
    protocols: str
    environ: Mapping[str, str]


class FindFolder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Whether there is such a folder, as far as the job's user can see."""

    path: str


Request = Unpack | Checkout | FindFolder


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    code: Code
    message: str
    hint: str | None = None
    errno: int = 0
    """Of an OSError, which is the host's and not the archive's."""


_decode: Final = msgspec.json.Decoder(Request).decode


def main(identity: list[str]) -> int:
    os.umask(0o077)
    if identity:
        become(int(identity[0]), int(identity[1]), [int(group) for group in identity[2].split(",") if group])
    _end_with_parent()
    try:
        request: Request = _decode(sys.stdin.buffer.readline(MAX_REQUEST))
        _limit(request)
        _handle(request)
        sys.stdout.buffer.flush()
    except StrataError as error:
        return _refuse(Refusal(code=error.code, message=error.message[:_MAX_REASON], hint=error.hint))
    except MemoryError:
        too_much = f"the source bundle cannot be unpacked: that takes more than {MEMORY_BYTES} bytes of memory"
        return _refuse(Refusal(code=Code.PRECONDITION, message=too_much))
    except OSError as error:
        return _refuse(Refusal(code=Code.INTERNAL, message=str(error)[:_MAX_REASON], errno=error.errno or 0))
    return 0


def become(uid: int, gid: int, groups: list[int]) -> None:
    """Another user, for good."""
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    if 0 in (os.getuid(), os.geteuid(), uid):
        raise StrataError(Code.INTERNAL, "root does not handle what a job brings")


def _end_with_parent() -> None:
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _limit(request: Request) -> None:
    if sys.platform == "win32":
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    if isinstance(request, Unpack) and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _handle(request: Request) -> None:
    match request:
        case Unpack():
            limits = UnpackLimits(request.max_bytes, request.max_members, request.any_link)
            unpack(cast("BufferedReader", sys.stdin.buffer), Path(request.target), limits)
        case Checkout():
            scratch = Path(tempfile.mkdtemp(prefix="source-", dir=request.scratch))
            try:
                tree = git.checkout(request.url, request.commit, scratch, request.protocols, request.environ)
                _pack(tree, sys.stdout.buffer)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        case FindFolder():
            if not os.path.isdir(request.path):  # noqa: PTH112 - Path.is_dir raises where a parent may not be entered
                raise StrataError(Code.PRECONDITION, f"the trainer's folder {request.path} is not on this host")


def _pack(tree: Path, output: BinaryIO) -> None:
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, arcname=".")


def _refuse(refusal: Refusal) -> int:
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(msgspec.json.encode(refusal))
        sys.stderr.buffer.flush()
    return 1


if __name__ == "__main__":
    # At once, without what an interpreter does at its end: a pipe that was closed is no failure.
    os._exit(main(sys.argv[1:]))
