"""An engine is spoken to at the address that it had, and its key goes to it alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.core.state import InferenceEndpoint
from strata.train.endpoints import client as client_module
from strata.train.endpoints import vllm
from strata.train.endpoints.client import EngineClient
from strata.train.endpoints.engine import ModelVersion
from strata.train.endpoints.vllm_completions import CompletionStream
from strata.train.inference_settings import InferenceSettings
from tests.shell.train_endpoints.hostile import hostile, is_silent, never_ends, says

OK = "HTTP/1.1 200 OK\nConnection: close"


@asynccontextmanager
async def speaking_to(url: str, address: str = "127.0.0.1", **more: Any) -> AsyncIterator[EngineClient]:
    endpoint = InferenceEndpoint("engine", url, address, "vllm", 0.0)
    client = EngineClient(endpoint, InferenceSettings(allow=(url,), **more))
    try:
        yield client
    finally:
        await client.close()


async def test_only_the_address_that_it_had_is_connected_to_whatever_its_name_means_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name cannot even be looked up, and a proxy of the environment is not asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with hostile(says(OK, b"{}")) as engine:
        url = f"http://engine.invalid:{engine.port}"
        async with speaking_to(url) as client:
            assert (await client.get("/v1/models", timeout_s=5)).status == 200
        assert f"Host: engine.invalid:{engine.port}".encode() in engine.heard[0]


async def test_what_the_settings_do_not_allow_any_more_is_not_spoken_to() -> None:
    with pytest.raises(StrataError) as refused:
        EngineClient(
            InferenceEndpoint("engine", "http://127.0.0.1:8000", "127.0.0.1", "vllm", 0.0), InferenceSettings()
        )
    assert refused.value.code is Code.FORBIDDEN


async def test_a_key_comes_from_its_file_and_goes_to_its_engine_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text("a-secret-of-the-engine\n")
    async with hostile(says("HTTP/1.1 401 Unauthorized\nConnection: close")) as engine:
        async with speaking_to(engine.url, keys={engine.url: file}) as client:
            await client.get("/v1/models", timeout_s=5)
        async with speaking_to(engine.url, keys={"http://127.0.0.1:1": file}) as client:
            await client.get("/v1/models", timeout_s=5)
        assert b"Authorization: Bearer a-secret-of-the-engine\r\n" in engine.heard[0]
        assert b"Authorization" not in engine.heard[1]
        file.chmod(0o644)
        async with speaking_to(engine.url, keys={engine.url: file}) as client:
            with pytest.raises(StrataError, match="can be read by group or others") as refused:
                await client.get("/v1/models", timeout_s=5)
        assert "a-secret" not in str(refused.value)
        assert len(engine.heard) == 2


async def test_a_key_is_not_sent_where_others_could_read_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text("a-secret-of-the-engine\n")
    url = "http://engines.example:8000"
    async with speaking_to(url, "192.0.2.1", keys={url: file}) as client:
        with pytest.raises(StrataError, match="the connection is not encrypted"):
            await client.get("/v1/models", timeout_s=5)


async def test_a_stream_may_be_longer_than_any_reply_and_a_line_of_it_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_REPLY", 200_000)
    sent = [b"%d " % place * (place % 7) for place in range(200_000)]
    lines: list[bytes] = []
    async with hostile(says(OK, b"\n".join([*sent, b"rest"]))) as engine, speaking_to(engine.url) as client:
        reply = await client.post("/v1/completions", {}, timeout_s=20, read_line=lines.append)
    assert lines == sent
    assert reply.content == b"rest"
    async with hostile(never_ends) as engine, speaking_to(engine.url) as client:
        with pytest.raises(StrataError, match="replies with more than 200000 bytes"):
            await client.post("/v1/completions", {}, timeout_s=20, read_line=lines.append)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_stream_of_samples_that_were_not_requested_is_an_error(index: int) -> None:
    sample = SampleOperation("sampler", 0, bytes(4), SampleParams(max_tokens=3), num_samples=2)
    stream = CompletionStream(sample, lambda _: None)
    stream.read_line(b'data: {"model": "m", "choices": [{"index": 1}]}')
    with pytest.raises(StrataError, match="more than was requested"):
        stream.read_line(b'data: {"model": "m", "choices": [{"index": %d}]}' % index)


async def test_an_engine_has_the_time_of_the_settings_for_weights_and_for_a_sample(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    version = ModelVersion("run-v1", tmp_path, full=False)
    sample = SampleOperation("sampler", 0, bytes(4), SampleParams(max_tokens=3))
    async with hostile(is_silent) as silent:
        settings = InferenceSettings(allow=(silent.url,), push_timeout_s=0.1, sample_timeout_s=0.1)
        endpoint = InferenceEndpoint("engine", silent.url, "127.0.0.1", "vllm", 0.0)
        engine = vllm.VllmEngine(EngineClient(endpoint, settings), settings)
        async with asyncio.timeout(10):
            with pytest.raises(StrataError):
                await engine.load_version(version)
            with pytest.raises(StrataError):
                await engine.sample(version, sample, 1, lambda _: None)
        await engine.close()
