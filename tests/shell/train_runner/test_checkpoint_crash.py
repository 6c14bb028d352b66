"""Kill the writer of a checkpoint at every failpoint: a reader finds the old or the new one, whole, at every moment."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from strata.base.settings import process_environment
from tests.shell.train_runner.numbered_checkpoints import found, left_over

pytestmark = pytest.mark.proves(
    "A checkpoint that was said to be saved is there whole after a kill or a power cut, and one that was "
    "changed is refused"
)

ROOT: Final = Path(__file__).parents[3]
CHECKPOINT: Final = ROOT / "src/strata/train/checkpoints/checkpoint.py"


def failpoints() -> list[str]:
    source = CHECKPOINT.read_text(encoding="utf-8")
    return sorted(set(re.findall(r'failpoint\("([^"]+)"\)', source)))


def save(folder: Path, first: int, last: int, *failpoint: str) -> tuple[int, int]:
    """The status of a process that saves, and the last number it said was saved."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.shell.train_runner.save_process", str(folder), str(first), str(last), *failpoint],
        cwd=ROOT,
        env=process_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, max(map(int, done.stdout.split()), default=0)


@pytest.mark.parametrize("failpoint", failpoints())
def test_a_writer_killed_anywhere_leaves_a_whole_checkpoint_and_the_next_one_goes_on(
    failpoint: str, tmp_path: Path
) -> None:
    """Each life finds what the one before left, and dies in a new checkpoint or in overwriting one."""
    folder = tmp_path / "data" / "checkpoints" / "run" / "weights" / "mine"
    assert save(folder, 1, 1, "train.checkpoint.before_rename", "0")[0] == -signal.SIGKILL
    there = 0
    for skip in (0, 1):
        status, said = save(folder, there + 1, there + 3, failpoint, str(skip))
        # Some are only met by whoever writes the first, or sweeps.
        assert status == -signal.SIGKILL or (skip and said == there + 3), f"{failpoint} was not reached"
        told = max(there, said)
        assert (found(folder) or 0) in (told, told + 1)
        assert len(left_over(folder)) <= 1
        there = found(folder) or 0
    assert save(folder, there + 1, there + 1) == (0, there + 1)
    assert (found(folder), left_over(folder)) == (there + 1, [])


def test_the_same_operation_told_again_after_each_kill_is_saved_once(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "checkpoints" / "run" / "weights" / "mine"
    for failpoint in ("train.checkpoint.before_rename", "train.checkpoint.after_rename"):
        status, _ = save(folder, 7, 7, failpoint, "0")
        assert status == -signal.SIGKILL
    assert save(folder, 7, 7) == (0, 7)
    assert (found(folder), left_over(folder)) == (7, [])
