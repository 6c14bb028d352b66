"""What a worker reports when the coordinator asks why no worker makes a step."""

from __future__ import annotations

import threading

from strata.coord.worker.hang_report import HangReporter


async def test_a_probe_is_reported_to_once_and_sent_until_it_was_received() -> None:
    beats: list[int] = []
    hangs = HangReporter(lambda: 7, lambda: beats.append(1))
    hangs.training_thread = threading.get_ident()
    assert [hangs.is_new(probe) for probe in (0, 3, 3)] == [False, True, False]
    await hangs.report(3)
    pending = hangs.pending
    assert pending is not None
    assert (pending.probe, len(beats)) == (3, 1)
    assert hangs.is_new(4)
    await hangs.report(4)
    hangs.on_received(pending)
    assert hangs.pending is not None, "the report to a later probe is not received yet"
    hangs.on_received(hangs.pending)
    assert hangs.pending is None


async def test_a_process_without_a_probe_is_not_ended() -> None:
    await HangReporter(lambda: 7, lambda: None).end_if_hung("stopped")
