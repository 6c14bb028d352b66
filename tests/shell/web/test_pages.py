"""The pages as every browser gets them: headers, content, actions by role, errors, and hostile names that stay text."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import html
import re
import tomllib

import httpx
import pytest

from strata.fleet.core.jobspec import JobSpec
from strata.fleet.wire.identities import KeysReply
from strata.fleet.wire.jobs import JobReply, SubmitReply
from strata.web.assets import FOLDER, Assets
from strata.web.page import SECURITY_HEADERS
from tests.shell.fleet_http.running import HostClient, Running, ok
from tests.shell.web.browsing import Browser, Tags, log_in

MAX_ASSETS = 200_000
HOSTILE = (
    '"><xss-probe onxss=1>',
    "'><xss-probe onxss=1>",
    "</title></script></pre><xss-probe>",
    '" onxss="1" x="',
    "javascript:xss()",
    "{{ 7 * 191 }}<xss-probe>",
    "&lt;xss-probe&gt;<xss-probe/>",
)


async def queued(site: Running, browser_name: str, **spec: object) -> str:
    """A job of this owner."""
    researcher = await site.with_role("researcher", browser_name)
    trainer = {"name": "t", "command": ["true"], "bundle": "0" * 64}
    body = {"spec": {"model": "m", "trainer": "t", **spec}, "trainer": trainer}
    return ok(await researcher.post("/v1/jobs", json=body), SubmitReply).job.id


async def test_every_page_has_the_headers_that_keep_it_to_itself(site: Running) -> None:
    browser = await log_in(site, "viewer")
    job_id = await queued(site, "rosa")
    for path in ("/", "/jobs", f"/jobs/{job_id}", "/search?q=m", "/login", "/nowhere"):
        reply = await browser.get(path)
        for name, value in SECURITY_HEADERS.items():
            assert reply.headers[name] == value, path
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-content-type-options"] == "nosniff"
        for tag, attributes in Tags(reply.text).elements:
            assert "style" not in attributes, (path, tag)
            assert not any(name.startswith("on") for name in attributes), (path, tag)
            assert tag != "style"
            if tag == "script":
                assert attributes["src"].startswith("/static/")


async def test_a_page_loads_nothing_from_another_origin_and_everything_it_loads_is_there(site: Running) -> None:
    browser = await log_in(site, "viewer")
    loaded = [
        attributes.get("src") or attributes["href"]
        for tag, attributes in Tags(await browser.shows("/")).elements
        if tag in ("script", "link")
    ]
    assert len(loaded) >= 5
    for path in loaded:
        assert path.startswith("/static/")
        reply = await (await site.client()).get(path)
        assert reply.status_code == 200
        assert reply.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert reply.headers["content-encoding"] == "gzip"
        plain = await (await site.client()).get(path, headers={"Accept-Encoding": "identity"})
        assert plain.content == reply.content
        assert "content-encoding" not in plain.headers


def test_all_assets_are_small_and_modules_import_files_that_are_there() -> None:
    assets = Assets()
    compressed = sum(len(each.compressed) for each in assets.files)
    print(f"{len(assets.files)} assets, {sum(len(each.content) for each in assets.files)} B, {compressed} B compressed")
    assert compressed <= MAX_ASSETS
    names = {each.name for each in assets.files}
    for each in assets.files:
        assert gzip.decompress(each.compressed) == each.content
        if "/" not in each.name and each.name.endswith(".js"):
            imported = re.findall(r'from "\./([^"]+)"', each.content.decode())
            assert set(imported) <= names


def test_vendored_files_are_those_that_were_published() -> None:
    folder = FOLDER / "vendor"
    declared = tomllib.loads((folder / "VENDORED.toml").read_text(encoding="utf-8"))["files"]
    present = {path.name for path in folder.iterdir() if path.suffix in (".js", ".css")}
    assert declared.keys() == present
    for name, each in declared.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == each["sha256"], name
        assert each["version"]
        assert each["package"]
        assert (folder / each["licence_file"]).is_file()


async def test_an_empty_fleet_says_what_to_do_next(site: Running) -> None:
    browser = await log_in(site, "viewer")
    assert "strata invite" in await browser.shows("/")
    assert "strata apply" in await browser.shows("/jobs")
    assert "No job matches" in await browser.shows("/jobs?q=nothing")


async def test_jobs_are_filtered_and_shown_with_the_columns_of_the_url(site: Running) -> None:
    ids = await site.add(*(JobSpec(model="m", seed=seed, name=f"job-{seed}", priority=7) for seed in range(55)))
    browser = await log_in(site, "viewer")
    first = await browser.shows("/jobs")
    assert first.count('id="row-job1_') == 50
    (following,) = set(re.findall(r'href="(/jobs\?after=[^"]+)"', first))
    assert (await browser.shows(following)).count('id="row-job1_') == 5
    assert (await browser.shows("/jobs?q=job-7")).count('id="row-job1_') == 1
    assert (await browser.shows("/jobs?status=completed")).count('id="row-job1_') == 0
    page = await browser.shows("/jobs?q=job-7&columns=priority&columns=seed")
    assert 'data-label="Priority"' in page
    assert 'data-label="Owner"' not in page
    assert ids[0]


async def test_a_person_sees_the_actions_that_are_allowed_and_can_use_those(site: Running) -> None:
    job_id = await queued(site, "rosa")
    viewer, other = await log_in(site, "viewer"), await log_in(site, "researcher")
    rosa = await log_in(site, "researcher", "rosa")
    path = f"/jobs/{job_id}"
    assert f'action="{path}/cancel"' in await rosa.shows(path)
    for browser in (viewer, other):
        assert f'action="{path}/cancel"' not in await browser.shows(path)
        reply = await browser.post(f"{path}/cancel")
        assert reply.status_code == 403
        assert "text/html" in reply.headers["content-type"]
    asked = await rosa.post(f"{path}/cancel", question="Cancel it?", label="Cancel job", back=path)
    assert "Cancel it?" in asked.text
    assert ok(await rosa.http.get(f"/v1/job/{job_id}"), JobReply).job.status == "pending"
    done = await rosa.post(f"{path}/cancel", question="Cancel it?", confirmed="1")
    assert (done.status_code, done.headers["location"]) == (303, path)
    assert ok(await rosa.http.get(f"/v1/job/{job_id}"), JobReply).job.status == "cancelled"
    page = await rosa.shows(path)
    assert "cancelled" in page
    assert f'action="{path}/requeue"' in page
    assert (await rosa.post(f"{path}/requeue", confirmed="1")).status_code == 303
    assert ok(await rosa.http.get(f"/v1/job/{job_id}"), JobReply).job.status == "pending"


async def test_a_job_that_waits_says_why_in_the_words_of_the_command_line(site: Running) -> None:
    await site.host("anna", cores=1)
    job_id = await queued(site, "rosa", needs={"min_cores": 64})
    browser = await log_in(site, "viewer")
    page = await browser.shows(f"/jobs/{job_id}")
    why = (await browser.http.get(f"/v1/job/{job_id}/why")).json()
    assert "Why it waits" in page
    for each in why["obstacles"]:
        assert each["detail"] in page


async def attempted(host: HostClient, job_id: str, log: bytes, error: str) -> None:
    """One attempt of this job that fails with this log and error."""
    (lease,) = await host.claim(f"claim-{job_id[-12:]}")
    assert lease.job_id == job_id
    where = {"epoch": lease.epoch, "offset": 0}
    assert (await host.http.put(f"/v1/job/{job_id}/log", params=where, content=log)).status_code == 200
    body = {"epoch": lease.epoch, "cause": "user_error", "error": error}
    assert (await host.http.post(f"/v1/job/{job_id}/fail", json=body)).status_code == 200


async def test_hostile_names_stay_text_wherever_they_are_shown(site: Running) -> None:
    host = await site.host("anna")
    for hostile in HOSTILE:
        hyper = {hostile: hostile, "deep": {hostile: [hostile]}}
        (job_id,) = await site.add(JobSpec(model="m", name=hostile, hyper=hyper, max_attempts=1))
        await attempted(host, job_id, f"first {hostile}\nError: {hostile}\n".encode(), f"it broke: {hostile}")
        browser = await log_in(site, "researcher", f"o {hostile}".replace(":", "")[:60])
        await assert_harmless(browser, job_id, hostile)


async def assert_harmless(browser: Browser, job_id: str, hostile: str) -> None:
    paths = ["/", "/jobs", "/jobs?columns=owner&columns=sweep", f"/jobs/{job_id}", f"/jobs/{job_id}?against={job_id}"]
    shown = {path: await browser.shows(path) for path in paths}
    assert "first " in shown[f"/jobs/{job_id}"]
    assert hostile in html.unescape(shown["/jobs"])
    for path, query in (
        *(("/jobs", {name: hostile}) for name in ("q", "owner", "project", "sweep")),
        ("/search", {"q": hostile}),
        (f"/jobs/{job_id}", {"against": hostile}),
        (f"/{hostile}", {}),
        ("/login", {"code": hostile, "next": hostile}),
    ):
        shown[f"{path} {query}"] = (await browser.http.get(path, params=query, headers={"Accept": "text/html"})).text
    for path, text in shown.items():
        for tag, attributes in Tags(text).elements:
            assert tag != "xss-probe", path
            assert "onxss" not in attributes, path
            for name in ("href", "src", "action"):
                assert not attributes.get(name, "").startswith("javascript:"), path
        assert "1337" not in text


async def test_htmx_gets_the_content_alone_and_a_session_that_ended_is_led_to_the_login(site: Running) -> None:
    browser = await log_in(site, "viewer")
    whole, part = await browser.shows("/jobs"), await browser.shows("/jobs", **{"HX-Request": "true"})
    assert "<!doctype html>" in whole
    assert "<!doctype html>" not in part
    assert "<h1>Jobs</h1>" in part
    anybody = Browser(await site.client())
    reply = await anybody.get("/jobs", **{"HX-Request": "true"})
    assert (reply.status_code, reply.headers["hx-redirect"]) == (200, "/login")


async def test_an_error_is_a_page_for_browsers_and_json_for_programs(site: Running) -> None:
    browser = await log_in(site, "viewer")
    reply = await browser.get("/jobs/nothing")
    assert reply.status_code == 404
    assert "Not found" in reply.text
    assert (await browser.http.get("/jobs/nothing")).json()["error"]["code"] == "not_found"
    assert (await browser.get("/v1/job/nothing")).json()["error"]["code"] == "not_found"
    assert (await browser.get("/jobs?status=wrong")).status_code == 400
    assert (await browser.get("/jobs?unknown=1")).status_code == 400


async def test_the_log_of_an_attempt_is_shown_from_its_end_and_downloaded_whole(site: Running) -> None:
    host = await site.host("anna")
    (job_id,) = await site.add(JobSpec(model="m", max_attempts=1))
    lines = b"".join(b"line %06d\n" % n for n in range(20_000))
    await attempted(host, job_id, lines, "over")
    browser = await log_in(site, "viewer")
    page = await browser.shows(f"/jobs/{job_id}")
    assert "line 019999" in page
    assert "line 000000" not in page
    assert "The beginning is left out" in page
    reply = await browser.get(f"/jobs/{job_id}/log.txt?attempt=1")
    assert reply.content == lines
    assert reply.headers["content-disposition"].startswith("attachment;")
    tail = await browser.http.get(f"/v1/job/{job_id}/log", params={"tail": 12})
    assert tail.content == b"\nline 019999\n"[-12:]
    assert tail.headers["x-strata-offset"] == str(len(lines) - 12)


async def test_two_jobs_are_compared_and_what_differs_is_marked(site: Running) -> None:
    ids = await site.add(
        JobSpec(model="m", hyper={"rate": 0.1, "same": 1}), JobSpec(model="m", hyper={"rate": 0.2, "same": 1})
    )
    browser = await log_in(site, "viewer")
    page = await browser.shows(f"/jobs/{ids[0]}?against={ids[1][:20]}")
    rows = re.findall(r"<tr( class=\"diff-changed\")?><td class=\"name\">([^<]+)</td>", page)
    assert {name: bool(marked) for marked, name in rows if name.startswith("hyper")} == {
        "hyper.rate": True,
        "hyper.same": False,
    }
    assert "There is no job" in await browser.shows(f"/jobs/{ids[0]}?against=ffff")


async def test_many_viewers_of_a_page_cost_one_rendering(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []
    jobs = site.hub.context.fleet.store.jobs
    original = jobs.select

    async def counted(*arguments: object) -> object:
        rendered.append("jobs")
        await asyncio.sleep(0.05)
        return await original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "select", counted)
    viewers = [await log_in(site, "viewer") for _ in range(3)]
    pages = await asyncio.gather(*(each.shows("/jobs") for each in viewers * 5))
    # A login is an event: it may have been published in between. On a slow machine a rendering may be too old as well.
    assert 1 <= len(rendered) <= len(pages) // 2
    tokens = {re.search(r'name="csrf" value="([0-9a-f]{64})"', page)[1] for page in pages}  # type: ignore[index]
    assert len(tokens) == 3


async def test_a_change_reaches_an_open_page_and_the_page_shows_it(site: Running) -> None:
    job_id = await queued(site, "rosa")
    viewer = await log_in(site, "viewer")
    assert "pending" in await viewer.shows(f"/jobs/{job_id}")
    async with viewer.http.stream("GET", "/live", params={"topics": f"job:{job_id} hosts"}) as stream:
        lines = stream.aiter_lines()
        async with asyncio.timeout(60):
            assert await anext(lines) == "retry: 2000"
            rosa = await log_in(site, "researcher", "rosa")
            await rosa.post(f"/jobs/{job_id}/cancel", confirmed="1")
            while (line := await anext(lines)) != "event: change":
                assert not line.startswith("data: job")
            assert await anext(lines) == f"data: job:{job_id}"
        assert "cancelled" in await viewer.shows(f"/jobs/{job_id}")


async def test_a_stream_ends_when_its_session_does(site: Running) -> None:
    viewer = await log_in(site, "viewer", "vera")
    operator = await site.operator()
    (key,) = [each for each in ok(await operator.get("/v1/keys"), KeysReply).keys if each.name == "vera"]
    async with viewer.http.stream("GET", "/live", params={"topics": "jobs"}) as stream:
        await operator.post(f"/v1/key/{key.id}/revoke")
        async with asyncio.timeout(60):
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in stream.aiter_lines():
                    pass
