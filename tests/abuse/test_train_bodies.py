"""Bodies of the training server that would become far more in memory than they are on the way."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from strata.base.errors import Code, StrataError
from strata.http.body import BodyPace, IncomingBody
from strata.http.budget import BodyBudget
from strata.http.errors import HttpRefusal
from strata.http.zstd import MAX_FRAMES, decompress_frames, decompressed_size, zstd
from strata.identity.roles import Role
from strata.train.core import ops
from strata.train.wire import native, tinker, tinker_json
from strata.train.wire.pb import tinker_pb2 as pb
from tests.shell.train_api.conftest import Reached, reach, settings_in

pytestmark = pytest.mark.proves("Never again: 19 KB of compressed JSON cost 4.3 GB")

Tries = Callable[[int], None]
AREA = "training server: content"
MIB = 1 << 20
PASS = "/api/v1/forward_backward"
HEAD = b'{"model_id":"m","seq_id":1,"forward_backward_input":{"loss_fn":"cross_entropy","data":[{"model_input":'


@pytest.fixture
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Reached]:
    async with reach(settings_in(tmp_path_factory.mktemp("t")), 0.02) as reached:
        yield reached


@contextlib.contextmanager
def memory_below(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak >> 20} MiB"


def tokens(size: int) -> bytes:
    return HEAD + b'{"chunks":[{"tokens":[' + b"1," * (size // 2) + b"1]}]}}]}}"


@pytest.mark.attack(AREA, "19 KB of zstd that are 200 MB of JSON tokens")
async def test_json_has_a_limit_of_its_own_when_it_is_unpacked(server: Reached) -> None:
    bomb = zstd.compress(tokens(200 * MIB))
    assert len(bomb) < 64 << 10
    with memory_below(64 * MIB):
        reply = await server.ask("POST", PASS, content=bomb, headers={"Content-Encoding": "zstd"})
    assert reply.status_code == 400
    assert "unpacked" in reply.text


@pytest.mark.attack(AREA, "JSON of more than 16 MiB as it is")
async def test_json_has_a_limit_of_its_own_as_it_comes(server: Reached) -> None:
    reply = await server.ask("POST", PASS, content=tokens(17 * MIB))
    assert reply.status_code == 413
    assert reply.json()["error"]["detail"] == {"limit": 16 * MIB}


@pytest.mark.attack(AREA, "16 MiB of JSON that are eight million numbers")
def test_the_numbers_of_a_batch_are_counted_before_they_are_objects() -> None:
    body = tokens(15 * MIB)
    with memory_below(16 * MIB):
        found = tinker_json.read_pass(body, forward_only=False)
    assert isinstance(found, ops.MalformedOperation)
    assert "values" in found.message


@pytest.mark.attack(AREA, "zstd that becomes more than a hundred times as much")
def test_zstd_may_not_unpack_to_more_than_a_hundred_times_its_size() -> None:
    bomb = zstd.compress(b"\0" * (200 * MIB))
    assert len(bomb) * 100 < 200 * MIB
    for read in (decompressed_size, decompress_frames):
        with memory_below(40 * MIB), pytest.raises(StrataError, match="unpacked"):
            read(bomb, 256 * MIB)


@pytest.mark.attack(AREA, "zstd whose frames do not say how large they are")
def test_zstd_of_unknown_size_is_given_no_more_than_it_may_have() -> None:
    packer = zstd.ZstdCompressor()
    bomb = b"".join(packer.compress(b"\0" * MIB) for _ in range(64)) + packer.flush()
    assert decompressed_size(bomb, 256 * MIB) == 16 * MIB
    with memory_below(40 * MIB), pytest.raises(StrataError, match="unpacked"):
        decompress_frames(bomb, 256 * MIB)


@pytest.mark.attack(AREA, "zstd of ten thousand frames, of a window of 2 GiB, cut off, empty, and none at all")
def test_zstd_that_is_none_or_asks_for_too_much_is_refused(tries: Tries) -> None:
    frame = zstd.compress(b"abc")
    assert decompress_frames(frame * 3, 100) == b"abcabcabc"
    wide = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 31})
    beyond = wide.compress(b"x" * 1000) + wide.flush()
    for body in (frame * (MAX_FRAMES + 1), beyond, frame[:-1], frame + frame[:-1], b"\x28\xb5\x2f\xfd", b"x" * 100):
        tries(1)
        with pytest.raises(StrataError) as refused:
            decompress_frames(body, MIB)
        assert refused.value.code is Code.INVALID


@pytest.mark.attack(AREA, "protobuf of a million empty datums, chunks, arrays or dimensions")
def test_the_elements_of_a_protobuf_batch_are_counted_before_it_is_parsed(tries: Tries) -> None:
    def nested(*numbers: int) -> bytes:
        inner = bytes([numbers[-1] << 3 | 2, 0]) * (4 * MIB)
        for number in reversed(numbers[:-1]):
            inner = bytes([number << 3 | 2]) + _length(len(inner)) + inner
        return inner

    data, chunks = pb.ForwardBackwardRequest.DATA_FIELD_NUMBER, pb.Datum.MODEL_INPUT_FIELD_NUMBER
    inputs, shape = pb.Datum.LOSS_FN_INPUTS_FIELD_NUMBER, pb.Tensor.SHAPE_FIELD_NUMBER
    packed = bytes([shape << 3 | 2]) + _length(2 * MIB) + b"\x01" * (2 * MIB)
    for number in (2, inputs, data):
        packed = bytes([number << 3 | 2]) + _length(len(packed)) + packed
    for body in (nested(data), nested(data, chunks), nested(data, inputs), packed):
        tries(1)
        with pytest.raises(StrataError, match="elements"):
            tinker.read_pass(body)


def _length(size: int) -> bytes:
    found = bytearray()
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*found, size])


@pytest.mark.attack(AREA, "MessagePack of millions of datums, arrays or dimensions")
def test_the_elements_of_a_batch_in_our_own_form_are_counted_before_they_are_read(tries: Tries) -> None:
    dense = {"type": "dense", "dtype": ops.DType.I64.value, "shape": [1] * (2 * MIB), "data": b""}
    for datums in (
        [{"tokens": b"", "inputs": {}}] * (ops.MAX_DATUMS + 1),
        [{"tokens": b"", "inputs": {str(number): None for number in range(1000)}}],
        [{"tokens": b"", "inputs": {"a": dense}}],
    ):
        tries(1)
        body = native.encode({"model_id": "m", "seq_id": 1, "loss": "cross_entropy", "datums": datums})
        with memory_below(4 * MIB):
            found = native.read_pass(body)
        assert isinstance(found, ops.MalformedOperation)
        assert "length" in found.message


@pytest.mark.attack(AREA, "MessagePack of a million parameters of a loss, and of names of many MiB")
def test_the_parameters_of_a_loss_and_their_names_are_bounded_before_they_are_read(tries: Tries) -> None:
    whole = {"model_id": "m", "seq_id": 1, "loss": "cross_entropy", "config": {}, "datums": []}
    long = "x" * (8 * MIB)
    for more in (
        {"config": {str(number): 1.0 for number in range(MIB)}},
        {"config": {long: 1.0}},
        {"config": {"a": long}},
        {"loss": long},
    ):
        tries(1)
        body = native.encode(whole | more)
        with memory_below(20 * MIB):
            found = native.read_pass(body)
        assert isinstance(found, ops.MalformedOperation)
        assert "length" in found.message
    with pytest.raises(StrataError, match="length"):
        native.read_pass(native.encode(whole | {"model_id": long}))


@pytest.mark.proves(
    "Never again: a body that began fast could keep its room for hours; silent connections before TLS "
    "stayed for a minute"
)
@pytest.mark.attack(AREA, "a body that came fast, and then stays away or trickles while it keeps its room")
async def test_a_body_may_not_pause_for_longer_however_fast_it_came(tries: Tries) -> None:
    pace = BodyPace(grace_s=0.3, bytes_per_s=1000)
    for trickles in (False, True):
        tries(1)
        first: list[Message] = [{"type": "http.request", "body": b"x" * MIB, "more_body": True}]

        async def receive(first: list[Message] = first, trickles: bool = trickles) -> Message:
            if first:
                return first.pop()
            await asyncio.sleep(0.1 if trickles else 3600)
            return {"type": "http.request", "body": b"x", "more_body": True}

        async with asyncio.timeout(10):
            with pytest.raises(HttpRefusal) as refused:
                await IncomingBody(receive, Headers(), 2 * MIB, pace).whole()
        assert refused.value.status == 408


@pytest.mark.attack(AREA, "one body that is as large as all the room there is")
async def test_the_largest_body_leaves_room_for_others() -> None:
    budget = BodyBudget(100, largest=1000, wait_s=0.01)
    with budget.reserve("a") as first, budget.reserve("b") as other:
        await first.resize(1000)
        await other.resize(1000)
    assert budget.held == 0


@pytest.mark.attack(AREA, "more bodies at once than there is memory for, of one tenant")
async def test_a_tenant_has_half_of_the_room_for_bodies() -> None:
    budget = BodyBudget(100, wait_s=0.01)
    with budget.reserve("a") as first, budget.reserve("a") as second, budget.reserve("b") as other:
        await first.resize(40)
        with pytest.raises(StrataError) as refused:
            await second.resize(20)
        assert refused.value.code is Code.EXHAUSTED
        await other.resize(50)
    assert budget.held == 0


@pytest.mark.attack(AREA, "more bodies at once than there is memory for, of many tenants")
async def test_bodies_wait_for_room_and_get_it() -> None:
    budget = BodyBudget(100)
    with budget.reserve("c") as waiting:
        with budget.reserve("a") as first, budget.reserve("b") as second:
            await first.resize(50)
            await second.resize(50)
            asked = asyncio.create_task(waiting.resize(30))
            await asyncio.sleep(0)
            assert not asked.done()
        await asked
        assert budget.held == 30
    assert budget.held == 0


@pytest.mark.attack(AREA, "a body that stays under way while others of the tenant come")
async def test_a_body_for_which_there_is_no_room_is_told_to_come_back(tmp_path: Path, server: Reached) -> None:
    site = server.context
    body = tokens(2 * MIB)
    with site.bodies.reserve("key:researcher") as hold:
        await hold.resize(site.bodies.share - MIB)
        site.bodies.wait_s = 0.01
        reply = await server.ask("POST", PASS, content=body)
        other = await server.ask("POST", PASS, Role.OPERATOR, content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "exhausted")
    assert "retry-after" in reply.headers
    assert other.status_code == 503, "there is no orchestrator, but there was room"
    assert site.bodies.held == 0


@pytest.mark.attack(AREA, "a protobuf batch of 32 MiB is no attack")
async def test_a_large_batch_in_protobuf_is_taken(server: Reached) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(32):
        message.data.add().model_input.add().encoded_text.tokens = bytes(MIB)
    headers = {"Content-Type": tinker.MEDIA_TYPE}
    reply = await server.ask("POST", PASS, content=message.SerializeToString(), headers=headers)
    assert reply.status_code == 503, "there is no orchestrator, but the batch was read"
    assert msgspec.json.decode(reply.content)["error"]["code"] == "unavailable"
