"""A module of the tests on real ranks, as torchrun starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

from strata.base.settings import process_environment
from tests.support.ranks import on_cuda

ROOT: Final = Path(__file__).parents[2]


def launcher(ranks: int) -> list[str]:
    """torchrun with so many ranks on this machine. Skips the test if each is to have a CUDA device and there are too
    few."""
    if on_cuda() and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def run_on_ranks(module: str, ranks: int, *arguments: str, within_s: float) -> str:
    """What it printed; it must end well."""
    environment = {
        **process_environment(),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [*launcher(ranks), "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
