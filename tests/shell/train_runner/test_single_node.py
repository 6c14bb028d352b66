"""The process that forks the ranks of one machine: when a group has ended, whether another follows, and with what
status it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from strata.base.errors import StrataError
from strata.train.runner.collectives import join_process_group
from strata.train.runner.settings import RunnerSettings
from strata.train.runner.single_node import GroupEnd, run_group, run_groups

pytestmark = pytest.mark.timeout(60)
FOREVER_S: Final = 300.0
Ready = Callable[[], object]


def test_a_group_whose_ranks_all_end_well_ends_well() -> None:
    def run(rank: int, notify_ready: Ready) -> int:
        if rank == 0:
            notify_ready()
        return 0

    end = run_group(run, 2)
    assert (end.status, end.was_ready) == (0, True)


def test_a_rank_that_is_slow_to_end_after_the_first_ended_well_is_killed_and_the_group_ended_well() -> None:
    def run(rank: int, notify_ready: Ready) -> int:
        if rank == 0:
            notify_ready()
        else:
            time.sleep(FOREVER_S)
        return 0

    assert run_group(run, 2, shutdown_s=0.2) == GroupEnd(0, 0, True)


def test_a_rank_that_fails_while_the_group_shuts_down_is_the_status_of_the_group() -> None:
    def run(rank: int, notify_ready: Ready) -> int:
        if rank == 0:
            notify_ready()
            return 0
        time.sleep(0.3)
        return 3

    assert run_group(run, 2).status == 3


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_rank_that_dies_takes_the_others_with_it(tmp_path: Path, is_ready: bool) -> None:
    def run(rank: int, notify_ready: Ready) -> int:
        if rank == 0:
            (tmp_path / "first").write_text(str(os.getpid()), encoding="ascii")
            if is_ready:
                notify_ready()
            (tmp_path / "go").touch()
            time.sleep(FOREVER_S)
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert run_group(run, 2) == GroupEnd(1, 128 + signal.SIGKILL, is_ready)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "first").read_text(encoding="ascii")), 0)


def test_a_process_that_a_rank_left_behind_does_not_hold_up_the_end_of_the_group(tmp_path: Path) -> None:
    """It has the pipe of the rank open, on which nothing is written any more."""

    def run(rank: int, notify_ready: Ready) -> int:
        del rank, notify_ready
        child = os.fork()
        if child == 0:
            time.sleep(FOREVER_S)
            os._exit(0)
        (tmp_path / "child").write_text(str(child), encoding="ascii")
        return 5

    try:
        assert run_group(run, 1) == GroupEnd(0, 5, False)
    finally:
        os.kill(int((tmp_path / "child").read_text(encoding="ascii")), signal.SIGKILL)


@pytest.mark.parametrize(
    ("ends", "status", "groups"),
    [
        ([GroupEnd(0, 0, True)], 0, 1),
        ([GroupEnd(1, 137, True), GroupEnd(0, 0, True)], 0, 2),
        ([GroupEnd(1, 137, True), GroupEnd(0, 1, False)], 1, 2),
        ([GroupEnd(0, 1, False)], 1, 1),
    ],
    ids=["ended well", "died and ended well", "died and did not start", "did not start"],
)
def test_a_group_follows_one_that_died_after_it_was_ready(ends: list[GroupEnd], status: int, groups: int) -> None:
    coming = iter(ends)
    assert run_groups(lambda: next(coming)) == status
    assert len(ends) - len(list(coming)) == groups


def test_a_rank_without_a_cuda_device_says_so_before_it_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "65", "LOCAL_RANK": "65", "WORLD_SIZE": "66"}.items():
        monkeypatch.setenv(name, value)
    settings = RunnerSettings(model="m", backend="nccl", sleep_folder=tmp_path)
    with pytest.raises(StrataError, match=r"rank 65 of this machine has no CUDA device: there are \d"):
        join_process_group(settings, tmp_path / "rendezvous")
