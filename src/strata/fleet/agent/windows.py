"""What Windows does differently: a Job Object instead of a process group, a Scheduled Task instead of a unit.

Standard library only, because the supervisor loads this file by its path. Written from the documentation of the system
calls and never run on Windows by our tests, which check what can be checked elsewhere: the layout of the structures and
the text of the task.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final
from xml.sax.saxutils import escape

KILL_ON_CLOSE: Final = 0x2000
EXTENDED_LIMITS: Final = 9
PROCESS_SET_QUOTA: Final = 0x0100
PROCESS_TERMINATE: Final = 0x0001


class BasicLimits(ctypes.Structure):
    _fields_ = (
        ("PerProcessUserTimeLimit", ctypes.c_int64),
        ("PerJobUserTimeLimit", ctypes.c_int64),
        ("LimitFlags", ctypes.c_uint32),
        ("MinimumWorkingSetSize", ctypes.c_size_t),
        ("MaximumWorkingSetSize", ctypes.c_size_t),
        ("ActiveProcessLimit", ctypes.c_uint32),
        ("Affinity", ctypes.c_size_t),
        ("PriorityClass", ctypes.c_uint32),
        ("SchedulingClass", ctypes.c_uint32),
    )


class IoCounters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("rd", "wr", "other", "rd_bytes", "wr_bytes", "other_bytes"))


class ExtendedLimits(ctypes.Structure):
    _fields_ = (
        ("BasicLimitInformation", BasicLimits),
        ("IoInfo", IoCounters),
        ("ProcessMemoryLimit", ctypes.c_size_t),
        ("JobMemoryLimit", ctypes.c_size_t),
        ("PeakProcessMemoryUsed", ctypes.c_size_t),
        ("PeakJobMemoryUsed", ctypes.c_size_t),
    )


class MemoryStatus(ctypes.Structure):
    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "page", "free_page", "virtual", "free_virtual", "ext")),
    )


def kill_on_close() -> ExtendedLimits:
    """The processes of the job end with the last handle to it, which the supervisor holds."""
    limits = ExtendedLimits()
    limits.BasicLimitInformation.LimitFlags = KILL_ON_CLOSE
    return limits


class JobObject:
    """All processes a child starts belong to it and cannot leave."""

    def __init__(self, kernel: Any, handle: int) -> None:
        self._kernel = kernel
        self._handle = handle

    def terminate(self) -> None:
        self._kernel.TerminateJobObject(self._handle, 1)


def job_object_of(pid: int) -> JobObject:
    """A child that starts others before this returns keeps those outside; a trainer has not come so far by then."""
    kernel = _kernel()
    kernel.CreateJobObjectW.restype = ctypes.c_void_p
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = kernel.CreateJobObjectW(None, None)
    limits = kill_on_close()
    process = kernel.OpenProcess(PROCESS_SET_QUOTA | PROCESS_TERMINATE, 0, pid)
    if not (
        handle
        and process
        and kernel.SetInformationJobObject(
            ctypes.c_void_p(handle), EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits)
        )
        and kernel.AssignProcessToJobObject(ctypes.c_void_p(handle), ctypes.c_void_p(process))
    ):
        raise OSError("this process cannot be put into a Job Object")
    kernel.CloseHandle(ctypes.c_void_p(process))
    return JobObject(kernel, handle)


def physical_bytes() -> int:
    status = MemoryStatus(dwLength=ctypes.sizeof(MemoryStatus))
    _kernel().GlobalMemoryStatusEx(ctypes.byref(status))
    return int(status.total)


def _kernel() -> Any:
    dll = getattr(ctypes, "WinDLL", None)
    if dll is None:
        raise OSError("this is not Windows")
    return dll("kernel32", use_last_error=True)


def task_xml(*, command: str, arguments: str, user: str, folder: str) -> str:
    """Writes a task for `schtasks /Create /XML`: it starts with the machine, starts again when it ended, runs on
    battery, never twice.

    The agent ends by itself when asked; the task is not to be ended after some hours, as tasks are by default.
    """
    return f"""<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo><Description>Strata training agent</Description></RegistrationInfo>
  <Triggers><BootTrigger><Enabled>true</Enabled></BootTrigger></Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{escape(user)}</UserId><LogonType>S4U</LogonType><RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>999</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{escape(command)}</Command>
      <Arguments>{escape(arguments)}</Arguments>
      <WorkingDirectory>{escape(folder)}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""


def agent_task(program: str, state: str, work: str, user: str, folder: str) -> str:
    """The task that runs the agent, with its two folders."""
    arguments = f'agent --state "{state}" --work "{work}" --log-format json'
    return task_xml(command=program, arguments=arguments, user=user, folder=folder)
