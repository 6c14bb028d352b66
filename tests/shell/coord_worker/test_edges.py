"""Files, settings, statuses and pauses of a worker."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

import strata.coord.worker as strata
from strata.base.digest import file_digest
from strata.base.settings import load
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.link import BACKOFF, CODE_OF, backoff_s
from strata.coord.worker.readers import Readers
from strata.coord.worker.settings import SECTION, WorkerSettings


def test_lines_are_counted_and_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\ntwo\u2028half\n\nlast".encode())
    assert strata.count_samples(path) == 4
    whole = [pb.FileSlice(path=str(path), start_index=0, end_index=4)]
    assert list(Readers().read(whole)) == ["one\r", "two\u2028half", "", "last"]
    assert list(Readers().read([pb.FileSlice(path=str(path), start_index=1, end_index=2)])) == ["two\u2028half"]


def test_jsonl_gives_values_and_names_the_line_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x"}) + "\nnot json\n", encoding="utf-8")
    assert list(Readers().read([pb.FileSlice(path=str(path), start_index=0, end_index=1)])) == [{"text": "x"}]
    with pytest.raises(strata.StrataError, match="line 2 of") as caught:
        list(Readers().read([pb.FileSlice(path=str(path), start_index=1, end_index=2)]))
    assert caught.value.code is strata.Code.CORRUPT


def test_a_file_that_lost_lines_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n", encoding="utf-8")
    with pytest.raises(strata.StrataError, match="fewer samples"):
        list(Readers().read([pb.FileSlice(path=str(path), start_index=0, end_index=2)]))


def test_a_part_is_verified_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"state")
    strata.verify_part(path, file_digest(path))
    for damage in (b"other", None):
        digest = file_digest(path)
        path.write_bytes(damage) if damage else path.unlink()
        with pytest.raises(strata.StrataError) as caught:
            strata.verify_part(path, digest)
        assert caught.value.code is strata.Code.CORRUPT


def test_every_status_has_a_code() -> None:
    assert CODE_OF.keys() == set(grpc.StatusCode) - {grpc.StatusCode.OK}


def test_pauses_grow_up_to_a_limit_and_do_as_they_are_told() -> None:
    assert [backoff_s(attempt, None, 1.0) for attempt in range(3)] == [0.05, 0.1, 0.2]
    assert backoff_s(1_000, None, 1.0) == BACKOFF.most_s
    assert backoff_s(5, None, 0.0) == backoff_s(5, None, 1.0) / 2
    assert backoff_s(0, 0.4, 0.0) == 0.4
    assert backoff_s(9, 0.4, 1.0) == pytest.approx(0.6)


def test_settings_come_from_the_environment_and_a_token_stays_secret(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hidden\n", encoding="utf-8")
    token.chmod(0o600)
    environ = {
        "STRATA_WORKER_ADDRESS": "127.0.0.1:1, 127.0.0.1:2",
        "STRATA_WORKER_ID": "w7",
        "STRATA_WORKER_JOB": "llama",
        "STRATA_WORKER_TOKEN_FILE": str(token),
    }
    found = load(WorkerSettings, section=SECTION, file=None, environ=environ, flags={"elastic": True})
    assert found.addresses == ("127.0.0.1:1", "127.0.0.1:2")
    assert (found.worker_id, found.job, found.elastic) == ("w7", "llama", True)
    assert found.token is not None
    assert found.token.reveal() == "hidden"
    assert "hidden" not in repr(found)


def test_a_token_is_not_sent_to_another_machine_in_the_clear() -> None:
    with pytest.raises(strata.StrataError, match="in the clear"):
        strata.join(address="10.0.0.1:7070", token="secret")


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(strata.StrataError, match="adress"):
        strata.join(adress="127.0.0.1:7070")


def test_reasons_are_read_from_stale_errors_only() -> None:
    error = strata.StrataError(strata.Code.STALE, "x", reason="lease-lost")
    assert strata.reason_of(error) is strata.Reason.LEASE_LOST
    assert strata.reason_of(strata.StrataError(strata.Code.NOT_FOUND, "x", reason="lease-lost")) is None
    assert strata.reason_of(ValueError()) is None
