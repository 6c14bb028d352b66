"""A rank that has no memory for its row says so before the ranks communicate, and all of them go on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch

from strata.train.core import commands, model_options, ops
from strata.train.runner.lora.adapter import is_finite
from strata.train.runner.model.process_memory import (
    KernelKills,
    _cached_bytes,
    is_out_of_memory,
    kernel_kills,
)
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_runner.driver import datum
from tests.shell.train_runner.low_memory import LONG, Outcome
from tests.shell.train_runner.single_rank import driver_of, one_rank
from tests.support.torchrun import run_on_ranks

LONGEST_S: Final = 200
pytestmark = pytest.mark.timeout(LONGEST_S + 20)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    out = tmp_path_factory.mktemp("exhausted") / "out"
    run_on_ranks("tests.shell.train_runner.low_memory", 2, str(out), within_s=LONGEST_S)
    return msgspec.msgpack.decode(out.read_bytes(), type=Outcome)


@pytest.mark.gpu
def test_the_operation_whose_row_does_not_fit_fails_on_all_ranks_with_tokens_and_limit(outcome: Outcome) -> None:
    rejected, _ = outcome.together
    assert isinstance(rejected, ops.Failed)
    assert (rejected.category, rejected.memory) == ("user", True)
    assert f"{LONG + 20:,} tokens" in rejected.message
    assert "holds about" in rejected.message


@pytest.mark.gpu
def test_another_model_in_the_same_row_is_computed(outcome: Outcome) -> None:
    assert isinstance(outcome.together[1], ops.PassDone)


@pytest.mark.gpu
def test_the_ranks_go_on_and_nothing_of_the_failed_pass_is_in_the_gradients(outcome: Outcome) -> None:
    assert [type(each) for each in outcome.after] == [ops.PassDone, ops.PassDone]
    greedy, modest = outcome.gradients
    # One pass of twenty tokens against two: twelve thousand tokens would be far above both.
    assert 0 < greedy < modest


@pytest.mark.gpu
def test_the_limit_was_measured(outcome: Outcome) -> None:
    assert outcome.row_tokens > LONG


def test_a_pass_that_is_replayed_is_not_rejected_for_the_memory_that_is_free_now(tmp_path: Path) -> None:
    make(tmp_path / "llama", TinyModel())
    with one_rank(tmp_path) as ranks:
        driver = driver_of(ranks, tmp_path / "llama", tmp_path)
        driver.dispatcher._runner.memory._per_token = 1 << 50
        driver.create("m", model_options.LoraConfig(rank=4, seed=1))
        data = ops.encode_pass_data(ops.PassData([datum(1, 20)]))
        item = commands.PassItem("r", "m", model_options.LossName.CROSS_ENTROPY, {}, data)
        live = commands.PassCommand(False, [item], [[[commands.Segment(0, 0)]]])
        (rejected,) = driver.do(live)
        (done,) = driver.do(msgspec.structs.replace(live, replayed=True))
    assert isinstance(rejected, ops.Failed)
    assert rejected.memory
    assert isinstance(done, ops.PassDone)


def test_every_form_of_running_out_of_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))


def test_one_number_that_is_not_finite_is_found_anywhere_by_its_bounds() -> None:
    """And in no number at all there is none: a shard of a small weight may be empty."""
    assert is_finite(torch.empty(0, 4))
    for dtype in (torch.float32, torch.bfloat16):
        for length in (1, 9, 1000):
            values = torch.linspace(-1e38, 1e38, length).to(dtype)
            assert is_finite(values)
            for index in {0, length // 2, length - 1}:
                for bad in (float("nan"), float("inf"), float("-inf")):
                    changed = values.clone()
                    changed[index] = bad
                    assert not is_finite(changed), (dtype, length, index, bad)


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_files_that_the_kernel_keeps_in_memory_count_as_free(tmp_path: Path, prefix: str) -> None:
    lines = {"active_file": 5, "inactive_file": 7} | {f"{prefix}active_file": 50, f"{prefix}inactive_file": 70}
    (tmp_path / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in lines.items()), encoding="ascii")
    assert _cached_bytes(tmp_path) == 120


@pytest.mark.parametrize(
    ("before", "now", "may_be"),
    [
        (KernelKills("/job", 0, 5), KernelKills("/job", 1, 6), True),
        (KernelKills("/job", 0, 5), KernelKills("/job", 0, 6), False),
        (KernelKills("/job", 3, 5), KernelKills("/next", 0, 6), True),
        (KernelKills("/job", 3, 5), KernelKills("/next", 0, 5), False),
        (KernelKills("", None, 5), KernelKills("", None, 6), True),
    ],
)
def test_a_job_beside_the_server_that_runs_out_of_memory_is_not_taken_for_a_rank(
    before: KernelKills, now: KernelKills, may_be: bool
) -> None:
    assert now.may_be_since(before) is may_be
    assert not kernel_kills().may_be_since(kernel_kills())
