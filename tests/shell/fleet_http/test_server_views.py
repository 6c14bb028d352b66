"""The training servers of a hub, for people who look: nothing is woken or kept awake, and roles see what they may."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.servers import ServersReply
from tests.shell.fleet_http.running import Running, ok, refused, replying
from tests.shell.fleet_http.test_servers import LONG_AGO_S, row, serve, sleeping

STATUS = {
    "now_s": 1.0, "ranks": {"state": "ready", "size": 2, "reason": ""}, "models": 3, "slots": 8, "waiting": 4,
    "samples_waiting": 0, "samples_running": 1, "trained_tokens_per_s": 12.5, "sampled_tokens_per_s": 0.0,
    "recoveries": 1, "tenants": [{"tenant": "key:anna", "waiting": 4}], "more": "of a newer server",
}  # fmt: skip


@pytest.mark.parametrize("nonsense", [b"nonsense", b'{"more": ' + b"[" * 50_000, b'{"\xff": 1}'], ids=range(3))
async def test_all_servers_are_listed_with_what_those_say_that_serve(
    site: Running, tmp_path: Path, nonsense: bytes
) -> None:
    asleep = await sleeping(site, "b")
    async with (
        replying(tmp_path / "a" / "s", msgspec.json.encode(STATUS)),
        replying(tmp_path / "c" / "s", nonsense),
    ):
        serving = await serve(site, "a", path=tmp_path / "a" / "s")
        silent = await serve(site, "c", path=tmp_path / "c" / "s")
        waits, _ = await site.add(JobSpec(kind="server", model="d", trainer="t"), JobSpec(model="no-server"))
        viewer = await site.with_role("viewer")
        entries = {each.job_id: each for each in ok(await viewer.get("/v1/servers"), ServersReply).servers}
    assert {job: each.state for job, each in entries.items()} == {
        serving: "serving", asleep: "asleep", silent: "serving", waits: "starting"
    }  # fmt: skip
    figures = entries[serving].figures
    assert figures is not None
    assert (figures.trained_tokens_per_s, figures.ranks.size, entries[serving].models) == (12.5, 2, ("a",))
    assert [entries[job].figures for job in (asleep, silent, waits)] == [None] * 3
    assert (await row(site, asleep)).state == "asleep", "looking wakes no server"
    assert (await row(site, serving)).used_at_s == LONG_AGO_S, "and keeps none awake"


async def test_an_operator_sees_all_tenants_and_others_see_themselves(site: Running, tmp_path: Path) -> None:
    heads: list[bytes] = []
    async with replying(tmp_path / "a" / "s", b'{"operations": []}', heads=heads):
        job = await serve(site, path=tmp_path / "a" / "s")
        for client in (await site.operator(), await site.with_role("researcher", "anna")):
            reply = await client.get(
                f"/v1/server/{job[:20]}/activity?operations=7", headers={"x-strata-sees-all": "yes"}
            )
            assert (reply.status_code, reply.json()) == (200, {"operations": []})
        await (await site.with_role("viewer", "vera")).get(f"/v1/server/{job}/run/session_1.a:train:0/curves?names=a,b")
    operator, anna, vera = (head.decode().lower() for head in heads)
    assert operator.startswith("get /api/v1/activity?operations=7 http/1.1")
    assert ("x-strata-sees-all: yes" in operator, "x-strata-tenant: %01" in operator) == (True, True)
    assert ("x-strata-sees-all" in anna, "x-strata-tenant: anna" in anna) == (False, True)
    assert vera.startswith("get /api/v1/training_runs/session_1.a:train:0/curves?points=500&names=a,b http/1.1")
    assert ("x-strata-role: viewer" in vera, "authorization" in vera + anna + operator) == (True, False)


async def test_a_server_that_does_not_serve_says_so(site: Running, tmp_path: Path) -> None:
    viewer = await site.with_role("viewer")
    job = await sleeping(site)
    reply = await viewer.get(f"/v1/server/{job}/status")
    assert (refused(reply), "is asleep" in reply.text) == ((409, "precondition"), True)
    assert refused(await viewer.get(f"/v1/server/job1_{'0' * 64}/status")) == (404, "not_found")
    gone = await serve(site, "gone")
    assert refused(await viewer.get(f"/v1/server/{gone}/status")) == (503, "unavailable")
    async with replying(tmp_path / "a" / "s", b"{}", b"404 Not Found"):
        old = await serve(site, "old", path=tmp_path / "a" / "s")
        assert refused(await viewer.get(f"/v1/server/{old}/activity")) == (404, "not_found")
