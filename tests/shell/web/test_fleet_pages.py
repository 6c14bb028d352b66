"""Hosts, sweeps, artifacts and people: what each page shows, who may act, and hostile names that stay text."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from strata.fleet.artifacts.manifest import ArtifactKind
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.records import AttemptKey, JobCompletion
from strata.fleet.wire.hosts import Host
from strata.fleet.wire.identities import InviteReply
from strata.fleet.wire.manifests import ManifestReply
from strata.fleet.wire.owners import QuotasReply
from strata.fleet.wire.sweeps import SweepReply
from strata.hub.settings import HubTlsSettings
from strata.web.render import details
from tests.shell.fleet_http.running import HostClient, Running, manifest_body, ok, running
from tests.shell.web.browsing import Browser, Tags, log_in
from tests.shell.web.filling import add_artifact, add_lineage, add_sweep, heartbeat
from tests.shell.web.test_pages import HOSTILE

GPU = {"name": "A100", "vram_bytes": 80 << 30, "uuid": "GPU-0"}


@pytest.fixture
async def safe_site(tmp_path: Path) -> AsyncIterator[Running]:
    """With TLS, where an operator may use a browser."""
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True)) as started:
        yield started


async def test_empty_pages_say_what_to_do_next(site: Running) -> None:
    browser = await log_in(site, "viewer")
    assert "strata invite" in await browser.shows("/hosts")
    assert "strata apply" in await browser.shows("/sweeps")
    assert "strata apply" in await browser.shows("/artifacts")
    assert "Owners: use and quotas" in await browser.shows("/people")
    for path in ("/hosts/nothing", "/sweeps/default/nothing", f"/artifacts/artifact1_{'0' * 64}"):
        assert (await browser.get(path)).status_code == 404, path


async def test_hosts_are_tiles_or_rows_with_load_cards_jobs_and_age(site: Running) -> None:
    host = await site.host("gpu-1", gpus=[GPU], cores=8, cuda="12.4")
    await site.host("cpu-1")
    await site.add(JobSpec(model="m", name="train"))
    (lease,) = await host.claim()
    await heartbeat(host, {"cpu_use": 0.5, "cards": [{"card": "GPU-0", "use": 0.75}]})
    browser = await log_in(site, "viewer")
    for view in ("tiles", "table"):
        page = await browser.shows(f"/hosts?view={view}")
        assert page.count('id="host-') == 2
        assert "50 %" in page
        assert "1 of 1 cards taken" in page
        assert f'href="/jobs/{lease.job_id}"' in page
        assert "data-age" in page
    assert (await browser.shows("/hosts?q=cpu")).count('id="host-') == 1
    assert "No host matches" in await browser.shows("/hosts?q=nothing")
    assert (await browser.shows("/hosts?status=online")).count('id="host-') == 2


async def test_a_host_shows_its_cards_policy_and_jobs(site: Running) -> None:
    host = await site.host("gpu-1", gpus=[GPU], cores=8, cuda="12.4", labels={"rack": "7"})
    await site.add(JobSpec(model="m", name="train"))
    await host.claim()
    await heartbeat(host, {"cpu_use": 0.5, "cards": [{"card": "GPU-0", "use": 0.75, "vram_used_gib": 40.0}]})
    page = await (await log_in(site, "viewer")).shows(f"/hosts/{host.id}")
    for text in ("75 %", "40.0 of 80 GiB", "the whole host", "Every job may run here", "no quiet hours", "rack=7"):
        assert text in page, text
    assert f'data-src="/v1/host/{host.id}/samples?span_s=3600&amp;points=300"' in page
    assert "/confirm?action=" not in page, "a viewer sees no action"


async def test_an_operator_drains_a_host_after_seeing_what_it_would_do(safe_site: Running) -> None:
    site = safe_site
    operator = await site.operator()
    host = ok(await operator.post("/v1/invites", json={}), InviteReply)
    assert host.token
    browser = await log_in(site, "operator")
    host_id = await joined_host(site)
    page = await browser.shows(f"/hosts/{host_id}")
    assert f'href="/hosts/{host_id}/confirm?action=drain"' in page
    asked = await browser.shows(f"/hosts/{host_id}/confirm?action=drain")
    assert "It gets no new jobs until it is resumed." in asked
    assert ok(await operator.get(f"/v1/host/{host_id}"), Host).state == "active"
    done = await browser.post(f"/hosts/{host_id}", action="drain", reason="new cards")
    assert (done.status_code, done.headers["location"]) == (303, f"/hosts/{host_id}")
    changed = ok(await operator.get(f"/v1/host/{host_id}"), Host)
    assert (changed.state, changed.state_reason) == ("draining", "new cards")
    assert "new cards" in await browser.shows(f"/hosts/{host_id}")
    assert (await browser.post(f"/hosts/{host_id}", action="explode")).status_code == 400
    for role in ("viewer", "researcher"):
        other = await log_in(site, role)
        assert (await other.get(f"/hosts/{host_id}/confirm?action=drain")).status_code == 403
        assert (await other.post(f"/hosts/{host_id}", action="resume")).status_code == 403


async def joined_host(site: Running) -> str:
    """A host that has registered, without a machine behind it."""
    from strata.fleet.core.capability import Capability
    from strata.fleet.records import HostRow

    fleet = site.hub.context.fleet
    row = HostRow(id="host_1", name="gpu-1", capability=Capability(hostname="gpu-1"), registered_at_s=fleet.now_s())
    return (await fleet.hosts.register(row, "host:host_1")).id


async def test_a_stopped_sweep_says_how_far_it_came(site: Running) -> None:
    text = '[trainers.default]\ncommand = ["true"]\ndirectory = "/code"\n'
    text += '[[sweeps]]\nname = "rates"\nmodel = "m"\ngrid = { x = [1, 2, 3] }\n'
    operator = await site.operator()
    ok(await operator.post("/v1/manifest", json=manifest_body(text)), ManifestReply)
    host = await site.host("desk")
    await host.claim()
    ok(await operator.post("/v1/sweep/default/rates/stop"), SweepReply)
    browser = await log_in(site, "viewer")
    for path in ("/sweeps", "/sweeps/default/rates"):
        assert "stopped at 1 of 3" in await browser.shows(path)


async def test_the_best_run_of_a_sweep_is_in_the_list_and_on_its_page(site: Running) -> None:
    host = await site.host("gpu-1")
    ids = await add_sweep(site, host)
    browser = await log_in(site, "viewer")
    listed = await browser.shows("/sweeps")
    assert f'href="/jobs/{ids[2]}"' in listed
    assert "0.75" in listed
    page = await browser.shows("/sweeps/default/lr")
    assert 'href="/sweeps/default/lr"' in listed
    assert page.count("<tr id=") == 6
    first = re.search(r'<tr id="trial-[^"]+" data-state="completed" class="is-best"', page)
    assert first is not None
    assert page.index('class="is-best"') < page.index('data-state="pruned"')
    assert 'class="parallel' in page
    assert 'class="best-line"' in page
    assert 'data-axis="rate"' in page
    other = await browser.shows("/sweeps/default/lr?metric=accuracy&lowest=true")
    assert "accuracy, lowest of 4" in other


async def test_the_lineage_of_an_artifact_is_a_graph_from_left_to_right(site: Running) -> None:
    data, base, *tuned = await add_lineage(site)
    browser = await log_in(site, "viewer")
    assert (await browser.shows("/artifacts")).count('id="made-') == 4
    assert (await browser.shows("/artifacts?kind=data")).count('id="made-') == 1
    ordered = await browser.shows("/artifacts?metric=val_loss&lowest=true&kind=result")
    assert ordered.index("val_loss") > 0
    page = await browser.shows(f"/artifacts/{base}")
    places = {
        re.search(r'href="/artifacts/([^"]+)"', node)[1]: int(re.search(r'<rect x="(\d+)"', node)[1])  # type: ignore[index]
        for node in re.findall(r'<a href="/artifacts/[^>]*class="node.*?</a>', page, re.DOTALL)
    }
    assert places.keys() == {data, base, *tuned}
    assert places[data] < places[base] < places[tuned[0]] == places[tuned[1]]
    assert "val_loss 0.9" in page
    assert page.count('class="edge') == 3
    assert "Pin…" not in page


async def test_an_operator_pins_and_unpins_an_artifact_and_nobody_who_does_not_own_it(safe_site: Running) -> None:
    site = safe_site
    artifact = await add_artifact(site, b"x", model="m")
    browser = await log_in(site, "operator")
    path = f"/artifacts/{artifact}"
    assert (await browser.post(f"{path}/pin", reason="for the paper")).headers["location"] == path
    assert "for the paper" in await browser.shows(path)
    assert (await browser.post(f"{path}/pin", unpin="1", confirmed="1")).status_code == 303
    assert "for the paper" not in await browser.shows(path)
    for role in ("viewer", "researcher"):
        assert (await (await log_in(site, role)).post(f"{path}/pin", reason="mine")).status_code == 403


async def test_an_admin_makes_a_key_whose_text_is_shown_once(safe_site: Running) -> None:
    site = safe_site
    browser = await log_in(site, "admin")
    made = await browser.post("/people/keys", name="rosa", role="researcher", valid_s="2592000")
    assert made.status_code == 200
    (secret,) = set(re.findall(r"tml-[0-9a-z_]+-[0-9a-f]{40}", made.text))
    page = await browser.shows("/people")
    assert secret not in page
    assert "rosa" in page
    key_id = secret.split("-")[1]
    assert (await browser.post(f"/people/keys/{key_id}", confirmed="1")).status_code == 303
    assert f'id="key-{key_id}"' not in await browser.shows("/people")
    assert f'id="key-{key_id}"' in await browser.shows("/people?ended=true")
    assert (await browser.post("/people/keys", name="", role="researcher")).status_code == 400


async def test_an_operator_invites_hosts_and_sets_quotas_and_sees_no_keys(safe_site: Running) -> None:
    site = safe_site
    browser = await log_in(site, "operator")
    made = await browser.post("/people/invites", name="gpu-9", labels="rack=7 fast=yes", valid_s="1800")
    assert "strata join fj1." in made.text
    page = await browser.shows("/people")
    assert "strata join fj1." not in page
    (invite,) = re.findall(r'id="invite-([0-9a-f]{12})"', page)
    assert 'id="keys"' not in page
    assert (await browser.post(f"/people/invites/{invite}", confirmed="1")).status_code == 303
    assert (await browser.post("/people/keys", name="x", role="admin")).status_code == 403
    assert (await browser.post("/people/quotas", owner="rosa", jobs="5", gpu_hours="", gib="2")).status_code == 303
    quotas = ok(await (await site.operator()).get("/v1/quotas"), QuotasReply)
    (rosa,) = [each for each in quotas.quotas if each.owner == "rosa"]
    assert (rosa.own, rosa.quota.jobs, rosa.quota.gpu_hours, rosa.quota.bytes) == (True, 5, None, 2 << 30)
    assert (await browser.post("/people/quotas", owner="rosa", jobs="many")).status_code == 400
    assert (await browser.post("/people/quotas", owner="rosa", remove="1")).status_code == 303
    for role in ("viewer", "researcher"):
        other = await log_in(site, role)
        shown = await other.shows("/people")
        assert 'id="invites"' not in shown
        assert "Owners: use and quotas" in shown
        assert (await other.post("/people/invites", name="x")).status_code == 403


async def test_events_come_newest_first_and_are_searched_by_kind_text_and_subject(site: Running) -> None:
    host = await site.host("gpu-1")
    ids = await site.add(*(JobSpec(model="m", seed=seed, name=f"job-{seed}") for seed in range(60)))
    await site.hub.context.fleet.jobs.cancel(ids[0], "too slow", "operator")
    browser = await log_in(site, "viewer")
    async with asyncio.timeout(60):
        while "too slow" not in (page := await browser.shows("/events?kind=job.*")):
            await asyncio.sleep(0.05)
    assert page.count("<tr id=") == 50
    assert page.index("job.cancelled") < page.index("job.created")
    (older,) = re.findall(r'href="(\?[^"]*before=[^"]+)"', page)
    rest = await browser.shows("/events" + html.unescape(older))
    assert rest.count("<tr id=") == 11
    assert "Newest" in rest
    found = await browser.shows("/events?q=TOO+SLOW")
    assert found.count("<tr id=") == 1
    assert f'href="/jobs/{ids[0]}"' in found
    assert "No event matches" in await browser.shows("/events?q=nothing-like-this")
    of_host = await browser.shows(f"/events?subject={host.id}")
    assert f'href="/hosts/{host.id}"' in of_host
    assert "job.created" not in of_host
    assert "host.registered" in await browser.shows(f"/hosts/{host.id}")


async def test_an_event_names_its_host_and_shortens_the_ids_in_its_details(site: Running) -> None:
    host = await site.host("gpu-1")
    (job_id,) = await site.add(JobSpec(model="m"))
    (lease,) = await host.claim()
    artifact = await add_artifact(site, b"model", job_id=job_id, epoch=lease.epoch)
    attempt = AttemptKey(host.id, job_id, lease.epoch)
    await site.hub.context.fleet.leases.complete(attempt, JobCompletion(artifact=artifact))
    browser = await log_in(site, "viewer")
    page = await browser.shows(f"/events?subject={job_id}&kind=job.completed")
    assert f'<span title="host:{host.id}">gpu-1</span>' in page
    assert f'title="{job_id}">m-default</a>' in page
    assert f'<span class="meta">artifact</span> {artifact.rpartition("_")[2][:8]}</span>' in page


def test_details_of_an_event_name_the_host_that_they_are_about() -> None:
    said = details({"host": "host1_0a", "epoch": 0, "reason": "full"}, {"host1_0a": "gpu-1"})
    assert said == [("host", "gpu-1"), ("reason", "full")]


async def test_hostile_names_stay_text_on_every_page_of_the_fleet(site: Running) -> None:
    browser = await log_in(site, "researcher")
    for number, hostile in enumerate(HOSTILE):
        capability: dict[str, Any] = {
            "hostname": "h", "os": hostile, "arch": hostile, "gpus": [{**GPU, "name": hostile, "uuid": hostile}],
            "labels": {"rack": hostile}, "sandbox_lacks": [hostile],
        }  # fmt: skip
        host = await site.host(f"host-{number}")
        await host.register(**capability)
        job_id, _ = await site.add(
            *(
                JobSpec(
                    model="m",
                    seed=number,
                    sweep=hostile,
                    name=hostile,
                    hyper={"axis": f"{part} {hostile}", hostile: part},
                )
                for part in range(2)
            )
        )
        await site.hub.context.fleet.leases.complete(*await claimed(host))
        await (await site.operator()).post(f"/v1/host/{host.id}/pause", json={"reason": hostile})
        artifact = await add_artifact(
            site, f"{number}".encode(), kind=ArtifactKind.RESULT, model=hostile, mode=hostile, job_id=job_id,
            metrics={hostile: 1.0}, code=hostile, data=hostile,
        )  # fmt: skip
        await site.hub.context.artifacts.pin(artifact, hostile, "operator")
        for path, query in (
            ("/hosts", {}), ("/hosts?view=table", {}), (f"/hosts/{host.id}", {}), ("/hosts", {"q": hostile}),
            ("/hosts", {"status": hostile}), ("/sweeps", {}), ("/sweeps", {"q": hostile, "project": hostile}),
            ("/artifacts", {}), (f"/artifacts/{artifact}", {}), ("/artifacts", {"model": hostile, "metric": hostile}),
            ("/people", {}), ("/events", {}), ("/events", {"q": hostile, "kind": hostile, "subject": hostile}),
            ("/events", {"before": hostile}), (f"/hosts/{hostile}", {}),
            (f"/sweeps/default/{hostile}", {"metric": hostile}),
        ):  # fmt: skip
            await assert_harmless(browser, path, query)
        quoted = quote(hostile, safe="")
        page = await browser.shows(f"/sweeps/default/{quoted}")
        assert 'data-axis="axis"' in page
        assert f"1 {hostile}" in html.unescape(page)
    assert HOSTILE[0] in html.unescape(await browser.shows("/sweeps"))


async def claimed(host: HostClient) -> tuple[AttemptKey, JobCompletion]:
    (lease,) = await host.claim()
    return AttemptKey(host.id, lease.job_id, lease.epoch), JobCompletion(metrics={"loss": 1.0})


async def assert_harmless(browser: Browser, path: str, query: dict[str, str]) -> None:
    reply = await browser.http.get(path, params=query or None, headers={"Accept": "text/html"})
    assert reply.status_code in (200, 400, 404), (path, query, reply.text[:500])
    for tag, attributes in Tags(reply.text).elements:
        assert tag != "xss-probe", path
        assert "onxss" not in attributes, path
        for name in ("href", "src", "action", "hx-get"):
            assert not attributes.get(name, "").startswith("javascript:"), path
    assert "1337" not in reply.text
