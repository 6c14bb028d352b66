"""The orchestrator dies at each place where something has just become true, and the next one goes on from there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from strata.train.core import ops
from tests.shell.train_orchestrator.stacks import Stack, running

pytestmark = pytest.mark.proves(
    "An orchestrator that dies at any failpoint is followed by one that loses nothing and repeats nothing"
)

SOURCE: Final = Path(__file__).parents[3] / "src" / "strata"
FILES: Final = [*(SOURCE / "train" / "orchestrator").glob("*.py"), SOURCE / "journal" / "replica.py"]
UNREACHED: Final = {"journal.replica.between_snapshot_and_truncate", "journal.replica.after_commit"}
"""That comes with snapshots of the models, and what is committed here is put and not submitted."""
ONCE: Final = {"journal.replica.after_lead"}
STEPS: Final = 3


OF_CHECKPOINTS: Final = {
    "train.orchestrator.checkpoint_let_go",
    "train.orchestrator.checkpoint_out_of_place",
    "train.orchestrator.import_checked",
    "train.orchestrator.import_in_place",
}
"""Reached when checkpoints end or come from elsewhere: test_checkpoint_gc has those."""
OF_SNAPSHOTS: Final = {
    "train.orchestrator.snapshot_heard",
    "train.orchestrator.before_cut",
    "train.orchestrator.before_payloads_go",
    "train.orchestrator.before_snapshot_goes",
}
"""Reached when snapshots of the models come and go: test_snapshots has those."""


def failpoints() -> list[str]:
    named = {name for path in FILES for name in re.findall(r'failpoint\("([^"]+)"\)', path.read_text(encoding="utf-8"))}
    return sorted(named - UNREACHED - OF_CHECKPOINTS - OF_SNAPSHOTS)


async def operate(stack: Stack) -> list[ops.Result]:
    """Also what was sent before is sent again, as a client does that has no answer."""
    model = await stack.model()
    ids = []
    for step in range(STEPS):
        seq = 2 * step + 1
        ids.append(await stack.submit(stack.batch(model, seq, [[seq, 2, 3], [4, 5]])))
        ids.append(await stack.submit(stack.step(model, seq + 1)))
    return [await stack.result(each) for each in ids]


UNDISTURBED: Final[list[list[ops.Result]]] = []


async def undisturbed(folder: Path) -> list[ops.Result]:
    """What comes of it if nothing dies, computed once."""
    if not UNDISTURBED:
        folder.mkdir()
        async with running(folder, snapshots="every_dispatches = 2") as stack:
            UNDISTURBED.append(await operate(stack))
    return UNDISTURBED[0]


@pytest.mark.parametrize(
    ("name", "skip"), [(name, skip) for name in failpoints() for skip in (0, 3) if name not in ONCE or not skip]
)
async def test_a_death_at_any_failpoint_loses_nothing_and_repeats_nothing(name: str, skip: int, tmp_path: Path) -> None:
    async with running(tmp_path, armed=(name, skip), snapshots="every_dispatches = 2") as stack:
        found = await operate(stack)
        assert stack.deaths == 1, "the failpoint was not reached"
        done = [each for _, each in stack.applied()]
        assert len(done) == len(set(done)) == 1 + 2 * STEPS
    assert found == await undisturbed(tmp_path / "u")
