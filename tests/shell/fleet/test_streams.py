"""Logs and metrics grow by offset: what was sent twice is there once, what is missing is asked for again."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.streams import MAX_PIECE, AttemptStreams

JOB = "job1_" + "a" * 64


async def refusal_of(streams: AttemptStreams, *piece: object) -> StrataError:
    with pytest.raises(StrataError) as refused:
        await streams.append(*piece)  # type: ignore[arg-type]
    return refused.value


async def test_pieces_follow_each_other(tmp_path: Path) -> None:
    streams = AttemptStreams(tmp_path)
    assert await streams.append(JOB, 1, "log", 0, b"hello ") == 6
    assert await streams.append(JOB, 1, "log", 6, b"world", last=True) == 11
    assert await streams.read(JOB, 1, "log", 0) == b"hello world"
    assert await streams.read(JOB, 1, "log", 6, 3) == b"wor"
    assert await streams.read(JOB, 1, "log", 11) == b""
    assert await streams.read(JOB, 2, "log", 0) == b""
    assert await streams.size(JOB, 1, "metrics") == 0


async def test_a_repeated_piece_is_stored_once(tmp_path: Path) -> None:
    streams = AttemptStreams(tmp_path)
    await streams.append(JOB, 1, "log", 0, b"hello ")
    assert await streams.append(JOB, 1, "log", 0, b"hello ") == 6
    assert await streams.append(JOB, 1, "log", 3, b"lo world") == 11
    assert await streams.read(JOB, 1, "log", 0) == b"hello world"


async def test_two_hubs_that_get_the_same_pieces_at_once_store_them_once(tmp_path: Path) -> None:
    hubs = [AttemptStreams(tmp_path) for _ in range(4)]
    whole = b""
    for number in range(100):
        piece = b"piece %d\n" % number
        sizes = await asyncio.gather(*(hub.append(JOB, 1, "log", len(whole), piece) for hub in hubs))
        whole += piece
        assert set(sizes) == {len(whole)}
    assert await hubs[0].read(JOB, 1, "log", 0) == whole


async def test_a_gap_is_refused_with_what_is_there(tmp_path: Path) -> None:
    streams = AttemptStreams(tmp_path)
    await streams.append(JOB, 1, "log", 0, b"hello")
    refused = await refusal_of(streams, JOB, 1, "log", 9, b"x")
    assert (refused.code, refused.detail["size"]) == (Code.PRECONDITION, 5)


async def test_attempts_do_not_share_a_stream(tmp_path: Path) -> None:
    streams = AttemptStreams(tmp_path)
    await streams.append(JOB, 1, "log", 0, b"first")
    await streams.append(JOB, 2, "log", 0, b"second")
    assert await streams.read(JOB, 1, "log", 0) == b"first"


async def test_a_stream_that_outgrows_its_bound_is_refused(tmp_path: Path) -> None:
    streams = AttemptStreams(tmp_path, max_bytes=8)
    assert (await refusal_of(streams, JOB, 1, "log", 0, b"123456789")).code is Code.EXHAUSTED
    assert (await refusal_of(streams, JOB, 1, "log", 0, b"1" * (MAX_PIECE + 1))).code is Code.INVALID


@pytest.mark.parametrize("job_id", ["../x", "job1_" + "a" * 63, "", "job1_" + "A" * 64, f"{JOB}/..", f"x\0{JOB}"])
async def test_what_is_not_an_id_is_not_a_path(tmp_path: Path, job_id: str) -> None:
    assert (await refusal_of(AttemptStreams(tmp_path), job_id, 1, "log", 0, b"x")).code is Code.NOT_FOUND
    assert list(tmp_path.iterdir()) == []


async def test_senders_that_repeat_each_other_at_once_store_each_byte_once(tmp_path: Path) -> None:
    streams = AttemptStreams(tmp_path)
    text = bytes(range(200))
    await asyncio.gather(*(streams.append(JOB, 1, "log", 0, text[:n]) for n in range(10, 200, 10)))
    assert await streams.read(JOB, 1, "log", 0) == text[:190]


@given(st.binary(max_size=300), st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), max_size=30))
def test_any_order_of_repeats_gives_a_beginning_of_the_text(text: bytes, pieces: list[tuple[int, int]]) -> None:
    async def send(folder: Path) -> bytes:
        streams = AttemptStreams(folder)
        stored = 0
        for offset, size in pieces:
            if offset > stored:
                assert (await refusal_of(streams, JOB, 1, "log", offset, b"x")).detail["size"] == stored
            else:
                stored = await streams.append(JOB, 1, "log", offset, text[offset : offset + size])
        return await streams.read(JOB, 1, "log", 0)

    with tempfile.TemporaryDirectory() as folder:
        stored = asyncio.run(send(Path(folder)))
    assert text.startswith(stored)
