"""Enters the sandbox of a running job (control groups, namespaces, user, seccomp filter) and executes a command of
`strata exec` there.

A supervisor runs it on the host as `python -I -S exec_in_sandbox.py REQUEST`. Nothing of the sandbox is loaded or
executed before this process is the job's user without capabilities, because the job may have put anything there.
Processes of the job cannot look into this one meanwhile: it is not dumpable. The command ends with the job. Standard
library only.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

_KINDS: Final = ("cgroup", "ipc", "uts", "net", "pid", "mnt", "user")
"""The kinds of namespaces in the order in which they are entered: the last but one changes what paths mean, and the
last is entered by itself."""
_NS_GET_USERNS: Final = 0xB701
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2
_INSTRUCTION_BYTES: Final = 8
_CAPABILITIES: Final = 64
_STARTED: Final = 19
"""The place of the start time among the fields behind the program's name in /proc/PID/stat."""
_CANNOT_ENTER: Final = 125
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def main(request: Path) -> int:
    supervisor = os.getppid()
    spec = json.loads(request.read_bytes())
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    pid = spec["pid"]
    try:
        job = os.pidfd_open(pid)
        namespaces = _open_namespaces(pid)
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        # Still the same process, which has lived since before the descriptors were opened: they are the job's.
        if fields[_STARTED] != spec["started"] or _has_ended(job):
            raise ProcessLookupError(errno.ESRCH, "the job has ended")
        for group in spec["control_groups"]:
            Path(group, "cgroup.procs").write_text("0")
        _enter(namespaces, spec)
        # Another user does not inherit this from before.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _load_filter(base64.b64decode(spec["filter"]))
    except OSError as error:
        os.write(2, f"strata: the sandbox of the job cannot be entered: {error}\n".encode())
        return _CANNOT_ENTER
    if os.getppid() != supervisor:
        return _CANNOT_ENTER
    command = os.fork()
    if command == 0:
        _execute(spec)
    # The supervisor sends SIGTERM to the command as well, which may take its time.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return _wait(job, command)


def _open_namespaces(pid: int) -> dict[str, int]:
    """Those of the process that are not this one's own."""
    opened = {}
    for kind in _KINDS:
        descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        if _same_file(os.fstat(descriptor), os.stat(f"/proc/self/ns/{kind}")):  # noqa: PTH116 - a link that no path is
            os.close(descriptor)
        else:
            opened[kind] = descriptor
    return opened


def _enter(namespaces: dict[str, int], spec: dict[str, Any]) -> None:
    user = namespaces.pop("user", None)
    if user is None:
        for descriptor in namespaces.values():
            _set_namespace(descriptor)
        for number in range(_CAPABILITIES):
            _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
        _become_user(spec)
    else:
        # The job's user has made the sandbox, and so is the owner of its user namespaces: of the one that the others
        # belong to, and of the one below it in which the job has no capabilities.
        _become_user(spec)
        owner = fcntl.ioctl(namespaces["mnt"], _NS_GET_USERNS)
        _set_namespace(owner)
        for descriptor in namespaces.values():
            _set_namespace(descriptor)
        if not _same_file(os.fstat(owner), os.fstat(user)):
            _set_namespace(user)
        os.close(owner)
        os.close(user)
    for descriptor in namespaces.values():
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    if _LIBC.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class _FilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("instructions", ctypes.c_ushort), ("program", ctypes.c_char_p))


def _load_filter(program: bytes) -> None:
    """Loads the filter of this process and of all that it starts; empty: none."""
    if not program:
        return
    loaded = _FilterProgram(len(program) // _INSTRUCTION_BYTES, program)
    if _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become_user(spec: dict[str, Any]) -> None:
    if spec["uid"] is not None:
        os.setgroups(spec["groups"])
        os.setgid(spec["gid"])
        os.setuid(spec["uid"])
        # Also after the change of the user.
        _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _execute(spec: dict[str, Any]) -> NoReturn:
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Python ignores these, and what is ignored stays so in the next program.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o077)
        os.chdir(spec["cwd"])
        os.execvpe(spec["command"][0], spec["command"], spec["env"])  # noqa: S606 - that is its task
    except (OSError, ValueError) as error:
        os.write(2, f"strata: cannot run {spec['command'][0]!r}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def _wait(job: int, command: int) -> int:
    """The exit status of the command, as a shell has it. It is killed when the job ends."""
    ended = os.pidfd_open(command)
    poller = select.poll()
    for descriptor in (job, ended):
        poller.register(descriptor, select.POLLIN)
    if ended not in dict(poller.poll()):
        os.write(2, b"strata: the job has ended\n")
        os.kill(command, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    return code if code >= 0 else 128 - code


def _has_ended(process: int) -> bool:
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(0))


def _same_file(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
