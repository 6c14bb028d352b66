"""Lists the system calls that a job in namespaces does not get, and builds the BPF filter that bubblewrap loads.

Only calls are listed that the kernel would grant to a process without capabilities. All that need one (mounts, modules,
kexec, the clock) it refuses itself, as long as no user namespace gives it capabilities: those are denied here. Left
open on purpose is `pidfd_getfd`, by which torch shares the memory of cards between processes.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

CLONE_NEWUSER: Final = 0x1000_0000
AF_VSOCK: Final = 40

_ALLOW: Final = 0x7FFF_0000
_ERRNO: Final = 0x0005_0000
_KILL_PROCESS: Final = 0x8000_0000
_LOAD: Final = 0x20
"""A word of `struct seccomp_data`, by its offset."""
_EQUAL: Final = 0x15
_AT_LEAST: Final = 0x35
_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_FIRST_ARGUMENT: Final = 16
"""Its lower half, on little-endian machines."""
_X32: Final = 0x4000_0000
"""Numbers from here on are those of x32, a second table of the same architecture."""

ARCHITECTURES: Final = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
NUMBERS: Final = {
    "x86_64": {
        "socket": 41, "clone": 56, "ptrace": 101, "syslog": 103, "add_key": 248, "request_key": 249, "keyctl": 250,
        "unshare": 272, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
        "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "clone3": 435,
    },
    "aarch64": {
        "unshare": 97, "syslog": 116, "ptrace": 117, "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219,
        "clone": 220, "perf_event_open": 241, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
        "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425, "clone3": 435,
    },
}  # fmt: skip

_DENIED: Final = {
    # Keyrings belong to a user and not to a namespace: jobs of one host would share them.
    "add_key": errno.EPERM, "request_key": errno.EPERM, "keyctl": errno.EPERM,
    # Into another namespace, and parts of the kernel whose defects were the way out of many sandboxes.
    "setns": errno.EPERM, "bpf": errno.EPERM, "perf_event_open": errno.EPERM, "userfaultfd": errno.EPERM,
    # The log of the kernel is that of the whole host.
    "syslog": errno.EPERM,
    # As on an older kernel: programs have another way then. The arguments of clone3 lie in memory, where no filter sees
    # them; the C library falls back to clone.
    "clone3": errno.ENOSYS, "io_uring_setup": errno.ENOSYS,
}  # fmt: skip
_DEBUGGERS: Final = ("ptrace", "process_vm_readv", "process_vm_writev")

_Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand; jumps count instructions to skip."""


def is_supported(machine: str = "") -> bool:
    """Says whether there is a filter for this machine and its kernel takes one."""
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    return (machine or platform.machine()) in ARCHITECTURES and actions.exists()


def build_filter(machine: str = "", *, debugging: bool = False) -> bytes:
    """The program for one architecture, this machine's if none is named; with `debugging` debuggers work."""
    machine = machine or platform.machine()
    numbers = NUMBERS[machine]
    denied = _DENIED if debugging else dict.fromkeys(_DEBUGGERS, errno.EPERM) | _DENIED
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        *_return_if(_EQUAL, ARCHITECTURES[machine], _KILL_PROCESS, otherwise=True),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += _return_if(_AT_LEAST, _X32, _ERRNO | errno.ENOSYS)
    for name, code in denied.items():
        program += _return_if(_EQUAL, numbers[name], _ERRNO | code)
    for name in ("clone", "unshare"):
        program += _deny_argument(numbers[name], _ANY_BIT, CLONE_NEWUSER)
    # To the machine that this one runs on: a network namespace does not keep a job from it.
    program += _deny_argument(numbers["socket"], _EQUAL, AF_VSOCK)
    program += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(_encode(program))


def _return_if(test: int, operand: int, action: int, *, otherwise: bool = False) -> Sequence[_Instruction]:
    """Return the action if the loaded word passes the test, or with `otherwise` if it does not."""
    return ((test, int(otherwise), int(not otherwise), operand), (_RETURN, 0, 0, action))


def _deny_argument(number: int, test: int, operand: int) -> Sequence[_Instruction]:
    """Deny the call if its first argument passes the test, and allow it otherwise."""
    body = ((_LOAD, 0, 0, _FIRST_ARGUMENT), *_return_if(test, operand, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW))
    return ((_EQUAL, 0, len(body), number), *body)


def _encode(program: Sequence[_Instruction]) -> Iterator[bytes]:
    """Each as `struct sock_filter`."""
    for operation, if_true, if_false, operand in program:
        yield struct.pack("<HBBI", operation, if_true, if_false, operand)
