"""Cut the power anywhere in a save: a reader gets what was said to be saved, or what came after it, whole; or nothing
if nothing was ever said to be saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from strata.base import failpoint
from strata.base.errors import StrataError
from tests.shell.train_runner.numbered_checkpoints import found, left_over
from tests.shell.train_runner.power import Event, Recorder, build, cuts
from tests.shell.train_runner.save_process import save

pytestmark = pytest.mark.proves(
    "A checkpoint that was said to be saved is there whole after a kill or a power cut, and one that was "
    "changed is refused"
)

NAME: Final = Path("checkpoints") / "run" / "weights" / "mine"
"""Below the folder of the server, which was there before it."""


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    (tmp_path / "live").mkdir()
    return Recorder(tmp_path / "live", monkeypatch)


def outcomes(tape: list[Event], folder: Path) -> Iterator[tuple[int, int | str | None, Path]]:
    """What was acked, and what a reader gets, for every state the disk may be left in."""
    for number, (acked, state) in enumerate(cuts(tape)):
        root = folder / str(number)
        root.mkdir(parents=True)
        build(state, root)
        try:
            got: int | str | None = found(root / NAME)
        except (StrataError, AssertionError) as error:
            got = str(error)
        yield acked, got, root


def record(recorder: Recorder) -> None:
    """A new one, one over it, one over it whose writer is stopped with the old one not removed, and the next."""
    folder = recorder.root / NAME
    save(folder, 1)
    recorder.acked(1)
    save(folder, 2)
    recorder.acked(2)
    failpoint.arm("train.checkpoint.after_exchange", failpoint.fail)
    with pytest.raises(StrataError):
        save(folder, 3)
    recorder.look()
    save(folder, 4)
    recorder.acked(4)


def test_after_a_power_cut_a_reader_gets_a_whole_checkpoint_and_never_an_older_one(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(recorder)
    monkeypatch.undo()
    seen = list(outcomes(recorder.tape, tmp_path / "cuts"))
    may_be: dict[int, set[int | str | None]] = {0: {None, 1}, 1: {1, 2}, 2: {2, 3, 4}, 4: {4}}
    for acked, got, root in seen:
        assert got in may_be[acked], root
    assert {got for _, got, _ in seen} == {None, 1, 2, 3, 4}
    assert len(seen) > 100


def test_whoever_saves_after_a_power_cut_sweeps_what_it_left(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(recorder.root / NAME, 1)
    recorder.acked(1)
    save(recorder.root / NAME, 2)
    recorder.look()
    monkeypatch.undo()
    seen = list(outcomes(recorder.tape, tmp_path / "cuts"))
    swept = [root for _, _, root in seen if (root / NAME).parent.is_dir() and left_over(root / NAME)]
    assert swept
    for root in swept[::5]:
        save(root / NAME, 9)
        assert (found(root / NAME), left_over(root / NAME)) == (9, [])


@pytest.mark.parametrize("left_out", ["files", "folders"])
def test_without_either_sync_the_same_check_finds_a_loss(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    save(recorder.root / NAME, 1)
    recorder.acked(1)
    monkeypatch.undo()
    files = {event.number for event in recorder.tape if event.kind == "content"}
    tape = [
        event for event in recorder.tape if event.kind != "sync" or (event.number in files) != (left_out == "files")
    ]
    assert any(acked and got != 1 for acked, got, _ in outcomes(tape, tmp_path / "cuts"))


def test_removing_the_old_one_before_the_exchange_is_on_the_disk_would_lose_both(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync between them is what the check is for: without it the check fails."""
    save(recorder.root / NAME, 1)
    recorder.acked(1)
    before = len(recorder.tape)
    save(recorder.root / NAME, 2)
    recorder.look()
    monkeypatch.undo()
    exchanged = next(
        at for at, event in enumerate(recorder.tape) if at > before and event.kind == "names" and len(event.change) == 2
    )
    tape = [event for at, event in enumerate(recorder.tape) if at < exchanged or event.kind != "sync"]
    assert any(acked == 1 and got not in (1, 2) for acked, got, _ in outcomes(tape, tmp_path / "cuts"))
