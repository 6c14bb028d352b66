from __future__ import annotations

import asyncio
import enum
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.log_values import format_value, is_secret_name, loggable, printable
from strata.base.secret import Secret


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Colour(enum.Enum):
    RED = "red"


class Login(msgspec.Struct):
    user: str
    password: str


def json_lines(**configuration: Any) -> tuple[io.StringIO, Any]:
    stream = io.StringIO()
    log.configure("json", stream=stream, **configuration)
    return stream, log.get("strata.test")


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_has_the_common_keys_and_the_fields() -> None:
    stream, logger = json_lines()
    logger.info("the thing started", size=3, name="x")
    (line,) = read(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line == {
        "level": "info",
        "logger": "strata.test",
        "event": "the thing started",
        "correlation_id": None,
        "size": 3,
        "name": "x",
    }


@pytest.mark.parametrize(
    ("created", "ts"),
    [(0.0, "1970-01-01T00:00:00.000Z"), (1_700_000_000.9996, "2023-11-14T22:13:20.999Z")],
)
def test_times_are_utc_with_milliseconds(created: float, ts: str) -> None:
    record = logging.makeLogRecord({"msg": "x", "created": created})
    assert json.loads(log.JsonFormatter().format(record))["ts"] == ts


def test_a_level_hides_what_is_below_it() -> None:
    stream, logger = json_lines(level="warning")
    logger.debug("a")
    logger.info("b")
    logger.warning("c")
    logger.error("d")
    assert [(line["level"], line["event"]) for line in read(stream)] == [("warning", "c"), ("error", "d")]


def test_a_second_configuration_replaces_the_first_and_leaves_other_handlers() -> None:
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    first, _ = json_lines()
    second, logger = json_lines()
    logger.info("once")
    assert first.getvalue() == ""
    assert len(read(second)) == 1
    assert other in logging.getLogger().handlers


@pytest.mark.parametrize("wrong", [{"level": "loud"}, {"format": "xml"}])
def test_an_unknown_level_or_format_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StrataError, match="known: ") as caught:
        log.configure(**wrong)
    assert caught.value.code is Code.INVALID


def test_an_exception_is_logged_with_its_traceback_on_one_line() -> None:
    stream, logger = json_lines()
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("it failed", step=2)
    (line,) = read(stream)
    assert line["level"] == "error"
    assert line["step"] == 2
    assert "ValueError: first\nsecond" in line["exception"]


def test_an_exception_logged_outside_of_one_has_no_traceback() -> None:
    stream, logger = json_lines()
    logger.exception("nothing was raised")  # noqa: LOG004 - the point of the test
    assert "exception" not in read(stream)[0]


def test_lines_of_libraries_come_out_in_the_same_form() -> None:
    stream, _ = json_lines()
    logging.getLogger("library").warning("%d of %s", 3, "x")
    (line,) = read(stream)
    assert (line["logger"], line["event"]) == ("library", "3 of x")


def test_a_library_that_logs_wrongly_loses_no_line() -> None:
    # Formatted directly: pytest's own handlers would raise.
    unfit = logging.makeLogRecord({"msg": "%d does not fit", "args": ("x",)})
    assert json.loads(log.JsonFormatter().format(unfit))["event"] == "%d does not fit ['x']"
    unprintable = logging.makeLogRecord({"msg": Unprintable()})
    assert "Unprintable" in json.loads(log.JsonFormatter().format(unprintable))["event"]


def test_fields_cannot_replace_the_common_keys() -> None:
    stream, logger = json_lines()
    logger.info("real", event="fake", level="fake", ts="fake", self="me", correlation_id="c", exception="e")
    (line,) = read(stream)
    assert (line["event"], line["event_"], line["level_"], line["self"]) == ("real", "fake", "fake", "me")
    assert line["correlation_id"] is None
    assert line["correlation_id_"] == "c"


async def test_the_correlation_id_follows_tasks_and_ends_with_its_block() -> None:
    stream, logger = json_lines()

    async def work(name: str) -> None:
        with log.correlation(name):
            await asyncio.sleep(0)
            await asyncio.create_task(child())
            logger.info(name)

    async def child() -> None:
        logger.info("child", parent=log.correlation_id())

    with log.correlation("outer"):
        await asyncio.gather(work("one"), work("two"))
        logger.info("outer")
    logger.info("after")
    lines = read(stream)
    children = [line for line in lines if line["event"] == "child"]
    assert sorted((line["parent"], line["correlation_id"]) for line in children) == [("one", "one"), ("two", "two")]
    assert {line["event"]: line["correlation_id"] for line in lines if line not in children} == {
        "one": "one",
        "two": "two",
        "outer": "outer",
        "after": None,
    }
    assert log.correlation_id() is None


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "access_token",
        "authToken",
        "secret",
        "client_secret",
        "secret_key",
        "password",
        "db_password_hash",
        "api_key",
        "apikey",
        "apiKeys",
        "X-Api-Key",
        "Authorization",
        "private_key",
    ],
)
def test_names_that_look_like_secrets_are_masked(name: str) -> None:
    assert is_secret_name(name)
    assert loggable({"headers": [{name: "hunter2"}]}) == {"headers": [{name: "***"}]}


@pytest.mark.parametrize("name", ["tokens", "max_tokens", "token_count", "tokenizer", "key", "secretary", "author"])
def test_names_of_counts_are_not_masked(name: str) -> None:
    assert not is_secret_name(name)


