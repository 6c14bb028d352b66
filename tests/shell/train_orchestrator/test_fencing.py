"""Whoever was paused and leads no more removes nothing: the files may be those of whoever leads now."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.train.orchestrator.maintenance.checkpoint_gc import CheckpointGc
from strata.train.orchestrator.maintenance.compaction import Compaction
from tests.shell.train_orchestrator.leaders import RUN, leading, settings_in, with_a_model
from tests.support.memory_journal import MemoryJournal


async def test_a_sweep_of_whoever_leads_no_more_takes_no_checkpoint(tmp_path: Path) -> None:
    journal, settings = MemoryJournal(SystemClock()), settings_in(tmp_path)
    paused = await with_a_model(journal)
    saved = settings.checkpoint_folder / RUN / "weights" / "x@12"
    saved.mkdir(parents=True)
    leader = await leading(journal)
    with pytest.raises(StrataError) as refused:
        await CheckpointGc(paused, settings).sweep()
    assert refused.value.code is Code.STALE
    assert saved.exists()
    await CheckpointGc(leader, settings).sweep()
    assert not any(saved.parent.iterdir())


async def test_whoever_leads_no_more_takes_no_snapshot(tmp_path: Path) -> None:
    journal, settings = MemoryJournal(SystemClock()), settings_in(tmp_path)
    paused = await with_a_model(journal)
    written = settings.snapshot_folder / "0-one"
    written.mkdir(parents=True)
    leader = await leading(journal)
    with pytest.raises(StrataError) as refused:
        await Compaction(settings, journal, paused).run_once()
    assert refused.value.code is Code.STALE
    assert written.exists()
    await Compaction(settings, journal, leader).run_once()
    assert not written.exists()
