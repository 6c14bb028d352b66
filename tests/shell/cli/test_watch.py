"""`--watch`: a screen on a terminal, a line for each change in a pipe; and what a terminal alone gets."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from strata.base.settings import process_environment
from strata.cli.main import run
from strata.cli.watch import ChangedLines

STRATA = str(Path(sys.executable).with_name("strata"))
DEADLINE_S = 60.0


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *words: str, columns: int = 100) -> None:
        self._main, inner = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [STRATA, *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={
                **process_environment(),
                "COLUMNS": str(columns),
                "LINES": "24",
                "TERM": "xterm-256color",
                "NO_COLOR": "",
            },
        )
        os.close(inner)

    def until(self, text: str) -> str:
        deadline_s = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < deadline_s, self.shown
            self._read()
        return self.shown

    def _read(self) -> None:
        if select.select([self._main], [], [], 1.0)[0]:
            try:
                self.shown += os.read(self._main, 65_536).decode()
            except OSError:
                time.sleep(0.1)

    def press(self, key: str) -> None:
        os.write(self._main, key.encode())

    def ended(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            os.close(self._main)


def test_a_screen_shows_the_list_until_q(journal_file: Callable[[int], Path]) -> None:
    terminal = Terminal("journal", "list", str(journal_file(4)), "--watch")
    assert "HEAD" in terminal.until("q ends")
    terminal.press("q")
    assert terminal.ended() == 0


def test_a_pipe_gets_what_changed_and_no_screen(journal_file: Callable[[int], Path]) -> None:
    with subprocess.Popen(
        [STRATA, "journal", "list", str(journal_file(4)), "--watch"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert lines[0].split()[:2] == ["STREAM", "HEAD"]
    assert (rest, process.returncode) == ("", 130)


def test_a_document_cannot_be_watched(journal_file: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    database = str(journal_file(4))
    assert run(["journal", "list", database, "--watch", "-o", "json"]) == 2
    assert "use -o jsonl" in capsys.readouterr().err


def test_only_news_are_printed_and_ages_are_no_news(capsys: pytest.CaptureFixture[str]) -> None:
    news = ChangedLines()
    news.print(["JOB   AGE", "tree  12s", "   9s  gone", '{"host": "a", "seen_ago_s": 1.5, "jobs": 0}'])
    news.print(["JOB    AGE", "tree  119s", " 19s  gone", "wood    1s", '{"host": "a", "seen_ago_s": 9.1, "jobs": 0}'])
    news.print(["JOB   AGE", "tree   2m", "wood   3s", '{"host": "a", "seen_ago_s": 9.1, "jobs": 1}'])
    assert capsys.readouterr().out.splitlines() == [
        "JOB   AGE",
        "tree  12s",
        "   9s  gone",
        '{"host": "a", "seen_ago_s": 1.5, "jobs": 0}',
        "wood    1s",
        '{"host": "a", "seen_ago_s": 9.1, "jobs": 1}',
    ]


def test_a_state_has_a_sign_and_a_word_on_a_terminal_and_the_word_alone_in_a_pipe() -> None:
    code = """
from strata.cli.output import Format
from strata.cli.rows import Column, Rows
with Rows(Format.TABLE, (Column("id"), Column("status"), Column("note", cut=8))) as rows:
    rows.add({"id": "x" * 40, "status": "failed", "note": "a sentence that is much too long for this terminal"})
"""
    words = [sys.executable, "-c", code]
    piped = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    assert piped.splitlines()[1].endswith("failed  a sentence that is much too long for this terminal")
    main, inner = pty.openpty()
    with subprocess.Popen(
        words, stdout=inner, env={**process_environment(), "COLUMNS": "70", "TERM": "xterm", "NO_COLOR": "1"}
    ):
        os.close(inner)
        shown = os.read(main, 65_536).decode()
    os.close(main)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    line = plain.splitlines()[1]
    assert "✗ failed" in line
    assert "x" * 40 in line, "an id is never cut"
    assert line.endswith("…")
    assert len(line) <= 70
