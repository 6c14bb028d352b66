"""A process that ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from strata.base.parent import TIED_COMMAND
from tests.shell.fleet_agent.waiting import eventually, is_alive

PROGRAM = (
    "import sys; from strata.base.parent import end_with_parent; end_with_parent(parent=int(sys.argv[1])); print(1)"
)

LAUNCHER = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
DEAF = """
import signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")


def test_a_process_whose_parent_ended_before_it_could_ask_exits_at_once() -> None:
    # The parent of this process is not that of the one it starts.
    orphan = subprocess.run([sys.executable, "-c", PROGRAM, str(os.getppid())], capture_output=True, check=False)
    assert (orphan.returncode, orphan.stdout) == (128 + signal.SIGTERM, b"")
    child = subprocess.run([sys.executable, "-c", PROGRAM, str(os.getpid())], capture_output=True, check=False)
    assert (child.returncode, child.stdout) == (0, b"1\n")


def test_a_command_that_is_tied_is_killed_with_the_program_that_started_it() -> None:
    command = [sys.executable, "-c", LAUNCHER, *TIED_COMMAND, sys.executable, "-c", DEAF]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        assert is_alive(child)
        launcher.kill()
    eventually(lambda: not is_alive(child), 30)
