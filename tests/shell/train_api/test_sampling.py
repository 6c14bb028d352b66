"""Sampling over HTTP, through the real orchestrator process to ranks that pretend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from strata.train.wire import tinker
from tests.shell.train_api.test_protocol import BASE, Client, Server, served


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with served(tmp_path) as found:
        yield found


async def sampler_of(client: Client, session: str, number: int = 0, **origin: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": number, **(origin or {"base_model": BASE})}
    return str((await client.post("create_sampling_session", body))["sampling_session_id"])


def wanted(sampler: str, seq: int = 0, *, num: int = 1, **params: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": num,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]},
        "sampling_params": {"max_tokens": 4, **params},
        "prompt_logprobs": True,
    }


async def test_a_sample_is_a_future_and_its_result_is_read_as_json_and_as_protobuf(server: Server) -> None:
    alice = server.alice
    sampler = await sampler_of(alice, await alice.open())
    future = await alice.post("asample", wanted(sampler, num=2, seed=5))
    assert len(set(future["sample_sequence_ids"])) == 2
    told = await alice.done(future)
    assert [each["tokens"] for each in told["sequences"]] == [[11, 12, 13, 14], [12, 13, 14, 15]]
    assert {each["stop_reason"] for each in told["sequences"]} == {"length"}
    assert told["prompt_logprobs"] == [None, -1.0, -1.0]
    packed = await alice.result(future, accept=tinker.MEDIA_TYPE)
    assert packed.headers["content-type"] == tinker.MEDIA_TYPE
    read = deserialize_sample_response(packed.content)
    assert [list(each.tokens) for each in read.sequences] == [each["tokens"] for each in told["sequences"]]
    assert read.prompt_logprobs == [None, -1.0, -1.0]
    assert await alice.post("asample", wanted(sampler, num=2, seed=5)) == future
    await alice.post("asample", wanted(sampler, num=2, seed=6), status=422)


async def test_what_is_asked_about_a_prompt_is_answered_in_the_layout_of_the_question(server: Server) -> None:
    alice = server.alice
    sampler = await sampler_of(alice, await alice.open())
    dense: dict[str, Any] = {"data": [7, -1, 3, 4], "dtype": "int64", "shape": [2, 2]}
    sparse: dict[str, Any] = {
        "data": [7],
        "dtype": "int64",
        "shape": [2, 9],
        "sparse_crow_indices": [0, 0, 1],
        "sparse_col_indices": [5],
    }
    for seq, named in enumerate((dense, sparse)):
        more = {"target_prompt_logprobs": named, "prompt_alt_tokens_k": 3, "prompt_logprobs_last_n": 1}
        future = await alice.post("asample", wanted(sampler, seq) | more)
        told = await alice.done(future)
        data = [0.0 if each < 0 else -1.0 for each in named["data"]]
        assert told["target_prompt_logprobs"] == named | {"data": data, "dtype": "float32"}
        assert told["prompt_logprobs"] == [None, None, -1.0]
        assert told["prompt_alt_tokens"]["tokens"] == {"data": [0, 1, 2, 3, 4, 5], "dtype": "int64", "shape": [2, 3]}
        packed = deserialize_sample_response((await alice.result(future, accept=tinker.MEDIA_TYPE)).content)
        assert packed.target_prompt_logprobs is not None
        assert packed.prompt_alt_tokens is not None
        read = packed.target_prompt_logprobs
        assert (list(read.data), list(read.shape or ())) == (data, named["shape"])
        assert read.sparse_crow_indices == named.get("sparse_crow_indices")
        assert list(packed.prompt_alt_tokens.tokens.data) == [0, 1, 2, 3, 4, 5]


async def test_a_sampler_is_the_model_as_it_was_at_its_place(server: Server) -> None:
    alice = server.alice
    session = await alice.open()
    steps = [
        await alice.post("forward_backward", alice.batch(1)),
        await alice.post("optim_step", alice.step(2)),
        await alice.post(
            "save_weights_for_sampler", {"model_id": alice.model, "seq_id": 3, "sampling_session_seq_id": 0}
        ),
        await alice.post("save_weights_for_sampler", {"model_id": alice.model, "seq_id": 4, "path": "kept"}),
        await alice.post("forward_backward", alice.batch(5)),
        await alice.post("optim_step", alice.step(6, 1.0)),
    ]
    results = [await alice.done(each) for each in steps]
    assert results[2] == {"type": "save_weights_for_sampler", "sampling_session_id": f"{session}:sample:0"}
    path = f"tinker://{alice.model}/sampler_weights/kept"
    assert results[3] == {"type": "save_weights_for_sampler", "path": path}
    saved = await sampler_of(alice, session, 1, model_path=path)
    base = await sampler_of(alice, session, 2)
    logprobs = []
    for sampler in (f"{session}:sample:0", saved, base):
        told = await alice.done(await alice.post("asample", wanted(sampler)))
        logprobs.append(told["sequences"][0]["logprobs"][0])
    assert logprobs[0] == logprobs[1] == np.float32(-1.0 - results[1]["metrics"]["weight"])
    assert logprobs[2] == -1.0
    kept = {"sampler_id": saved, "base_model": BASE, "model_path": path, "kind": "snapshot"}
    assert await alice.get(f"samplers/{saved}") == kept
    assert (await alice.get(f"sessions/{session}"))["sampler_ids"] == [f"{session}:sample:0", saved, base]


async def test_samplers_of_others_and_weights_that_are_not_there_do_not_exist(server: Server) -> None:
    alice, bob = server.alice, server.bob
    session = await alice.open()
    sampler = await sampler_of(alice, session)
    await bob.get(f"samplers/{sampler}", status=404)
    await bob.post("asample", wanted(sampler), status=404)
    missing = {"session_id": session, "sampling_session_seq_id": 7, "model_path": f"tinker://{alice.model}/weights/no"}
    await alice.post("create_sampling_session", missing, status=404)
    await alice.post("create_sampling_session", missing | {"model_path": None, "base_model": "other"}, status=400)


async def test_what_cannot_be_sampled_is_refused_in_words(server: Server) -> None:
    alice = server.alice
    sampler = await sampler_of(alice, await alice.open())
    image = {"chunks": [{"type": "image", "data": "x", "format": "png"}]}
    for wrong, words in (
        ({"prompt": image}, "samples from tokens"),
        ({"prompt": {"chunks": []}}, "has no tokens"),
        ({"prompt": {"chunks": [{"tokens": [1] * 40_000}]}}, "has 40000 tokens, and a rank has room for 32768"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 3}, "is 1 to 2 for this prompt"),
        ({"prompt_logprobs_last_n": 1, "prompt_logprobs": False}, "needs prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2]}}, "int64 of [2, K]"),
        ({"target_prompt_logprobs": {"data": [1.0], "dtype": "float32", "shape": [1, 1]}}, "int64 of [2, K]"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1]}}, "has 1 numbers"),
        ({"target_prompt_logprobs": {"data": [1, -2], "dtype": "int64", "shape": [2, 1]}}, "no token"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"prompt": {"chunks": [{"tokens": [1] * 9_000}]}, "topk_prompt_logprobs": 1024}, "could have 70 MiB"),
        ({"num_samples": 1024, "topk_sample_logprobs": 1024, "sampling_params": {"max_tokens": 9}}, "have 72 MiB"),
        ({"num_samples": 1024, "sampling_params": {"max_tokens": 2**31 - 1}}, "up to 32766 tokens each"),
        ({"sampling_session_id": None}, "sampling session"),
    ):
        refused = await alice.post("asample", wanted(sampler) | wrong, status=400)
        assert words in refused["error"]["message"]


async def test_a_full_queue_says_429_and_a_sample_can_be_given_up_while_it_is_drawn(tmp_path: Path) -> None:
    limits = "[sampling]\nmax_pending_requests = 1\nmax_running_requests = 1\nslice_steps = 1\n"
    async with served(tmp_path, limits=limits) as server:
        alice = server.alice
        sampler = await sampler_of(alice, await alice.open())
        long = await alice.post("asample", wanted(sampler, max_tokens=1_000_000))
        waiting = await alice.post("asample", wanted(sampler, 1, max_tokens=1), status=200)
        status = 200
        for seq in range(2, 6):
            reply = await alice.send("POST", "/api/v1/asample", json=wanted(sampler, seq, max_tokens=1))
            status = max(status, reply.status_code)
        assert status == 429
        await alice.post("cancel_future", {"request_id": long["request_id"]}, status=204)
        assert (await alice.done(long))["category"] == "user"
        assert len((await alice.done(waiting))["sequences"]) == 1
