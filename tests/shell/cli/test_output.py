"""Rows on stdout: formats, long cells, and what may not reach a terminal."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from strata.cli.output import Format, printable, redact
from strata.cli.rows import Column, Rows

COLUMNS = (Column("name"), Column("count", number=True), Column("note", wide=True, cut=10))
ROWS = ({"name": "a", "count": 7, "note": None}, {"name": "longer", "count": 1234, "note": "x" * 200})


def printed(output: Format, capsys: pytest.CaptureFixture[str]) -> str:
    with Rows(output, COLUMNS) as rows:
        for row in ROWS:
            rows.add(row)
    return capsys.readouterr().out


def test_a_table_aligns_numbers_and_hides_wide_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(Format.TABLE, capsys).splitlines() == ["NAME    COUNT", "a           7", "longer   1234"]


def test_a_wide_table_in_a_pipe_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(Format.WIDE, capsys).splitlines()
    assert lines[1].endswith("-")
    assert lines[2].endswith(" " + "x" * 200)


def test_json_is_one_array_and_jsonl_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(Format.JSON, capsys)) == list(ROWS)
    assert [json.loads(line) for line in printed(Format.JSONL, capsys).splitlines()] == list(ROWS)


def test_jsonl_comes_before_a_failure_and_a_table_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    for output in Format:
        with suppress(InterruptedError), Rows(output, COLUMNS) as rows:
            rows.add(ROWS[0])
            raise InterruptedError
        assert bool(capsys.readouterr().out) is (output in (Format.JSONL, Format.NAME))


def test_a_table_in_a_pipe_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Rows(Format.TABLE, (Column("note", cut=5), Column("id"))) as rows:
        rows.add({"note": "123456789" * 50, "id": "i" * 100})
    assert capsys.readouterr().out.splitlines()[1] == "123456789" * 50 + "  " + "i" * 100


def test_printable_keeps_lines_and_letters() -> None:
    assert printable("naïve — ok\n\tx\x00") == "naïve — ok\n\tx\\x00"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@h/d", "postgresql://u:***@h/d"),
        ("'postgres://u:p@ss'w:rd@h:5/d?x=1' failed", "'postgres://u:***@h:5/d?x=1' failed"),
        ("postgresql://:p@h", "postgresql://:***@h"),
        ("https://h/d?password=p&x=1", "https://h/d?password=***&x=1"),
        ("host=h password='a b' user=u", "host=h password=*** user=u"),
        ("postgresql://u@h:5432/d", "postgresql://u@h:5432/d"),
        ("see https://h:8443/join", "see https://h:8443/join"),
    ],
)
def test_passwords_are_replaced(text: str, shown: str) -> None:
    assert redact(text) == shown
