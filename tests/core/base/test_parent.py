"""A process that ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = (
    "import sys; from strata.base.parent import end_with_parent; end_with_parent(parent=int(sys.argv[1])); print(1)"
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")


def test_a_process_whose_parent_ended_before_it_could_ask_exits_at_once() -> None:
    # The parent of this process is not that of the one it starts.
    orphan = subprocess.run([sys.executable, "-c", PROGRAM, str(os.getppid())], capture_output=True, check=False)
    assert (orphan.returncode, orphan.stdout) == (128 + signal.SIGTERM, b"")
    child = subprocess.run([sys.executable, "-c", PROGRAM, str(os.getpid())], capture_output=True, check=False)
    assert (child.returncode, child.stdout) == (0, b"1\n")
