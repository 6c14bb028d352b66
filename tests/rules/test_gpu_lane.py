"""`make gpu` can begin on a machine with CUDA devices, and says so on one without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.__main__ import BENCHES
from strata.base.settings import process_environment

ROOT: Final = Path(__file__).parents[2]
NO_DEVICE: Final = 77


def run_lane(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/gpu.py", *arguments],
        cwd=ROOT,
        env={**process_environment(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_lane_collects_its_tests_and_its_benches_and_campaigns_exist() -> None:
    done = run_lane("--collect")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests" / "shell").rglob("test_*.py")
        if "pytest.mark.gpu" in file.read_text(encoding="utf-8")
    }
    assert {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line} == marked
    for command in ("soak train-kill --kills 20 on 2", "bench train on 8", "bench recovery on 1"):
        assert command in done.stdout
    assert {"train", "recovery"} <= BENCHES.keys()
    assert '"train-kill": Real(' in (ROOT / "soak" / "campaigns.py").read_text(encoding="utf-8")


def test_without_a_cuda_device_nothing_runs_and_the_status_says_so() -> None:
    done = run_lane()
    assert done.returncode == NO_DEVICE, done.stdout[-2000:] + done.stderr[-2000:]
    assert "There is no CUDA device on this machine: nothing ran." in done.stdout
