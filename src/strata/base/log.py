"""Structured logs: levels, JSON and console format, colours, correlation ids, and which libraries (httpx) log from
WARNING on alone.

`configure` is called once by each process; everything else only calls `get`. Logging is the one thing that must never
break what it describes: a value that cannot be shown is shown some other way, a line that cannot be written is dropped.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal, TextIO

from strata.base.errors import Code, StrataError
from strata.base.log_values import format_value, loggable, loggable_mapping, printable, shortened_repr

Format = Literal["json", "console"]
Level = Literal["debug", "info", "warning", "error"]

LEVELS: Final[dict[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_COLOURS: Final = {"DEBUG": "\x1b[2m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}
_DIM: Final = "\x1b[2m"
_RESET: Final = "\x1b[0m"
_OURS: Final = frozenset({"ts", "level", "logger", "event", "correlation_id", "exception"})

_QUOTE_URLS: Final = ("httpx", "httpcore")
"""Libraries that log each request with its URL, which may be signed: with the token that others must not read."""

_correlation: ContextVar[str | None] = ContextVar("correlation_id", default=None)


class Log:
    """A named log. The event is a constant such as `session_expired`; what varies goes into fields."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    @property
    def debugs(self) -> bool:
        """Says whether lines of this level are written: a line of every request costs something to make."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def debug(self, event: str, /, **fields: Any) -> None:
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, /, **fields: Any) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, /, **fields: Any) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, /, **fields: Any) -> None:
        self._logger.error(event, extra={"fields": fields})

    def exception(self, event: str, /, **fields: Any) -> None:
        """An error with the traceback of the exception being handled."""
        self._logger.error(event, exc_info=sys.exc_info(), extra={"fields": fields})


def get(name: str) -> Log:
    return Log(logging.getLogger(name))


@contextmanager
def correlation(correlation_id: str) -> Iterator[None]:
    """Every line logged inside, also by tasks started inside, carries this id."""
    token = _correlation.set(correlation_id)
    try:
        yield
    finally:
        _correlation.reset(token)


def correlation_id() -> str | None:
    """The id to send along with a call to another process."""
    return _correlation.get()


def configure(
    format: Format = "json",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    colour: bool = False,
) -> None:
    """Send all logs of this process, also those of libraries, to `stream` (stderr). A second call replaces the first.

    Colour is the caller's decision (see `colour_wanted`), because the environment is read by the settings only.
    """
    if level not in LEVELS:
        raise StrataError(Code.INVALID, f"unknown log level {level!r} (known: {', '.join(LEVELS)})")
    if format not in ("json", "console"):
        raise StrataError(Code.INVALID, f"unknown log format {format!r} (known: json, console)")
    handler = _Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else ConsoleFormatter(colour=colour))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    for name in _QUOTE_URLS:
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))


def colour_wanted(stream: TextIO, *, no_color: bool) -> bool:
    """Colour is for a terminal whose owner did not set NO_COLOR."""
    return not no_color and not stream.closed and stream.isatty()


class JsonFormatter(logging.Formatter):
    """One JSON object per line, ASCII only: no value can break the line or the encoding of the stream."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _event(record),
            "correlation_id": _correlation.get(),
        }
        line.update(_fields(record))
        if record.exc_info and record.exc_info[0]:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, allow_nan=False, separators=(",", ":"))


class ConsoleFormatter(logging.Formatter):
    """`12:00:00.000 INFO    event  key=value  logger`, for people. A traceback follows, indented."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = self._paint(f"{record.levelname:<7}", _COLOURS.get(record.levelname, ""))
        words = [self._paint(_timestamp(record)[11:-1], _DIM), level, printable(_event(record))]
        words += [f"{printable(name)}={format_value(value)}" for name, value in _fields(record).items()]
        correlation_id = _correlation.get()
        if correlation_id is not None:
            words.append(f"correlation_id={format_value(correlation_id)}")
        words.append(self._paint(printable(record.name), _DIM))
        lines = [" ".join(words)]
        if record.exc_info and record.exc_info[0]:
            # Indented, so that no text inside an exception can pass for a line of the log.
            lines += [f"    | {printable(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_RESET}" if self._colour and colour else text


class _Handler(logging.StreamHandler[TextIO]):
    def format(self, record: logging.LogRecord) -> str:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return super().format(record).encode(encoding, "backslashreplace").decode(encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Drop the line. The inherited method writes to stderr, which may be the very stream that is closed."""


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return f"{moment.strftime('%Y-%m-%dT%H:%M:%S')}.{moment.microsecond // 1000:03d}Z"


def _event(record: logging.LogRecord) -> str:
    if not record.args:
        return record.msg if isinstance(record.msg, str) else shortened_repr(record.msg)
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        # A library passed arguments that do not fit its own format; its message is worth more than that error.
        return f"{record.msg} {loggable(record.args)}"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    if not isinstance(fields, dict):
        return {}
    return {f"{name}_" if name in _OURS else name: value for name, value in loggable_mapping(fields).items()}
