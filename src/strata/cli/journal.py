"""`strata journal`: list, verify and dump the streams of a journal without changing it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from strata.base.errors import Code, StrataError
from strata.cli.exit_codes import ExitCode
from strata.cli.groups import VerbGroup
from strata.cli.output import Format, output_option
from strata.cli.rows import Column, Rows
from strata.cli.watch import view_options

if TYPE_CHECKING:
    from strata.journal.port import Journal, StreamStatus

T = TypeVar("T")

_LIST: Final = (
    Column("stream"),
    Column("head", number=True),
    Column("floor", number=True),
    Column("snapshot", number=True),
    Column("epoch", number=True),
    Column("led"),
    Column("holder", wide=True),
)
_VERIFY: Final = (
    Column("stream"),
    Column("facts", number=True),
    Column("first", number=True, wide=True),
    Column("last", number=True, wide=True),
    Column("result"),
)
_DUMP: Final = (
    Column("position", number=True),
    Column("epoch", number=True),
    Column("size", number=True),
    Column("encoding", wide=True),
    Column("fact", cut=120),
)

_database: Final = click.argument("database")


@click.group(cls=VerbGroup)
def journal() -> None:
    """Inspect a journal: streams, facts, integrity.

    DATABASE is sqlite:PATH, a path, or postgresql://USER@HOST/NAME. A SQLite journal serves one process: stop the
    server that uses it first.
    """


@journal.command("list")
@_database
@view_options
def list_streams(database: str, output: Format) -> None:
    """List the streams in DATABASE."""

    async def show(store: Journal) -> None:
        import msgspec

        with Rows(output, _LIST) as rows:
            for status in await store.streams():
                rows.add(msgspec.to_builtins(status))

    _with_journal(database, show)


@journal.command()
@_database
@output_option
def verify(database: str, output: Format) -> None:
    """Verify the integrity of every stream in DATABASE.

    Reads all facts and the newest snapshot of every stream, and checks their checksums and order. Exit status 100 if a
    stream is corrupt.
    """

    async def check(store: Journal) -> bool:
        whole = True
        with Rows(output, _VERIFY) as rows:
            for status in await store.streams():
                row = await _verify_stream(store, status)
                whole = whole and row["result"] == "ok"
                rows.add(row)
        return whole

    if not _with_journal(database, check):
        click.get_current_context().exit(ExitCode.FAILED)


@journal.command()
@_database
@click.argument("stream")
@click.option(
    "--after",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start after position N (default: at the first stored fact).",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Print at most N facts (default: all).")
@output_option
def dump(database: str, stream: str, after: int | None, limit: int | None, output: Format) -> None:
    """Print the facts of STREAM in DATABASE.

    Facts in msgpack are shown as JSON, all others as hex. The table format shortens long facts; the other formats do
    not.
    """

    async def show(store: Journal) -> None:
        from strata.journal.replay import replay

        start = await _floor(store, stream) if after is None else after
        printed = 0
        with Rows(output, _DUMP) as rows:
            async for batch in replay(store, stream, start):
                for position, fact in enumerate(batch.facts, start=batch.first):
                    if printed == limit:
                        return
                    rows.add({"position": position, "epoch": batch.epoch, "size": len(fact)} | _decode_fact(fact))
                    printed += 1

    _with_journal(database, show)


def _with_journal(database: str, use: Callable[[Journal], Awaitable[T]]) -> T:
    import asyncio

    async def run() -> T:
        from strata.base.clock import SystemClock
        from strata.journal.open import open_journal

        async with await open_journal(database, SystemClock(), create=False) as store:
            return await use(store)

    return asyncio.run(run())


async def _verify_stream(store: Journal, status: StreamStatus) -> dict[str, Any]:
    """The row of one stream. The head was read before the facts, so facts appended meanwhile are no error."""
    from strata.journal.replay import replay

    last = status.floor
    result = "ok"
    try:
        async for batch in replay(store, status.stream, status.floor):
            last = batch.last
        snapshot = await store.load_snapshot(status.stream)
    except StrataError as error:
        if error.code is not Code.CORRUPT:
            raise
        result = error.message
    else:
        if last < status.head:
            result = f"ends at position {last}, but the head is {status.head}"
        elif status.floor > (snapshot.position if snapshot else 0):
            result = f"facts up to position {status.floor} are gone, and no snapshot covers them"
    return {
        "stream": status.stream,
        "facts": last - status.floor,
        "first": status.floor + 1,
        "last": last,
        "result": result,
    }


async def _floor(store: Journal, stream: str) -> int:
    """The position before the first fact of a stream; 0 for an unknown stream, which the read then rejects by name."""
    return next((status.floor for status in await store.streams() if status.stream == stream), 0)


def _decode_fact(fact: bytes) -> dict[str, Any]:
    import msgspec

    try:
        # Through JSON text, which converts what JSON lacks: bytes become base64, NaN becomes null.
        value = msgspec.json.decode(msgspec.json.encode(msgspec.msgpack.decode(fact)))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return {"encoding": "hex", "fact": fact.hex()}
    return {"encoding": "msgpack", "fact": value}
