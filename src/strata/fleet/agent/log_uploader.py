"""Uploads a growing file (log, metrics, exec output) to the hub by offset, and reads the tail of a log and the last
metrics.

The hub's replies say how many bytes it has, so the agent stores no offset.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.redaction import Redactor
from strata.fleet.artifacts.files import Tree, open_regular
from strata.fleet.client.hub_api import PIECE, HubApi
from strata.fleet.core.report import MAX_LINE_BYTES, MetricsReport, parse_lines
from strata.fleet.wire.leases import LeaseGiven

_TAIL_BYTES: Final = 65_536
_LINES_PER_READ: Final = 16


class StreamUploader:
    """One stream of one attempt. `sent` is how many bytes the hub has acknowledged; unknown until the first reply."""

    def __init__(
        self, hub: HubApi, lease: LeaseGiven, stream: str, path: Path, redactor: Redactor | None = None
    ) -> None:
        self._hub = hub
        self._lease = lease
        self._stream = stream
        self._path = path
        self._redactor = redactor or Redactor()
        self.sent: int | None = None
        self.full = False
        """The hub accepts no more bytes of this stream."""

    def upload_new(self, *, last: bool = False) -> bool:
        """Send the next piece of new bytes; whether there were any. `last`: send all, durable at the hub."""
        if self.full:
            return False
        if self.sent is None:
            # An empty piece first: the reply says how much an earlier agent process has sent.
            self.sent = self._send(0, b"", last=False)
        piece = self._read(self.sent, last=last)
        has_new = bool(piece)
        while piece or last:
            self.sent = self._send(self.sent, piece, last=last and len(piece) < PIECE)
            failpoint("agent.ship.sent")
            if not last or len(piece) < PIECE or self.full:
                break
            piece = self._read(self.sent, last=last)
        return has_new

    def check_wanted(self) -> None:
        """Raises what the hub says to the next piece, also when there is none."""
        self.sent = self._send(self.sent or 0, b"", last=False)

    def _send(self, offset: int, piece: bytes, *, last: bool) -> int:
        try:
            return self._hub.append(self._lease, self._stream, offset, piece, last=last)
        except StrataError as error:
            size = error.detail.get("size")
            if error.code is Code.PRECONDITION and isinstance(size, int) and size < offset:
                # The hub lost bytes that were not yet on its disk.
                return size
            if error.code is Code.EXHAUSTED and isinstance(size, int):
                self.full = True
                return size
            raise

    def _read(self, offset: int, *, last: bool) -> bytes:
        """The next piece, redacted. Unless it is the `last`, a value that is not written to its end yet waits."""
        reach = self._redactor.reach
        start = max(0, offset - reach)
        size = offset - start + PIECE + reach
        try:
            with _open_stream(self._path) as file:
                file.seek(start)
                content = file.read(size)
        except FileNotFoundError:
            return b""
        end = len(content) if last or len(content) == size else len(content) - self._redactor.unfinished(content)
        return self._redactor.redact(content)[offset - start : min(end, offset - start + PIECE)]


def read_log_tail(path: Path) -> str:
    """The end of a log as text."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    except FileNotFoundError:
        return ""


def _open_stream(path: Path) -> BinaryIO:
    """INVALID if the job put something else there than a regular file; FileNotFoundError if there is nothing."""
    try:
        return open_regular(Tree(path.parent), path.name)
    except FileNotFoundError:
        raise
    except (OSError, StrataError) as error:
        raise StrataError(Code.INVALID, f"{path.name} cannot be read: {error}") from error


def _read_lines(file: BinaryIO) -> list[bytes]:
    """The next lines; of a line that is too long only as much as shows that it is."""
    lines: list[bytes] = []
    while len(lines) < _LINES_PER_READ and (line := file.readline(MAX_LINE_BYTES + 2)):
        lines.append(line)
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
    return lines


def last_metrics(path: Path) -> dict[str, float]:
    """The last value of each numeric metric, by which completed jobs are compared."""
    latest: dict[str, float] = {}
    try:
        with _open_stream(path) as file:
            while lines := _read_lines(file):
                reports, _ = parse_lines(lines)
                for report in reports:
                    if isinstance(report, MetricsReport):
                        latest |= {name: value for name, value in report.values.items() if isinstance(value, float)}
    except FileNotFoundError:
        return {}
    return dict(list(latest.items())[-1000:])
