"""The ranks of a test program under torchrun: on CPUs, or on CUDA devices where `make gpu` says so."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from strata.base.settings import process_environment
from strata.train.runner.collectives import RankGroup, join_process_group
from strata.train.runner.settings import RunnerSettings

DEVICE: Final = "STRATA_TEST_DEVICE"
"""`cpu`, unless set, or `cuda`."""
SIZE: Final = "STRATA_TEST_RANKS"
"""Ranks of the larger group of the numerical kit: 2, unless set."""


def on_cuda() -> bool:
    device = process_environment().get(DEVICE, "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"{DEVICE} is {device!r}: neither cpu nor cuda")
    return device == "cuda"


def group_size() -> int:
    return int(process_environment().get(SIZE, "2"))


def join_ranks(timeout_s: float) -> RankGroup:
    """Join as a rank of a server does, with one thread for each."""
    torch.set_num_threads(1)
    settings = RunnerSettings(
        model="",
        backend="nccl" if on_cuda() else "gloo",
        first_pass_timeout_s=timeout_s,
        # Kernels that add in any order would make two runs differ.
        deterministic=on_cuda(),
        sleep_folder=Path(),
    )
    return RankGroup(join_process_group(settings, Path()))
