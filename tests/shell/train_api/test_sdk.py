"""`strata.sdk.train` through the API server and the orchestrator to ranks that pretend."""

from __future__ import annotations

import array
import asyncio
import http.server
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.identity.ca import Authority
from strata.sdk.train import Datum, TrainingServer
from tests.shell.train_api.test_protocol import BASE, Server, listening, served

BATCH = [Datum([1, 2, 3], [2, 3, 4]), Datum([5, 6], [6, 7], weights=[0.5, -1.0])]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with served(tmp_path) as found:
        yield found


def train(url: str, key: str) -> tuple[float, float, list[int], str]:
    with TrainingServer(url, key) as service:
        model = service.create_model(BASE, rank=4, seed=1)
        first = model.forward_backward(BATCH)
        step = model.optim_step(1e-3, weight_decay=0.1)
        saved = model.save("one")
        after = model.forward(BATCH)
        assert step.result()["step"] == 1
        again = service.load_model(saved.result())
        assert again.forward(BATCH).result().loss == after.result().loss
        lengths = [len(each) for each in first.result().logprobs]
        return first.result().loss, after.result().loss, lengths, model.model_id


async def test_a_blocking_client_trains(server: Server) -> None:
    async with listening(server.root) as url:
        first, after, lengths, model_id = await asyncio.to_thread(train, url, server.alice.key)
    assert lengths == [3, 2]
    assert first != after
    sessions = await server.alice.get("session_info")
    assert [each["finished"] for each in sessions["sessions"]] == ["success"]
    assert model_id.endswith(":train:0")


def reload_scaled(url: str, key: str) -> str:
    with TrainingServer(url, key) as service:
        first = service.create_model(BASE, rank=4, alpha=8.0).save("first").result()
        return service.load_model(first).save("second").result()


async def test_a_model_that_goes_on_from_a_checkpoint_has_its_scale(server: Server) -> None:
    async with listening(server.root) as url:
        path = await asyncio.to_thread(reload_scaled, url, server.alice.key)
    info = await server.alice.post("weights_info", {"tinker_path": path})
    assert (info["lora_rank"], info["lora_alpha"]) == (4, 8.0)


def sampled(url: str, key: str) -> tuple[list[list[int]], list[float], list[float | None], str]:
    """Tokens, the log probability of the first token by copy, saved weights and base, and those of a prompt."""
    with TrainingServer(url, key) as service:
        model = service.create_model(BASE, rank=4, seed=1)
        model.forward_backward(BATCH)
        model.optim_step(1.0)
        copy, path = model.sampler(), model.save_for_sampling("kept")
        samplers = [copy.result(), service.sampler(path=path.result()), service.sampler(BASE)]
        found = [each.sample([1, 2, 3], 2, max_tokens=4, seed=5, stop=[]).result() for each in samplers]
        tokens = [list(each.tokens) for each in found[0]]
        assert {each.stop_reason for each in found[0]} == {"length"}
        return (
            tokens,
            [each[0].logprobs[0] for each in found],
            list(samplers[2].logprobs([1, 2, 3]).result()),
            path.result(),
        )


async def test_a_blocking_client_samples_from_a_model_from_saved_weights_and_from_the_base(server: Server) -> None:
    async with listening(server.root) as url:
        tokens, (copy, saved, base), prompt, path = await asyncio.to_thread(sampled, url, server.alice.key)
    assert len(tokens) == 2
    assert [len(each) for each in tokens] == [4, 4]
    assert copy == saved != base
    assert prompt == [None, -1.0, -1.0]
    assert path.endswith("/sampler_weights/kept")


async def test_a_client_asks_often_at_once_and_a_prompt_without_tokens_is_refused(server: Server) -> None:
    def sample_twice(url: str, key: str) -> list[list[list[int]]]:
        with TrainingServer(url, key) as service:
            sampler = service.sampler(BASE)
            futures = [sampler.sample([1, 2, 3], 2, max_tokens=4, seed=5, stop=[]) for _ in range(2)]
            with pytest.raises(StrataError, match="prompt: has no tokens"):
                sampler.sample([])
            return [[list(each.tokens) for each in future.result()] for future in futures]

    async with listening(server.root) as url:
        first, second = await asyncio.to_thread(sample_twice, url, server.bob.key)
    assert first == second


async def test_whoever_waits_is_told_where_it_stands_and_may_stop_waiting(server: Server) -> None:
    told: list[str] = []

    def wait(url: str, key: str) -> None:
        with TrainingServer(url, key) as service:
            slow = service.create_model(BASE, rank=4).forward_backward(BATCH, pretend_s=1.5)
            with pytest.raises(StrataError) as late:
                slow.result(timeout_s=0.2)
            assert late.value.code is Code.DEADLINE
            slow.result(progress=told.append)

    async with listening(server.root) as url:
        await asyncio.to_thread(wait, url, server.alice.key)
    assert "running" in told


