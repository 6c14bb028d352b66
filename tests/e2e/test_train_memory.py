"""Passes beyond the memory of the ranks, with real ranks under a limit: their clients are told tokens and limit, the
operations of other tenants all end as they should, and the group of ranks starts again once at most."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import httpx
import pytest

from soak.train.server import START_S, ServeOptions, ServeProcess, serving
from strata.base.errors import StrataError
from strata.sdk.train import Datum, Model, TrainingServer
from tests.support.unix import short_path

pytestmark = pytest.mark.timeout(600)
DATA_BYTES: Final = 1_200_000_000
"""What a rank may allocate: about half of it is taken when the model is loaded."""
LONG: Final = 16_000
STEPS: Final = 3
_MODEL: Final = """
import sys
from pathlib import Path
from strata.train.runner.model.tiny import TinyModel, make
make(Path(sys.argv[1]), TinyModel(vocabulary=8192, hidden=128, context=100_000))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "model"
    subprocess.run([sys.executable, "-c", _MODEL, str(folder)], check=True, timeout=START_S)
    return folder


def limited(folder: Path, model: Path) -> AbstractAsyncContextManager[ServeProcess]:
    return serving(folder / "s", model, "real", options=ServeOptions(data_bytes=DATA_BYTES))


async def other_key(server: ServeProcess) -> str:
    token = (server.settings.data / "operator.token").read_text(encoding="utf-8").strip()
    with short_path(server.settings.api_socket) as path:
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as http:
            body = {"name": "bob", "role": "researcher"}
            made = await http.post("/v1/keys", json=body, headers={"X-Operator-Token": token})
            return str(made.raise_for_status().json()["secret"])


def datum(tokens: int) -> Datum:
    content = [place % 500 for place in range(tokens)]
    return Datum(content, content)


def train(model: Model) -> list[float]:
    losses = []
    for _ in range(STEPS):
        passed = model.forward_backward([datum(40)])
        stepped = model.optim_step(1e-3)
        losses.append(passed.result(START_S).loss)
        stepped.result(START_S)
    return losses


def overrun(server: ServeProcess, key: str) -> tuple[str, list[float]]:
    """What a tenant is told of a pass that does not fit, and the losses of another who trains meanwhile."""
    with TrainingServer(server.url, server.key) as one, TrainingServer(server.url, key) as two:
        greedy = one.create_model("tiny", rank=4, seed=1)
        modest = two.create_model("tiny", rank=4, seed=2)
        before = train(modest)
        too_long = greedy.forward_backward([datum(LONG)])
        losses = before + train(modest)
        with pytest.raises(StrataError) as caught:
            too_long.result(START_S)
        # The model of the one who asked for too much is unharmed.
        assert len(train(greedy)) == STEPS
        return caught.value.message, losses


def told(message: str) -> tuple[int, int]:
    """Tokens and limit."""
    numbers = [int(each.replace(",", "")) for each in re.findall(r"\d[\d,]+\d", message)]
    assert len(numbers) == 2, message
    return numbers[0], numbers[1]


async def test_a_pass_beyond_the_measured_limit_is_rejected_before_the_ranks_are_told(
    tmp_path: Path, model: Path
) -> None:
    async with limited(tmp_path, model) as server:
        message, losses = await asyncio.to_thread(overrun, server, await other_key(server))
        tokens, limit = told(message)
        assert tokens == LONG
        assert 1_000 < limit < LONG
        assert losses == sorted(losses, reverse=True)
        assert len(losses) == 2 * STEPS
        assert len(server.logged("ranks_ready")) == 1


async def test_ranks_that_run_out_inside_a_pass_start_again_once_and_others_lose_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator said that more fits than does."""
    monkeypatch.setenv("STRATA_MODEL_ROW_TOKENS", "90000")
    async with limited(tmp_path, model) as server:
        message, losses = await asyncio.to_thread(overrun, server, await other_key(server))
        tokens, limit = told(message)
        assert tokens == LONG
        assert 1_000 < limit < LONG
        assert losses == sorted(losses, reverse=True)
        assert len(losses) == 2 * STEPS
        assert len(server.logged("ranks_ready")) == 2
