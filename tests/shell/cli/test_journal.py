"""`strata journal` over a real SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from strata.cli.exit_codes import ExitCode
from strata.cli.journal import journal
from strata.cli.main import run

MakeJournal = Callable[[int], Path]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(journal, args, catch_exceptions=False)


def rows(*args: str) -> list[dict[str, Any]]:
    result = invoke(*args, "-o", "jsonl")
    return [json.loads(line) for line in result.stdout.splitlines()]


def damage(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(statement).rowcount == 1


def test_list_shows_each_stream(journal_file: MakeJournal) -> None:
    path = journal_file(6)
    assert rows("list", str(path)) == [
        {"stream": s, "epoch": 1, "holder": "writer-1", "led": False, "head": 6, "floor": 0, "snapshot": 2}
        for s in ("a", "b")
    ]
    header, first, _ = invoke("list", f"sqlite:{path}").stdout.splitlines()
    assert header.split() == ["STREAM", "HEAD", "FLOOR", "SNAPSHOT", "EPOCH", "LED"]
    assert first.split() == ["a", "6", "0", "2", "1", "false"]
    assert "HOLDER" in invoke("list", str(path), "-o", "wide").stdout


def test_verify_says_ok_for_a_whole_journal(journal_file: MakeJournal) -> None:
    path = journal_file(6)
    result = invoke("verify", str(path))
    assert result.exit_code == ExitCode.OK
    assert [row["result"] for row in rows("verify", str(path))] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE journal_batch SET facts = x'91c40100' WHERE stream = 'b' AND first = 1", "its checksum differs"),
        ("DELETE FROM journal_batch WHERE stream = 'b' AND first = 1", "has a gap"),
        ("DELETE FROM journal_batch WHERE stream = 'b' AND first > 1", "ends at position 2, but the head is 6"),
        ("UPDATE journal_snapshot SET state = x'00' WHERE stream = 'b'", "its checksum differs"),
    ],
)
def test_verify_names_the_first_problem_of_a_stream_and_still_reads_the_others(
    journal_file: MakeJournal, statement: str, problem: str
) -> None:
    path = journal_file(6)
    damage(path, statement)
    assert invoke("verify", str(path)).exit_code == ExitCode.FAILED
    first, second = rows("verify", str(path))
    assert first["result"] == "ok"
    assert problem in second["result"]


def test_dump_decodes_msgpack_and_falls_back_to_hex(journal_file: MakeJournal) -> None:
    path = journal_file(6)
    found = rows("dump", str(path), "a")
    assert [row["position"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert found[0] | {"size": 0} == {
        "position": 1,
        "epoch": 1,
        "size": 0,
        "encoding": "msgpack",
        "fact": {"kind": "joined", "n": 1, "raw": "AA=="},
    }
    assert found[-1]["encoding"] == "hex"
    assert bytes.fromhex(found[-1]["fact"]).startswith(b"\xc1")
    assert found[-1]["size"] == len(bytes.fromhex(found[-1]["fact"]))


def test_dump_starts_after_a_position_and_stops_at_the_limit(journal_file: MakeJournal) -> None:
    path = journal_file(9)
    assert [row["position"] for row in rows("dump", str(path), "a", "--after", "3", "--limit", "2")] == [4, 5]
    assert len(json.loads(invoke("dump", str(path), "a", "--limit", "2", "-o", "json").stdout)) == 2


def test_dump_of_an_unknown_stream_is_not_found(journal_file: MakeJournal, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["journal", "dump", str(journal_file(3)), "c"]) == ExitCode.NOT_FOUND
    assert capsys.readouterr().err == "strata: stream 'c' does not exist\n"


def test_a_mistyped_path_is_not_found_and_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "typo.db"
    assert run(["journal", "list", str(path)]) == ExitCode.NOT_FOUND
    assert "there is no journal at" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("database", "status"),
    [
        ("postgresql://me:hunter2@127.0.0.1:1/x", ExitCode.UNREACHABLE),
        ("postgresql://me@127.0.0.1:1/x?password=hunter2", ExitCode.UNREACHABLE),
        ("mysql://me:hunter2@db/x", ExitCode.USAGE),
        ("host=db password=hunter2", ExitCode.NOT_FOUND),
    ],
)
def test_a_password_is_never_printed(database: str, status: ExitCode, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--debug"]):
        assert run([*flags, "journal", "verify", database]) == status
        captured = capsys.readouterr()
        assert "hunter2" not in captured.err + captured.out
