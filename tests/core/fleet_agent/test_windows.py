"""What of the Windows paths can be checked without Windows: sizes of structures, and the text of the task."""

from __future__ import annotations

import ctypes
from xml.etree import ElementTree

import pytest

from strata.fleet.agent import windows

NAMESPACE = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


def test_the_structures_have_the_size_that_64_bit_windows_expects() -> None:
    # JOBOBJECT_BASIC_LIMIT_INFORMATION, JOBOBJECT_EXTENDED_LIMIT_INFORMATION, MEMORYSTATUSEX.
    sizes = [ctypes.sizeof(each) for each in (windows.BasicLimits, windows.ExtendedLimits, windows.MemoryStatus)]
    assert sizes == [64, 144, 64]
    assert windows.kill_on_close().BasicLimitInformation.LimitFlags == windows.KILL_ON_CLOSE


def test_the_task_is_xml_whatever_the_paths_are() -> None:
    text = windows.task_xml(
        command=r"C:\Users\A & B\strata.exe", arguments='agent --state "C:\\<s>"', user="PC\\anna", folder="C:\\"
    )
    task = ElementTree.fromstring(text.partition("\n")[2])
    assert task.findtext(f".//{NAMESPACE}Command") == r"C:\Users\A & B\strata.exe"
    assert task.findtext(f".//{NAMESPACE}Arguments") == 'agent --state "C:\\<s>"'
    assert task.findtext(f".//{NAMESPACE}ExecutionTimeLimit") == "PT0S"
    assert task.findtext(f".//{NAMESPACE}RunLevel") == "LeastPrivilege"


def test_elsewhere_a_job_object_is_refused() -> None:
    with pytest.raises(OSError, match="not Windows"):
        windows.job_object_of(1)