async def test_a_failed_operation_is_raised_in_words_and_the_next_one_goes_on(server: Server) -> None:
    def fail(url: str, key: str) -> None:
        with TrainingServer(url, key) as service:
            model = service.create_model(BASE, rank=4)
            bad = model.forward_backward([Datum([1, 2], [3])])
            with pytest.raises(StrataError, match=r"data\[0\].loss_fn_inputs.target_tokens: has the shape") as failed:
                bad.result()
            assert failed.value.code is Code.INVALID
            with pytest.raises(StrataError, match="do not fit"):
                model.forward_backward([Datum([2**40], [3])])
            assert model.optim_step(1e-3).result()["step"] == 1
        with pytest.raises(StrataError) as refused, TrainingServer(url, "tml-wrong") as stranger:
            stranger.sessions()
        assert refused.value.code is Code.UNAUTHENTICATED

    async with listening(server.root) as url:
        await asyncio.to_thread(fail, url, server.alice.key)


def test_the_sdk_imports_nothing_of_the_servers() -> None:
    code = "import sys, strata.sdk.train; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    for name in ("torch", "numpy", "google", "zmq", "fastapi", "transformers", "tinker"):
        assert f"'{name}'" not in found


def test_numbers_of_other_kinds_are_taken() -> None:
    wide: Callable[[], Any] = lambda: array.array("q", [1, 2, 3])  # noqa: E731
    assert Datum(wide(), wide()).wire() == Datum([1, 2, 3], [1, 2, 3]).wire()


async def test_after_a_crash_another_client_finds_the_session_and_goes_on_with_its_model(server: Server) -> None:
    def begin(url: str, key: str) -> tuple[str, str, str]:
        dead = TrainingServer(url, key).__enter__()
        model = dead.create_model(BASE, rank=4, seed=1)
        model.forward_backward(BATCH)
        assert model.optim_step(0.1).result()["step"] == 1
        kept = model.sampler().result().sampler_id
        dead._http.close()
        return dead.session_id, model.model_id, kept

    def go_on(url: str, key: str, session_id: str, model_id: str) -> str:
        with TrainingServer(url, key) as service:
            session = next(each for each in service.sessions() if each["session_id"] == session_id)
            assert (session["finished"], session["models"]) == (None, [model_id])
            again = service.attach(model_id)
            assert again.forward_backward(BATCH).result().loss != 0
            # Numbers 4 and 5 are used: this is the sixth operation, and the second step.
            step = again.optim_step(0.1)
            assert step.request_id == f"{model_id}:6"
            assert step.result()["step"] == 2
            newer = again.sampler().result().sampler_id
            service.close_session(session_id)
            session = next(each for each in service.sessions() if each["session_id"] == session_id)
            assert session["finished"] == "killed"
            with pytest.raises(StrataError) as gone:
                service.attach(model_id).optim_step(0.1)
            assert gone.value.code is Code.GONE
            return newer

    async with listening(server.root) as url:
        session_id, model_id, kept = await asyncio.to_thread(begin, url, server.alice.key)
        # It died when number 4 was on its way and number 5 had come.
        server.alice.model = model_id
        held = await server.alice.post("forward_backward", server.alice.batch(5))
        newer = await asyncio.to_thread(go_on, url, server.alice.key, session_id, model_id)
        assert "error" not in await server.alice.done(held)
    assert newer != kept


async def test_a_model_of_another_key_cannot_be_attached_to(server: Server) -> None:
    def attach(url: str, one: str, two: str) -> None:
        with TrainingServer(url, one) as service, TrainingServer(url, two) as other:
            model = service.create_model(BASE, rank=4)
            with pytest.raises(StrataError) as unknown:
                other.attach(model.model_id)
            assert unknown.value.code is Code.NOT_FOUND
            assert [each["models"] for each in other.sessions()] == [[]]

    async with listening(server.root) as url:
        await asyncio.to_thread(attach, url, server.alice.key, server.bob.key)


def test_a_program_that_starts_before_the_server_is_told_to_start_it(tmp_path: Path) -> None:
    missing = tmp_path / "strata-train" / "api.key"
    with pytest.raises(StrataError, match=f"there is no key in {missing}") as refused:
        TrainingServer("http://127.0.0.1:5555", missing)
    assert "strata serve CONFIG" in (refused.value.hint or "")


async def test_a_key_may_be_a_file(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "api.key"
    file.write_text(f"{server.alice.key}\n")

    def count_sessions(url: str) -> int:
        with TrainingServer(url, file) as service:
            return len(service.sessions())

    async with listening(server.root) as url:
        assert await asyncio.to_thread(count_sessions, url) == 1


def test_a_server_with_a_certificate_of_an_own_authority_is_trusted_by_its_file(tmp_path: Path) -> None:
    authority = Authority.load_or_create(tmp_path / "ca", "test", SystemClock().wall_s())
    key, certificate = authority.issue_server(["127.0.0.1"], SystemClock().wall_s())
    (tmp_path / "server.pem").write_bytes(key + certificate)
    (tmp_path / "ca.pem").write_bytes(authority.certificate_pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as listener:
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
        threading.Thread(target=listener.serve_forever).start()
        url = f"https://127.0.0.1:{listener.server_address[1]}"
        try:
            # The handler knows no method: 501 is its reply to a client that trusts it.
            assert TrainingServer(url, "tml-key", ca=tmp_path / "ca.pem")._http.get("/").status_code == 501
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                TrainingServer(url, "tml-key")._http.get("/")
        finally:
            listener.shutdown()
    with pytest.raises(StrataError, match="cannot be read as a certificate authority"):
        TrainingServer(url, "tml-key", ca=tmp_path / "nothing.pem")
