"""What `strata up` tells the owner of the machine about its agent."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.shell.fleet_agent.running import STRATA
from tests.shell.fleet_agent.waiting import eventually


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root has no jobs that run as root")
def test_up_logs_what_an_agent_of_its_own_would_log(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "STRATA_CLIENT_CONFIG_HOME": str(tmp_path / "config"),
        "STRATA_HUB_KEEP_FREE_BYTES": "0",
        "STRATA_AGENT_MIN_FREE_GIB": "0",
        "STRATA_AGENT_SANDBOX_MODE": "off",
    }
    data = tmp_path / "data"
    up = [STRATA, "up", "-v", "--data", str(data), "--listen", "127.0.0.1:0"]
    # The hub has ended with `up`; an agent starts without it.
    alone = [STRATA, "agent", "--state", str(data / "agent"), "--work", str(data / "work"), "--log-format", "json"]
    for words, ready in ((up, "ready"), (alone, "works for")):
        said = log_until(words, ready, tmp_path, environ)
        for event in ("host_probe_incomplete", "jobs_run_as_root", "sandbox_detected"):
            assert f'"{event}"' in said


def log_until(words: list[str], ready: str, folder: Path, environ: dict[str, str]) -> str:
    """What a command has logged until it is ready; then it is stopped."""
    path = folder / f"{words[1]}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(words, env=environ, stderr=log, cwd=folder)
    try:
        return eventually(lambda: text if ready in (text := path.read_text()) else None, 120.0)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
