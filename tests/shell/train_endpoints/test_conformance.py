"""The fake engine keeps what real ones keep (tests/engines), and so may stand for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from strata.base.errors import StrataError
from strata.train.core.state import InferenceEndpoint
from strata.train.endpoints.client import EngineClient
from strata.train.endpoints.engine import ModelVersion, stale_versions
from strata.train.endpoints.vllm import VllmEngine
from strata.train.inference_settings import InferenceSettings
from tests.engines.conformance import (
    SAMPLERS,
    SLEEPERS,
    WHOLE,
    Case,
    an_engine_that_reports_other_log_probabilities_draws_only_what_it_reports,
)
from tests.support.fake_vllm import BASE, FakeVllm, decode, logits, weights_digest


def weights(folder: Path, text: str) -> Path:
    folder.mkdir()
    for name in ("adapter_config.json", "config.json"):
        (folder / name).write_text("{}")
    (folder / "adapter_model.safetensors").write_text(text)
    return folder


@pytest.fixture(params=[False, True])
async def case(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    async with fake_case(tmp_path, whole=request.param) as found:
        yield found


@asynccontextmanager
async def fake_case(tmp_path: Path, *, whole: bool, processed: bool = True) -> AsyncIterator[Case]:
    first, second = (ModelVersion(f"run-v{n}", weights(tmp_path / str(n), f"weights {n}"), full=whole) for n in (1, 2))
    async with FakeVllm(processed=processed) as fake:
        settings = InferenceSettings(allow=(fake.url,))
        client = EngineClient(InferenceEndpoint("e", fake.url, "127.0.0.1", "vllm", 0.0), settings)
        engine = VllmEngine(client, settings)

        async def ask(version: ModelVersion) -> list[int]:
            body = {"model": BASE if whole else version.name, "prompt": [1], "max_tokens": 4, "n": 1, "temperature": 0}
            async with httpx.AsyncClient() as http:
                reply = await http.post(f"{fake.url}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            tokens: list[int] = reply.json()["choices"][0]["token_ids"]
            return tokens

        def after(version: ModelVersion, tokens: Sequence[int]) -> list[float]:
            return [float(each) for each in logits(weights_digest(version.folder), tokens[-1])]

        try:
            yield Case(engine, first, second, ask, after, decode)
        finally:
            await engine.close()


@pytest.mark.parametrize("check", [*SAMPLERS, *SLEEPERS])
async def test_the_suite_of_engines(case: Case, check: Callable[[Case], Awaitable[None]]) -> None:
    if case.first.full and check not in (*WHOLE, *SLEEPERS):
        return
    await check(case)


async def test_an_engine_of_somebody_with_other_log_probabilities_is_found_out(tmp_path: Path) -> None:
    async with fake_case(tmp_path, whole=False, processed=False) as case:
        await an_engine_that_reports_other_log_probabilities_draws_only_what_it_reports(case)


async def test_an_engine_that_stays_awake_has_not_slept() -> None:
    """A status of 200 is not enough."""
    async with FakeVllm() as fake:
        settings = InferenceSettings(allow=(fake.url,))
        engine = VllmEngine(
            EngineClient(InferenceEndpoint("e", fake.url, "127.0.0.1", "vllm", 0.0), settings), settings
        )
        fake.insomniac = True
        with pytest.raises(StrataError, match="is awake"):
            await engine.sleep()
        await engine.close()


def test_versions_are_compared_by_their_number_and_only_within_their_run() -> None:
    names = ["a-v9", "a-v10", "a-v2", "b-v1", "a-vx", "a-v-1", "tiny", "aa-v1"]
    assert stale_versions(names, "a-v11", 2) == ["a-v2", "a-v9"]
    assert stale_versions(names, "a-v1", 9) == []
