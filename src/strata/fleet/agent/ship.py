"""A file that grows becomes a stream at the hub. The hub says how much it has, so nothing need be remembered here."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.calls import PIECE, Calls, Stream
from strata.fleet.artifacts.files import Tree, open_regular
from strata.fleet.core.report import MAX_LINE_BYTES, Metrics, parse_lines
from strata.fleet.wire import LeaseGiven

_TAIL: Final = 65_536
_LINES: Final = 16


class Shipper:
    """One stream of one attempt. `sent` is what the hub has acknowledged; unknown until the first reply."""

    def __init__(self, calls: Calls, lease: LeaseGiven, stream: Stream, path: Path) -> None:
        self._calls = calls
        self._lease = lease
        self._stream: Stream = stream
        self._path = path
        self.sent: int | None = None
        self.full = False
        """The hub takes no more of this stream."""

    def ship(self, *, last: bool = False) -> bool:
        """Send what is new, at most a piece; whether there was something. `last`: all of it, and durable at the hub."""
        if self.full:
            return False
        if self.sent is None:
            # Nothing, at the beginning: the reply says how much an earlier life of this agent has sent.
            self.sent = self._send(0, b"", last=False)
        piece = self._read(self.sent)
        moved = bool(piece)
        while piece or last:
            self.sent = self._send(self.sent, piece, last=last and len(piece) < PIECE)
            failpoint("agent.ship.sent")
            if not last or len(piece) < PIECE or self.full:
                break
            piece = self._read(self.sent)
        return moved

    def _send(self, offset: int, piece: bytes, *, last: bool) -> int:
        try:
            return self._calls.append(self._lease, self._stream, offset, piece, last=last)
        except StrataError as error:
            size = error.detail.get("size")
            if error.code is Code.PRECONDITION and isinstance(size, int) and size < offset:
                # The hub lost what was not yet on its disk.
                return size
            if error.code is Code.EXHAUSTED and isinstance(size, int):
                self.full = True
                return size
            raise

    def _read(self, offset: int) -> bytes:
        try:
            with _opened(self._path) as file:
                file.seek(offset)
                return file.read(PIECE)
        except FileNotFoundError:
            return b""


def tail_of(path: Path) -> str:
    """The end of a log, for people."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            return file.read().decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    except FileNotFoundError:
        return ""


def _opened(path: Path) -> BinaryIO:
    """INVALID if the job has put something else there than a file; FileNotFoundError if there is nothing."""
    try:
        return open_regular(Tree(path.parent), path.name)
    except FileNotFoundError:
        raise
    except (OSError, StrataError) as error:
        raise StrataError(Code.INVALID, f"{path.name} cannot be read: {error}") from error


def _lines(file: BinaryIO) -> list[bytes]:
    """Some lines; of one that is too long as much as shows that it is."""
    lines: list[bytes] = []
    while len(lines) < _LINES and (line := file.readline(MAX_LINE_BYTES + 2)):
        lines.append(line)
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
    return lines


def last_metrics(path: Path) -> dict[str, float]:
    """The last value of each metric that is a number: what a completed job is compared by."""
    found: dict[str, float] = {}
    try:
        with _opened(path) as file:
            while lines := _lines(file):
                reports, _ = parse_lines(lines)
                for report in reports:
                    if isinstance(report, Metrics):
                        found |= {name: value for name, value in report.values.items() if isinstance(value, float)}
    except FileNotFoundError:
        return {}
    return dict(list(found.items())[-1000:])
