"""What is on the disk is whole, private, and read again as it was written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from strata.base.atomic import read_json, write_json
from strata.base.errors import Code, StrataError
from strata.base.file_lock import is_locked, try_lock
from strata.fleet.agent.log_uploader import last_metrics, read_log_tail
from strata.fleet.agent.state import AgentState, AttemptOutcome, AttemptPhase, AttemptRecord, PendingClaim, StopOrder
from strata.fleet.core.job import Cause
from tests.core.fleet_agent.leases import lease

CLAIMING = PendingClaim(claim_id="claim-1", count=1)


def a_record() -> AttemptRecord:
    return AttemptRecord(lease=lease(hyper={"lr": 0.1}), claimed_at_s=1.0)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    state = AgentState(tmp_path / "state")
    record = msgspec.structs.replace(
        a_record(),
        phase=AttemptPhase.ENDED,
        stop=StopOrder(cause=Cause.PREEMPTED, reason="drained"),
        outcome=AttemptOutcome(cause=Cause.OOM, error="no memory", facts={"exit": -9}),
        devices=(1,),
        sent=("step-1",),
    )
    state.save(record)
    assert list(AgentState(tmp_path / "state").records()) == [record]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (state.folder_of(record) / "record.json").stat().st_mode & 0o777 == 0o600


def test_a_lease_that_is_known_is_not_begun_again(tmp_path: Path) -> None:
    state = AgentState(tmp_path)
    assert state.add(a_record())
    assert not state.add(a_record())
    state.remove(a_record())
    assert state.add(a_record())


def test_a_folder_without_its_record_is_rubbish(tmp_path: Path) -> None:
    state = AgentState(tmp_path)
    state.add(a_record())
    (state.folder_of(a_record()) / "record.json").unlink()
    assert list(state.records()) == []
    assert list((tmp_path / "attempts").iterdir()) == []


def test_a_claim_is_remembered_until_it_was_answered(tmp_path: Path) -> None:
    state = AgentState(tmp_path)
    assert state.pending_claim() is None
    state.save_claim(CLAIMING)
    assert AgentState(tmp_path).pending_claim() == CLAIMING
    state.clear_claim()
    state.clear_claim()
    assert state.pending_claim() is None


def test_a_damaged_file_is_said_to_be_one(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", CLAIMING)
    (tmp_path / "x.json").write_bytes((tmp_path / "x.json").read_bytes()[:-3])
    with pytest.raises(StrataError) as refused:
        read_json(tmp_path / "x.json", PendingClaim)
    assert refused.value.code is Code.CORRUPT
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_one_process_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    held = try_lock(path)
    assert held is not None
    assert is_locked(path)
    assert try_lock(path) is None


def test_the_last_figure_of_each_metric_counts_and_other_lines_do_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"type":"metrics","at_s":1,"values":{"loss":1,"acc":0.1}}\n'
        b"not ours\n"
        b'{"type":"progress","at_s":1,"fraction":0.5}\n'
        b'{"type":"metrics","at_s":2,"step":2,"values":{"loss":0.5,"norm":"nan"}}\n'
        b'{"type":"metrics","at_s":2,"va'
    )
    assert last_metrics(path) == {"loss": 0.5, "acc": 0.1}
    assert last_metrics(tmp_path / "nothing") == {}


def test_the_tail_of_a_log_is_text_whatever_was_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"\xff\x00end")
    tail = read_log_tail(path)
    assert tail.endswith("\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}end")
    assert len(tail) <= 65_536
    assert read_log_tail(tmp_path / "nothing") == ""
