"""A module of the tests on real ranks, as torchrun starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from strata.base.settings import process_environment

ROOT: Final = Path(__file__).parents[2]


def run_on_ranks(module: str, ranks: int, *arguments: str, within_s: float) -> str:
    """What it printed; it must end well."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {
        **process_environment(),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [*launcher, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
