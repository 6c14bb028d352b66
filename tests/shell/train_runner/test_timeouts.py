"""How long ranks wait for each other, until the first pass and after it, and what torch reads to record it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
import torch.distributed as dist

from strata.train.core import model_options
from strata.train.launch.launcher import ALLOCATOR, OLD_ALLOCATOR, rank_command
from strata.train.runner.model.tiny import TinyModel, make
from tests.core.train.machines import machine, resolve
from tests.shell.train_runner.driver import batch
from tests.shell.train_runner.hanging import LIMIT_S
from tests.shell.train_runner.single_rank import driver_of, one_rank
from tests.support.torchrun import run_on_ranks

LONGEST_S: Final = 120
TORCH: Final = Path(torch.__file__).parent


@pytest.mark.timeout(LONGEST_S + 20)
def test_a_rank_that_is_left_alone_in_a_collective_of_any_group_waits_as_long_as_it_may(tmp_path: Path) -> None:
    run_on_ranks("tests.shell.train_runner.hanging", 2, str(tmp_path), within_s=LONGEST_S)
    waited_s = msgspec.json.decode((tmp_path / "waited").read_bytes(), type=list[float])
    assert len(waited_s) == 2
    assert all(LIMIT_S * 0.5 <= each < LIMIT_S * 10 for each in waited_s), waited_s


def test_the_first_pass_has_more_time_than_those_after_it(tmp_path: Path) -> None:
    def limit_s() -> float:
        group = dist.distributed_c10d._get_default_group()
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    make(tmp_path / "llama", TinyModel())
    with one_rank(tmp_path) as ranks:
        driver = driver_of(ranks, tmp_path / "llama", tmp_path, first_pass_timeout_s=301.0, collective_timeout_s=121.0)
        driver.create("m", model_options.LoraConfig(rank=1, alpha=1.0))
        assert limit_s() == 301.0
        driver.train("m", batch())
        assert limit_s() == 121.0
        ranks.limit_collectives(1800.0)


def test_torch_reads_the_variables_that_ranks_on_devices_are_started_with() -> None:
    """By the names in its libraries and headers: those of other versions were others."""
    environment = rank_command(resolve(machine(1, 24)), Path("server.toml"), {}).environment
    known = (TORCH / "lib" / "libtorch_cpu.so").read_bytes() + (TORCH / "lib" / "libc10.so").read_bytes()
    headers = b"".join(
        (TORCH / "include" / name).read_bytes()
        for name in ("torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp", "c10/cuda/CUDAAllocatorConfig.h")
    )
    names = [name for name in environment if name.startswith(("TORCH_", "PYTORCH_ALLOC"))]
    assert len(names) == 4
    for name in (*names, ALLOCATOR, OLD_ALLOCATOR):
        assert f'"{name}"'.encode() in headers or f"{name}\0".encode() in known, name
