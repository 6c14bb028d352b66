"""The unprivileged worker: switches to the job's user, then unpacks archives and runs git or uv, with at most 1 GiB of
memory and 256 open files.

`privsep` starts one process for each request. With `run_as` it begins as root, loads its own program, switches to the
job's user for good, and only then reads the request: an archive that breaks a parser breaks a process without
privileges. It exits with status 0, or with 1 and a `WorkerError` on stderr.

    python -I -m strata.fleet.agent.privsep_worker [UID GID GROUP,GROUP]   < request, a newline, the bytes of an archive
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
from strata.base.parent import end_with_parent
from strata.fleet.agent import git, uv
from strata.fleet.agent.unpack import UnpackLimits, unpack

# All modules are loaded here, by root: the job's user may not be able to read the installation.
if sys.platform != "win32":
    import resource

MAX_REQUEST: Final = 64 << 20
MEMORY_BYTES: Final = 1 << 30
"""Memory limit of an unpacking: compressed streams may demand a window of any size."""
_MAX_OPEN_FILES: Final = 256
_MAX_REASON: Final = 4000
_PR_SET_NO_NEW_PRIVS: Final = 38


class UnpackArchive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Unpack the archive on stdin into an existing folder."""

    target: str
    max_bytes: int
    max_members: int
    any_link: bool = False
    private: bool = False


class CheckoutCommit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Write the files of a commit as a tar file to stdout."""

    url: str
    commit: str
    scratch: str
    """A folder of the job's user, where the repository is fetched."""
    protocols: str
    environ: Mapping[str, str]


class CheckFolderExists(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Fail unless the folder exists and the job's user can see it."""

    path: str


class ReadSourceFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Write the files that describe an environment to stdout, as a JSON object by name."""

    folder: str
    file: str


class BuildEnvironment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Build a virtual environment and write a `BuiltEnvironment` to stdout."""

    program: str
    target: str
    scratch: str
    plan: uv.EnvironmentPlan
    environ: Mapping[str, str]
    wheels_only: bool
    """Whether to install without running the code of any package: `uv.build_environment` says how."""


WorkerRequest = UnpackArchive | CheckoutCommit | CheckFolderExists | ReadSourceFiles | BuildEnvironment
OutputRequest = CheckoutCommit | ReadSourceFiles | BuildEnvironment


class WorkerError(msgspec.Struct, frozen=True, kw_only=True):
    code: Code
    message: str
    hint: str | None = None
    errno: int = 0
    """The number of an OSError: then the host is at fault and not the archive."""


_decode: Final = msgspec.json.Decoder(WorkerRequest).decode


def main(identity: list[str]) -> int:
    os.umask(0o077)
    if identity:
        switch_user(int(identity[0]), int(identity[1]), [int(group) for group in identity[2].split(",") if group])
    _give_up_privileges()
    try:
        request: WorkerRequest = _decode(sys.stdin.buffer.readline(MAX_REQUEST))
        _limit_resources(request)
        _handle(request)
        sys.stdout.buffer.flush()
    except StrataError as error:
        return _fail(WorkerError(code=error.code, message=error.message[:_MAX_REASON], hint=error.hint))
    except MemoryError:
        too_much = f"the source bundle cannot be unpacked: that takes more than {MEMORY_BYTES} bytes of memory"
        return _fail(WorkerError(code=Code.PRECONDITION, message=too_much))
    except OSError as error:
        return _fail(WorkerError(code=Code.INTERNAL, message=str(error)[:_MAX_REASON], errno=error.errno or 0))
    return 0


def switch_user(uid: int, gid: int, groups: list[int]) -> None:
    """Become another user, irrevocably."""
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    if 0 in (os.getuid(), os.geteuid(), uid):
        raise StrataError(Code.INTERNAL, "a process of root must not unpack or fetch the input of jobs")


def _give_up_privileges() -> None:
    """No program that this process starts gains any; and it ends with the agent."""
    if sys.platform == "linux":
        end_with_parent(signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _limit_resources(request: WorkerRequest) -> None:
    if sys.platform == "win32":
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not isinstance(request, BuildEnvironment):
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    if isinstance(request, UnpackArchive) and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _handle(request: WorkerRequest) -> None:
    match request:
        case UnpackArchive():
            limits = UnpackLimits(request.max_bytes, request.max_members, request.any_link, request.private)
            unpack(cast("BufferedReader", sys.stdin.buffer), Path(request.target), limits)
        case CheckoutCommit():
            scratch = Path(tempfile.mkdtemp(prefix="source-", dir=request.scratch))
            try:
                tree = git.checkout(request.url, request.commit, scratch, request.protocols, request.environ)
                _write_tar(tree, sys.stdout.buffer)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        case CheckFolderExists():
            if not os.path.isdir(request.path):  # noqa: PTH112 - Path.is_dir raises where a parent may not be entered
                raise StrataError(Code.PRECONDITION, f"the trainer's folder {request.path} is not on this host")
        case ReadSourceFiles():
            sys.stdout.buffer.write(msgspec.json.encode(uv.read_source_files(Path(request.folder), request.file)))
        case BuildEnvironment():
            run = uv.UvProgram(request.program, Path(request.scratch), request.environ, Path(request.target))
            sys.stdout.buffer.write(uv.build_environment(run, request.plan, wheels_only=request.wheels_only))


def _write_tar(tree: Path, output: BinaryIO) -> None:
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, arcname=".")


def _fail(error: WorkerError) -> int:
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(msgspec.json.encode(error))
        sys.stderr.buffer.flush()
    return 1


if __name__ == "__main__":
    # Without the interpreter's shutdown, in which a closed pipe would be an error.
    os._exit(main(sys.argv[1:]))
