"""The filter of system calls, run by an interpreter of this test, with the numbers of the kernel's own headers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from strata.fleet.seccomp import ARCHITECTURES, NUMBERS, build_filter

ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}


def decide(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What the kernel would do, by the manual of BPF."""
    record = struct.pack("<IIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    lines = list(struct.iter_unpack("<HBBI", program))
    loaded, at = 0, 0
    while True:
        operation, if_true, if_false, operand = lines[at]
        at += 1
        if operation == 0x06:
            return int(operand)
        if operation == 0x20:
            (loaded,) = struct.unpack_from("<I", record, operand)
            continue
        tests = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}
        at += if_true if tests[operation] else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_numbers_of_calls_are_those_of_the_kernel(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not path.exists():
        pytest.skip("the headers of the kernel are not installed: linux-libc-dev")
    theirs = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    assert {name: theirs[name] for name in NUMBERS[machine]} == NUMBERS[machine]


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("debugging", [False, True])
def test_a_job_gets_all_calls_but_the_listed_ones(machine: str, debugging: bool) -> None:
    program, numbers, own = build_filter(machine, debugging=debugging), NUMBERS[machine], ARCHITECTURES[machine]
    conditional = {"clone", "unshare", "socket"}
    older = {"clone3", "io_uring_setup"}
    debuggers = {"ptrace", "process_vm_readv", "process_vm_writev"}
    for number in range(1000):
        name = next((name for name, each in numbers.items() if each == number), "")
        denied = name and name not in conditional and not (debugging and name in debuggers)
        refusal = ERRNO | (errno.ENOSYS if name in older else errno.EPERM)
        assert decide(program, own, number) == (refusal if denied else ALLOW), name or number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_user_namespaces_are_denied_beside_any_other_flags(machine: str) -> None:
    program, numbers, own = build_filter(machine), NUMBERS[machine], ARCHITECTURES[machine]
    thread, new_user = 0x003D0F00, 0x10000000
    for call in ("clone", "unshare"):
        assert decide(program, own, numbers[call], thread) == ALLOW
        for flags in (new_user, new_user | thread, new_user | 17, new_user | 1 << 40):
            assert decide(program, own, numbers[call], flags) == ERRNO | errno.EPERM
    assert decide(program, own, numbers["socket"], 40) == ERRNO | errno.EPERM
    assert [decide(program, own, numbers["socket"], family) for family in (1, 2, 10, 16)] == [ALLOW] * 4


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    program = build_filter(machine)
    i386, arm = 0x40000003, 0x40000028
    for foreign in (i386, arm, *(each for name, each in ARCHITECTURES.items() if name != machine)):
        assert decide(program, foreign, 1) == KILL
    if machine == "x86_64":
        assert decide(program, ARCHITECTURES[machine], 0x40000000 + 39) == ERRNO | errno.ENOSYS
