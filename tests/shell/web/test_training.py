"""The pages of training servers, of a hub and a real training server behind it."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from strata.fleet.core.jobspec import JobSpec
from strata.sdk.train import Datum, TrainingServer
from strata.train.core.commands import Timing
from strata.train.status.reports import Timeline
from strata.web.pages.training import phase_lanes, token_shares
from tests.shell.fleet_http.running import Running
from tests.shell.fleet_http.test_servers import row, serve, sleeping
from tests.shell.train_api.processes import Processes, serving
from tests.shell.web.browsing import HTML, SAME_ORIGIN, Browser, log_in

TOKENS = list(range(20))
STEPS = 3


def train(processes: Processes) -> str:
    """The id of a model that was trained for a little while."""
    with TrainingServer(processes.url, processes.key) as server:
        model = server.create_model("tiny", rank=4)
        for step in range(STEPS):
            model.report(reward=step / 2)
            model.forward_backward([Datum(TOKENS[:-1], TOKENS[1:])])
            model.optim_step(learning_rate=1e-3).result()
        model.save("kept").result()
        return model.model_id


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one, for sockets."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
async def trained(site: Running, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """A server of the hub that has trained a model: the job, and the model."""
    job = await serve(site, path=folder / "data" / "run" / "api")
    key = site.hub.context.front_key(job, (await row(site, job)).epoch)
    with ExitStack() as stack:
        starting = serving(folder, Path("pretended"), server=f'front_key = "{key}"', pretended=True)
        processes = await asyncio.to_thread(stack.enter_context, starting)
        yield job, await asyncio.to_thread(train, processes)


async def test_the_page_of_a_server_shows_its_work_to_those_who_may_see_it(
    site: Running, trained: tuple[str, str]
) -> None:
    job, model = trained
    olga = Browser(await site.operator())
    listed = await olga.shows("/training")
    assert f'href="/training/{job}"' in listed
    shown = await olga.shows(f"/training/{job}")
    for part in (model, "kept", "optimizer", "No group of ranks was lost", "No inference engine"):
        assert part in shown, part
    plots = re.findall(r'data-src="([^"]*)" data-unit="[^"]*" data-names="([^"]*)"', shown)
    assert [name for _, name in plots][:3] == ["", "loss", "reward"]
    for src, name in plots:
        drawn = (await olga.http.get(src)).json()
        values = [each["values"] for each in drawn["series"] if each["name"] == name] if name else [drawn["points"]]
        assert len(values) == 1
        assert not name or len(values[0]) == STEPS
    other = await (await log_in(site, "researcher")).shows(f"/training/{job}")
    assert model not in other, "the model of another tenant"
    assert "No operation has come" in other


def test_a_server_without_a_hub_shows_the_same_page(folder: Path) -> None:
    starting = serving(folder, Path("pretended"), pretended=True, api="strata.cli.serve.api_process")
    with starting as processes, httpx.Client(base_url=processes.url, headers=HTML, timeout=30) as http:
        model = train(processes)
        asked = http.get("/")
        assert (asked.status_code, asked.headers["location"]) == (303, "/login")
        assert http.get("/api/v1/status").status_code == 401, "programs get their own refusal"
        assert http.post("/login", data={"key": "tml-no-key"}, headers=SAME_ORIGIN).status_code == 403
        assert http.post("/login", data={"key": processes.key}, headers=SAME_ORIGIN).status_code == 303
        shown = http.get("/")
        assert shown.status_code == 200, shown.text
        assert (model in shown.text, 'href="/training' in shown.text, 'href="/jobs' in shown.text) == (
            True,
            False,
            False,
        )
        for src in re.findall(r'data-src="([^"]*)"', shown.text):
            assert http.get(src).status_code == 200, src
        assert http.post("/api/v1/create_session", json={}).status_code == 401, "a cookie changes nothing in the API"


async def test_a_server_that_sleeps_or_does_not_reply_says_so(site: Running) -> None:
    vera = await log_in(site, "viewer")
    assert "has no training server" in await vera.shows("/training")
    asleep, gone = await sleeping(site, "a"), await serve(site, "b")
    listed = await vera.shows("/training")
    assert ("asleep" in listed, "serving, no reply" in listed) == (True, True)
    assert "It sleeps." in await vera.shows(f"/training/{asleep}")
    assert "cannot be reached" in await vera.shows(f"/training/{gone}")
    assert (await row(site, asleep)).state == "asleep"
    (plain,) = await site.add(JobSpec(model="m"))
    assert (await vera.get(f"/training/{plain}")).status_code == 404


def line(number: int, tenant: str, tokens: int, begin_s: float) -> Timeline:
    return Timeline(
        future_id=f"{tenant}:{number}",
        tenant=tenant,
        model_id=tenant,
        kind="forward_backward",
        tokens=tokens,
        number=number,
        outcome="finished",
        accepted_at_s=begin_s,
        ready_at_s=begin_s,
        dispatched_at_s=begin_s + 2,
        sent_at_s=begin_s + 3,
        begun_at_s=begin_s + 3,
        answered_at_s=begin_s + 10,
        ended_at_s=begin_s + 10,
        spent=Timing(7.0, forward_s=2.0, backward_s=5.0),
    )


def test_what_operations_of_one_dispatch_share_is_drawn_once() -> None:
    lanes = phase_lanes([line(1, "a", 30, 100.0), line(1, "b", 10, 100.0)], 120.0)
    assert lanes is not None
    drawn = {lane.phase: [(round(bar.x), round(bar.width)) for bar in lane.bars] for lane in lanes.lanes}
    assert drawn == {
        "queue": [(0, 200)] * 2, "pack": [(200, 100)] * 2, "forward": [(300, 200)], "backward": [(500, 500)],
        "optimizer": [], "publish": [],
    }  # fmt: skip
    assert token_shares([line(1, "a", 30, 1.0), line(1, "b", 10, 1.0)]) == {"a": 0.75, "b": 0.25}
    assert phase_lanes([], 1.0) is None
    late = phase_lanes([line(1, "a", 1, 0.0), line(2, "a", 1, 5000.0)], 6000.0)
    assert late is not None
    assert late.end_s - late.begin_s == 600, "a pause of hours does not squeeze what came last"
