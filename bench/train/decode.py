"""Benchmark of request decoding: from the wire to validated operations, compared with the bare protobuf parser.

The body is what an RL client sends for 64 datums of 4096 tokens: targets, log probabilities and advantages, as protobuf
and the same in zstd. Ours ends in operations whose every array was validated (lengths, shapes, finite, no token below
0); bare parses the same bytes and reads every array with `numpy.frombuffer`, unchecked. MB are those of the protobuf.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np

from bench.interleave import Measure, interleave
from bench.report import Report
from strata.http.zstd import decompress_frames, zstd
from strata.train.core.ops import MalformedOperation
from strata.train.wire import tinker
from strata.train.wire.pb import tinker_pb2 as pb

DATUMS: Final = 64
TOKENS: Final = 4096
VOCABULARY: Final = 32_000
NUMPY: Final = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}


def body() -> bytes:
    rng = np.random.default_rng(0)
    message = pb.ForwardBackwardRequest(model_id="session:train:0", seq_id=1, loss_fn="importance_sampling")
    for _ in range(DATUMS):
        datum = message.data.add()
        tokens = rng.integers(0, VOCABULARY, TOKENS + 1)
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        floats = {"logprobs": -rng.exponential(size=TOKENS), "advantages": np.full(TOKENS, rng.normal())}
        for name, values, dtype in (
            ("target_tokens", tokens[1:].astype("<i8"), pb.DTYPE_INT64),
            *((name, values.astype("<f4"), pb.DTYPE_FLOAT32) for name, values in floats.items()),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense = values.tobytes()
            tensor.dtype = dtype
            tensor.shape.append(TOKENS)
    return message.SerializeToString()


def decode_ours(content: bytes) -> None:
    operation = tinker.read_pass(content)
    assert not isinstance(operation, MalformedOperation), operation.message
    assert len(operation.datums) == DATUMS


def decode_bare(content: bytes) -> None:
    message = pb.ForwardBackwardRequest.FromString(content)
    count = 0
    for datum in message.data:
        count += len(np.frombuffer(datum.model_input[0].encoded_text.tokens, "<i4"))
        for tensor in datum.loss_fn_inputs.values():
            count += len(np.frombuffer(tensor.dense, NUMPY[tensor.dtype]))
    assert count == 4 * DATUMS * TOKENS


async def run(report: Report, *, rounds: int) -> None:
    plain = body()
    packed = zstd.compress(plain)
    size_mb = len(plain) / 1e6

    def rate(work: Callable[[], None]) -> Measure:
        async def measure() -> float:
            started = perf_counter()
            work()
            return size_mb / (perf_counter() - started)

        return measure

    found = await interleave(rate(lambda: decode_ours(plain)), rate(lambda: decode_bare(plain)), rounds)
    note = f"{DATUMS} x {TOKENS} tokens"
    report.add("decode", "MB/s", found, note=f"{note}, {size_mb:.2f} MB; checked beside believed")
    limit = 2 * len(plain)
    found = await interleave(
        rate(lambda: decode_ours(decompress_frames(packed, limit))),
        rate(lambda: decode_bare(zstd.decompress(packed))),
        rounds,
    )
    report.add("decode.zstd", "MB/s", found, note=f"{note}, {len(packed) / 1e6:.2f} MB compressed")
