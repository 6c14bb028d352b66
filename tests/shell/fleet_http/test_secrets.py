"""Secrets of jobs: set by people, sealed in the database, given in the lease of a job that names them, to its host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.wire.identities import HubKeyReply
from strata.fleet.wire.owners import SecretsReply
from strata.hub.secret_store import KEY_FILE, SecretVault, load_key
from strata.hub.tables import Tables, open_tables
from tests.shell.fleet_http.running import Running, ok, running

VALUE = "hf_0123456789abcdef"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


def a_job(*secrets: str, name: str = "t") -> dict[str, Any]:
    trainer = {"name": name, "command": ["x"], "directory": "/d", "secrets": list(secrets)}
    return {"spec": {"model": "m", "mode": name, "trainer": name}, "trainer": trainer}


async def person(site: Running, name: str) -> httpx.AsyncClient:
    made = await (await site.operator()).post("/v1/keys", json={"name": name, "role": "researcher"})
    return await site.client(Authorization=f"Bearer {ok(made, HubKeyReply).secret}")


async def test_the_host_that_runs_the_job_gets_the_value_and_nothing_else_has_it(site: Running, tmp_path: Path) -> None:
    alice, viewer = await site.with_role("researcher"), await site.with_role("viewer")
    refused = await alice.post("/v1/jobs", json=a_job("HF_TOKEN"))
    assert (refused.status_code, "there is no secret HF_TOKEN for this job" in refused.text) == (409, True)
    assert (await alice.put("/v1/secret/HF_TOKEN", json={"value": VALUE})).status_code == 204
    assert (await alice.post("/v1/jobs", json=a_job("HF_TOKEN"))).status_code == 200
    host = await site.host("desk")
    (lease,) = await host.claim()
    assert lease.secrets == {"HF_TOKEN": VALUE}
    listed = ok(await alice.get("/v1/secrets"), SecretsReply).secrets
    assert [each.name for each in listed] == ["HF_TOKEN"]
    paths = ("/v1/trainers", "/v1/jobs", f"/v1/job/{lease.job_id}", "/v1/events", "/v1/secrets")
    for client in (viewer, alice, host.http, await site.operator()):
        for path in paths:
            async with client.stream("GET", path) as reply:
                async for text in reply.aiter_text():
                    assert VALUE not in text
                    break
    assert (await viewer.get("/v1/secrets")).status_code == 403
    assert (await host.http.get("/v1/secrets")).status_code == 403
    on_disk = b"".join(path.read_bytes() for path in site.data.rglob("*") if path.is_file())
    assert VALUE.encode() not in on_disk
    assert (site.data / KEY_FILE).stat().st_mode & 0o777 == 0o600


async def test_a_secret_is_for_its_owner_or_its_project(site: Running) -> None:
    alice, bob, operator = await person(site, "alice"), await person(site, "bob"), await site.operator()
    await alice.put("/v1/secret/MINE", json={"value": VALUE})
    assert (await bob.post("/v1/jobs", json=a_job("MINE"))).status_code == 409
    query = {"project": "default"}
    assert (await alice.put("/v1/secret/OURS", params=query, json={"value": VALUE})).status_code == 403
    assert (await operator.put("/v1/secret/OURS", params=query, json={"value": VALUE[::-1]})).status_code == 204
    assert (await bob.post("/v1/jobs", json=a_job("OURS"))).status_code == 200
    await alice.put("/v1/secret/OURS", json={"value": VALUE})
    assert (await alice.post("/v1/jobs", json=a_job("OURS", name="u"))).status_code == 200
    job = a_job("OURS", name="v")
    job["spec"]["project"] = "hers"
    assert (await alice.post("/v1/jobs", json=job)).status_code == 200
    for client, status in ((alice, 204), (bob, 403)):
        reply = await client.put("/v1/secret/TEAM", params={"project": "hers"}, json={"value": VALUE})
        assert reply.status_code == status
    hosts = [await site.host(f"desk{number}") for number in range(3)]
    leases = {lease.spec.mode: lease.secrets for host in hosts for lease in await host.claim()}
    assert leases.pop("v") == {"OURS": VALUE}
    assert leases == {"t": {"OURS": VALUE[::-1]}, "u": {"OURS": VALUE}}, "one's own comes first"


async def test_a_renewed_key_keeps_the_secrets_of_its_owner(site: Running) -> None:
    await (await person(site, "alice")).put("/v1/secret/MINE", json={"value": VALUE})
    renewed, bob = await person(site, "alice"), await person(site, "bob")
    for client, names in ((renewed, ["MINE"]), (bob, [])):
        assert [each.name for each in ok(await client.get("/v1/secrets"), SecretsReply).secrets] == names
    assert (await renewed.post("/v1/jobs", json=a_job("MINE"))).status_code == 200


async def test_the_first_secret_of_a_project_makes_the_project_its_setters(site: Running) -> None:
    alice, bob, operator = await person(site, "alice"), await person(site, "bob"), await site.operator()
    for client, project, other in ((operator, "P", alice), (alice, "Q", bob)):
        query = {"project": project}
        assert (await client.put("/v1/secret/TOKEN", params=query, json={"value": VALUE})).status_code == 204
        job = a_job("TOKEN")
        job["spec"]["project"] = project
        assert (await other.post("/v1/jobs", json=job)).status_code == 403, "it would get the value"
        assert (await other.get("/v1/secrets", params=query)).status_code == 403
        for reader in (client, operator):
            listed = ok(await reader.get("/v1/secrets", params=query), SecretsReply).secrets
            assert [each.name for each in listed] == ["TOKEN"]
    assert await site.hub.context.fleet.store.owners.projects() == {"P": "operator", "Q": "alice"}


async def test_a_removed_secret_is_missing_in_the_lease(site: Running) -> None:
    alice = await site.with_role("researcher")
    await alice.put("/v1/secret/HF_TOKEN", json={"value": VALUE})
    await alice.post("/v1/jobs", json=a_job("HF_TOKEN"))
    assert (await alice.delete("/v1/secret/HF_TOKEN")).status_code == 204
    assert (await alice.delete("/v1/secret/HF_TOKEN")).status_code == 404
    (lease,) = await (await site.host("desk")).claim()
    assert lease.secrets == {}


@pytest.mark.parametrize(
    ("name", "value"), [("A", "short"), ("STRATA_X", VALUE), ("no-name", VALUE), ("A", "nul\0" * 4)]
)
async def test_what_cannot_be_a_secret_is_refused(site: Running, name: str, value: str) -> None:
    alice = await site.with_role("researcher")
    assert (await alice.put(f"/v1/secret/{name}", json={"value": value})).status_code == 400


@pytest.fixture(params=["sqlite", "postgres"])
async def tables(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tables]:
    sqlite = request.param == "sqlite"
    database = f"sqlite:{tmp_path / 'hub.db'}" if sqlite else request.getfixturevalue("postgres_url")
    async with open_tables(database) as opened:
        yield opened


async def test_both_databases_keep_sealed_values(tables: Tables, tmp_path: Path) -> None:
    vault = SecretVault(tables.secrets, load_key(tmp_path / "key", in_use=False))
    for value in ("first value", VALUE):
        await vault.put("key:a", "TOKEN", value, actor="key:a", now_s=1.0)
    await vault.put("project:p", "TOKEN", "of the project", actor="operator", now_s=2.0)
    assert await vault.reveal(["key:a", "project:p"], ["TOKEN", "OTHER"]) == {"TOKEN": VALUE}
    assert await vault.reveal(["key:b", "project:p"], ["TOKEN"]) == {"TOKEN": "of the project"}
    assert [(each.scope, each.changed_at_s) for each in await vault.names(["key:a"])] == [("key:a", 1.0)]
    assert VALUE not in str(await tables.secrets.select(["key:a", "project:p"]))
    another = SecretVault(tables.secrets, Secret("0" * 64))
    assert await another.reveal(["key:a"], ["TOKEN"]) == {}
    # A row that somebody with access to the database gives another name cannot be opened.
    (_, _, sealed, *_rest) = (await tables.secrets.select(["key:a"]))[0]
    await tables.secrets.upsert(("key:b", "TOKEN", sealed, 1.0, "key:b"))
    await tables.secrets.upsert(("key:b", "NOISE", "?", 1.0, "key:b"))
    await vault.put("key:b", "WHOLE", VALUE, actor="key:b", now_s=1.0)
    names = ["NOISE", "TOKEN", "WHOLE"]
    assert await vault.reveal(["key:b"], names) == {"WHOLE": VALUE}, "the others do not hold it up"
    assert await vault.remove("key:a", "TOKEN")
    assert not await vault.remove("key:a", "TOKEN")


async def test_a_key_that_is_missing_is_not_replaced_while_there_are_secrets(tables: Tables, tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = load_key(path, in_use=await tables.secrets.exist())
    await SecretVault(tables.secrets, first).put("key:a", "TOKEN", VALUE, actor="key:a", now_s=1.0)
    assert load_key(path, in_use=await tables.secrets.exist()).reveal() == first.reveal()
    path.unlink()
    with pytest.raises(StrataError) as raised:
        load_key(path, in_use=await tables.secrets.exist())
    assert (raised.value.code, path.exists()) == (Code.PRECONDITION, False)
    await tables.secrets.delete("key:a", "TOKEN")
    assert load_key(path, in_use=await tables.secrets.exist()).reveal() != first.reveal()


async def test_a_hub_does_not_start_without_the_key_of_its_secrets(tmp_path: Path) -> None:
    async with running(tmp_path / "hub") as site:
        await (await site.operator()).put("/v1/secret/TOKEN", json={"value": VALUE})
    (tmp_path / "hub" / KEY_FILE).unlink()
    with pytest.raises(StrataError, match=r"secrets\.key is missing"):
        async with running(tmp_path / "hub"):
            pass


async def test_the_key_of_secrets_may_be_in_another_file_than_the_data_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "vault.key"
    async with running(tmp_path / "hub", secrets_key=elsewhere) as site:
        alice = await person(site, "alice")
        assert (await alice.put("/v1/secret/MINE", json={"value": VALUE})).is_success
    assert elsewhere.stat().st_mode & 0o777 == 0o600
    assert not list((tmp_path / "hub").rglob(KEY_FILE))