def test_a_number_is_no_token_and_may_be_a_password() -> None:
    shown = {"bytes_per_token": 945, "s_per_token": 0.5, "token": "***", "access_token": "***", "password": "***"}
    assert loggable({**shown, "token": "7", "access_token": "x", "password": 1234}) == shown


def test_secrets_are_masked_wherever_they_are() -> None:
    stream, logger = json_lines()
    secret = Secret("hunter2")
    logger.info(secret, a=secret, b=[{"c": secret}], d=Login("x", "hunter2"))
    assert "hunter2" not in stream.getvalue()
    (line,) = read(stream)
    assert line["d"] == {"user": "x", "password": "***"}


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


ODD_VALUES: list[Any] = [
    object(),
    Unprintable(),
    {1: Unprintable(), None: 2, (1, 2): 3},
    cyclic(),
    float("nan"),
    float("-inf"),
    10**5000,
    b"\xff",
    "\ud800",
    "\u2028\x1b[2J",
    {1, 2},
    Colour.RED,
    Path("/x"),
    ValueError("x"),
    [[]] * 5000,
]


@pytest.mark.parametrize("format", ["json", "console"])
@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: type(value).__name__)
def test_no_value_makes_a_log_call_raise_or_get_lost(format: log.Format, value: Any) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    log.configure(format, stream=stream)
    log.get("strata.test").info("odd", value=value)
    stream.seek(0)
    written = stream.read()
    assert written.count("\n") == 1
    assert "value" in written


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (Colour.RED, "red"),
        (Path("/x"), "/x"),
        (b"x", "b'x'"),
        (True, True),
        ((1, "a"), [1, "a"]),
        (2**64, str(2**64)),
    ],
)
def test_values_are_shown_as_json_or_by_their_repr(value: Any, expected: Any) -> None:
    assert loggable(value) == expected


@given(st.text(), st.dictionaries(st.text(), st.text() | st.floats() | st.binary(), max_size=3))
def test_no_text_can_forge_a_second_line(event: str, value: dict[str, Any]) -> None:
    record = logging.makeLogRecord({"msg": event, "name": event, "fields": {"v": value, event: 1}})
    for formatter in (log.JsonFormatter(), log.ConsoleFormatter(colour=False)):
        written = formatter.format(record)
        assert len(written.splitlines()) == 1
        assert written.isprintable()


def test_a_traceback_on_the_console_cannot_pass_for_a_log_line() -> None:
    stream = io.StringIO()
    log.configure("console", stream=stream)
    try:
        raise ValueError("x\n12:00:00.000 INFO    forged\r\x1b[1A")
    except ValueError:
        log.get("strata.test").exception("it failed")
    first, *rest = stream.getvalue().splitlines()
    assert "it failed" in first
    assert len(rest) >= 4
    assert all(line.startswith("    | ") and line.isprintable() for line in rest)


def test_the_console_shows_simple_words_bare_and_the_rest_quoted() -> None:
    stream = io.StringIO()
    log.configure("console", stream=stream)
    with log.correlation("req_1"):
        log.get("strata.test").warning("disk is filling", path="/srv/x", note="two words", n=3, empty="")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} WARNING disk is filling "
        r'path=/srv/x note="two words" n=3 empty="" correlation_id=req_1 strata\.test\n',
        stream.getvalue(),
    )


def test_colour_appears_only_when_asked_for() -> None:
    plain_stream, coloured = io.StringIO(), io.StringIO()
    log.configure("console", stream=plain_stream)
    log.get("t").error("x")
    log.configure("console", stream=coloured, colour=True)
    log.get("t").error("x")
    assert "\x1b[" not in plain_stream.getvalue()
    assert "\x1b[31m" in coloured.getvalue()


def test_colour_is_wanted_on_a_terminal_without_no_color() -> None:
    assert log.colour_wanted(Terminal(), no_color=False)
    assert not log.colour_wanted(Terminal(), no_color=True)
    assert not log.colour_wanted(io.StringIO(), no_color=False)
    closed = Terminal()
    closed.close()
    assert not log.colour_wanted(closed, no_color=False)


def test_a_closed_stream_is_survived() -> None:
    stream, logger = json_lines()
    stream.close()
    logger.error("nobody reads this", x=1)
    try:
        raise ValueError
    except ValueError:
        logger.exception("nor this")


def test_a_stream_of_another_encoding_gets_escapes_instead_of_losing_the_line() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    log.configure("console", stream=stream)
    log.get("t").info("größer", name="é")
    stream.seek(0)
    assert "gr\\xf6\\xdfer name=\\xe9" in stream.read()


@given(st.text())
def test_printable_text_is_kept_and_the_rest_is_escaped(text: str) -> None:
    assert printable(text).isprintable()
    assert not text.isprintable() or printable(text) == text
    assert format_value(text).isprintable()


@pytest.mark.parametrize("level", ["debug", "info"])
def test_the_address_of_a_request_that_this_process_sends_is_not_logged(level: str) -> None:
    stream = io.StringIO()
    log.configure("json", level, stream)
    transport = httpx.MockTransport(lambda _: httpx.Response(200))
    with httpx.Client(transport=transport, base_url="http://server") as client:
        client.get("/api/v1/archive", params={"token": "signed"})
    assert "signed" not in stream.getvalue()
    logging.getLogger("httpx").warning("retried")
    assert "retried" in stream.getvalue()
