"""Every route of the hub against every caller that may not use it, from the table that is served."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from strata.base.errors import StrataError
from strata.base.secret import Secret
from strata.fleet.core.requirement import SandboxLevel
from strata.fleet.wire.artifacts import CommitReply
from strata.fleet.wire.hosts import HostsReply
from strata.fleet.wire.identities import HubKeyReply
from strata.fleet.wire.jobs import JobsReply, SubmitReply
from strata.fleet.wire.manifests import ManifestReply
from strata.http.route import Route
from strata.hub.compose import TOKEN_FILE
from strata.hub.routes import ROUTES
from strata.hub.settings import HubTlsSettings
from strata.identity.roles import Role
from strata.identity.tokens import check_strength
from tests.shell.fleet_http.running import Running, manifest_body, ok, refused, running
from tests.shell.fleet_http.test_access import METHODS, url

Tries = Callable[[int], None]
AREA = "hub: who calls"
CLOSED = tuple(route for route in ROUTES if not route.access.public)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub", tls=HubTlsSettings(enabled=True)) as started:
        yield started


async def assert_all(client: httpx.AsyncClient, status: int, tries: Tries, endpoints: tuple[Route, ...]) -> None:
    tries(len(endpoints))
    assert endpoints
    for route in endpoints:
        reply = await client.request(route.method, url(route.path))
        assert reply.status_code == status, (route.method, route.path, reply.text)


async def made_key(site: Running, **more: object) -> HubKeyReply:
    operator = await site.operator()
    return ok(await operator.post("/v1/keys", json={"name": "k", "role": "admin", **more}), HubKeyReply)


@pytest.mark.attack(AREA, "no credentials, every route and method")
async def test_nobody_gets_in_without_credentials(site: Running, tries: Tries) -> None:
    anybody = await site.client()
    public = {(route.method, route.path) for route in ROUTES if route.access.public}
    assert len(public) == 4
    for path in dict.fromkeys(route.path for route in ROUTES):
        for method in METHODS:
            if (method, path) not in public:
                tries(1)
                reply = await anybody.request(method, url(path))
                assert reply.status_code == 401, (method, path)


@pytest.mark.attack(AREA, "invented key")
async def test_an_invented_key_opens_nothing(site: Running, tries: Tries) -> None:
    stranger = await site.client(Authorization="Bearer tml-0123456789ab-" + "0" * 40)
    await assert_all(stranger, 401, tries, CLOSED)


@pytest.mark.attack(AREA, "real key id, wrong secret")
async def test_the_id_of_a_key_is_not_the_key(site: Running, tries: Tries) -> None:
    secret = (await made_key(site)).secret
    flipped = secret[:-1] + ("0" if secret[-1] != "0" else "1")
    await assert_all(await site.client(Authorization=f"Bearer {flipped}"), 401, tries, CLOSED)


@pytest.mark.attack(AREA, "expired admin key")
async def test_an_expired_key_opens_nothing(site: Running, tries: Tries) -> None:
    made = await made_key(site, valid_s=0.001)
    site.hub.context.authenticator.invalidate()
    await assert_all(await site.client(Authorization=f"Bearer {made.secret}"), 401, tries, CLOSED)


@pytest.mark.attack(AREA, "revoked admin key")
async def test_a_revoked_key_opens_nothing(site: Running, tries: Tries) -> None:
    made = await made_key(site)
    assert (await (await site.operator()).post(f"/v1/key/{made.key.id}/revoke")).status_code == 204
    await assert_all(await site.client(Authorization=f"Bearer {made.secret}"), 401, tries, CLOSED)


@pytest.mark.attack(AREA, "wrong operator token")
async def test_a_wrong_operator_token_opens_nothing(site: Running, tries: Tries) -> None:
    await assert_all(await site.client(**{"X-Operator-Token": "0" * 48}), 401, tries, CLOSED)


@pytest.mark.attack(AREA, "operator token without its last character")
async def test_a_part_of_the_operator_token_opens_nothing(site: Running, tries: Tries) -> None:
    token = (site.data / TOKEN_FILE).read_text().strip()
    await assert_all(await site.client(**{"X-Operator-Token": token[:-1]}), 401, tries, CLOSED)


@pytest.mark.attack(AREA, "Basic authorization")
async def test_basic_authorization_opens_nothing(site: Running, tries: Tries) -> None:
    token = (site.data / TOKEN_FILE).read_text().strip()
    client = await site.client()
    client.auth = httpx.BasicAuth("operator", token)
    await assert_all(client, 401, tries, CLOSED)


@pytest.mark.attack(AREA, "the secret of a local host, where there is TLS")
async def test_a_hosts_secret_opens_nothing_where_there_is_tls(site: Running, tries: Tries) -> None:
    _, secret = await site.hub.context.enrollment.add_local("local")
    await assert_all(await site.client(Authorization=f"Bearer {secret}"), 401, tries, CLOSED)


@pytest.mark.attack(AREA, "key in the query, in a cookie, in headers of proxies")
async def test_a_key_counts_only_where_keys_belong(site: Running, tries: Tries) -> None:
    secret = (await made_key(site)).secret
    headers = {"Cookie": f"key={secret}", "X-API-Key": secret, "X-Forwarded-For": "127.0.0.1", "X-Client-Cert": "x"}
    client = await site.client(**headers)
    client.params = httpx.QueryParams({"key": secret, "token": secret})
    # The routes of training servers take X-API-Key: clients of theirs send it.
    await assert_all(client, 401, tries, tuple(each for each in CLOSED if not each.path.startswith("/api/v1/")))


@pytest.mark.attack(AREA, "two Authorization headers, the good one second")
async def test_of_two_authorizations_the_first_counts(site: Running, tries: Tries) -> None:
    secret = (await made_key(site)).secret
    client = await site.client()
    client.headers = httpx.Headers([("Authorization", "Bearer x"), ("Authorization", f"Bearer {secret}")])
    await assert_all(client, 401, tries, CLOSED)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.RESEARCHER, Role.OPERATOR, Role.ADMIN], ids=lambda role: role.name)
@pytest.mark.attack(AREA, "a role on every route above it")
async def test_a_role_is_refused_on_every_route_above_it(site: Running, role: Role, tries: Tries) -> None:
    above = tuple(each for each in CLOSED if each.access.role is None or role < each.access.role)
    await assert_all(await site.with_role(role.name.lower()), 403, tries, above)


@pytest.mark.attack(AREA, "a host on every route of people")
async def test_a_host_is_refused_on_every_route_of_people(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "local") as plain:
        people = tuple(each for each in CLOSED if not each.access.host)
        await assert_all((await plain.host("anna")).http, 403, tries, people)


@pytest.mark.attack(AREA, "the secret of a host that was revoked")
async def test_a_revoked_host_is_refused_everywhere(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "local") as plain:
        anna = await plain.host("anna")
        assert (await (await plain.operator()).post("/v1/host/anna/revoke")).status_code == 204
        await assert_all(anna.http, 403, tries, CLOSED)


async def sent_source(person: httpx.AsyncClient, content: bytes) -> tuple[str, str, str]:
    """A source artifact of one file: its id, its chunk, and the same bytes as a blob."""
    digest = hashlib.sha256(content).hexdigest()
    assert (await person.put(f"/v1/chunk/{digest}?size={len(content)}", content=content)).status_code == 204
    file = {"path": "train.py", "sha256": digest, "size": len(content), "chunks": [digest]}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "source"}}
    made = ok(await person.post("/v1/artifacts", json=body), CommitReply)
    ok(await person.put(f"/v1/source/{digest}", content=content), CommitReply)
    return made.artifact_id, digest, digest


@pytest.mark.attack(AREA, "M2: a host reads jobs, trainers, sources, artifacts and hosts that no lease of it names")
async def test_a_host_reads_only_what_its_live_leases_name(tmp_path: Path, tries: Tries) -> None:
    async with running(tmp_path / "local") as plain:
        anna, eve, person = (
            await plain.host("anna", slots=2),
            await plain.host("eve"),
            await plain.with_role("researcher"),
        )
        artifact, chunk, _ = await sent_source(person, b"print(1)")
        _, _, blob = await sent_source(person, b"print(2)")
        dataset, row, _ = await sent_source(person, b"1,2,3")
        for number, bundle in enumerate((artifact, blob)):
            trainer: dict[str, object] = {"name": f"t{number}", "command": ["true"], "bundle": bundle}
            trainer |= {"data": {"rows": {"source": "strata:rows", "digest": dataset}}} if number else {}
            body = {"spec": {"model": f"m{number}", "trainer": f"t{number}"}, "trainer": trainer}
            ok(await person.post("/v1/jobs", json=body), SubmitReply)
        (first,), (second,) = await anna.claim("c1"), await anna.claim("c2")
        named = [f"/v1/artifact/{artifact}", f"/v1/chunk/{chunk}", f"/v1/source/{blob}"]
        named += [f"/v1/artifact/{dataset}", f"/v1/chunk/{row}"]
        named += [f"/v1/job/{lease.job_id}" for lease in (first, second)]
        for path in named:
            assert (await anna.http.get(path)).status_code == 200, path
            assert refused(await eve.http.get(path)) == (403, "forbidden"), path
            # In the same words as for what never was.
            unknown = await eve.http.get(path[:-8] + "00000000")
            assert refused(unknown) == (403, "forbidden"), path
        # The lease that is live named the chunk of the artifact, and not the blob's.
        assert refused(await anna.http.get(f"/v1/chunk/{blob}")) == (403, "forbidden")
        for host, jobs in ((anna, {first.job_id, second.job_id}), (eve, set())):
            seen = ok(await host.http.get(f"/v1/jobs?host={anna.id}"), JobsReply).jobs
            assert {job.id for job in seen} == jobs
            assert [each.id for each in ok(await host.http.get("/v1/workers"), HostsReply).hosts] == [host.id]
        for lease in (first, second):
            body = {"epoch": lease.epoch, "cause": "user_error", "error": "x"}
            assert (await anna.http.post(f"/v1/job/{lease.job_id}/fail", json=body)).status_code == 200
        assert refused(await anna.http.get(f"/v1/job/{first.job_id}")) == (403, "forbidden")
        assert ok(await anna.http.get("/v1/jobs"), JobsReply).jobs == ()
        tries(3 * len(named) + 7)


@pytest.mark.attack(AREA, "a job of a project that must be confined, for a host that cannot confine it")
async def test_jobs_of_a_project_run_only_where_the_operator_wants_them(tmp_path: Path, tries: Tries) -> None:
    trainer = {"name": "t", "command": ["true"], "bundle": "0" * 64}
    required: dict[str, SandboxLevel] = {"*": "namespaces", "trusted": "none"}
    async with running(tmp_path / "local", require_sandbox=required) as plain:
        weak = await plain.host("weak", sandbox="user")
        person, operator = await plain.with_role("researcher"), await plain.operator()
        # Also the least that the job asks for itself does not lower it.
        spec = {"model": "m", "trainer": "t", "needs": {"require_sandbox": "none"}}
        job = ok(await person.post("/v1/jobs", json={"spec": spec, "trainer": trainer}), SubmitReply).job
        text = '[trainers.t]\ncommand = ["true"]\nbundle = "' + "0" * 64 + '"\n[[jobs]]\nmodel = "n"\ntrainer = "t"\n'
        applied = ok(
            await operator.post("/v1/manifest", json=manifest_body(f'project = "other"\n{text}')), ManifestReply
        )
        assert await weak.claim() == ()
        why = (await person.get(f"/v1/job/{job.id}/why")).text
        assert "require_sandbox" in why
        trusted = ok(
            await operator.post("/v1/manifest", json=manifest_body(f'project = "trusted"\n{text}')), ManifestReply
        )
        assert [lease.job_id for lease in await weak.claim("c2")] == [trusted.new[0].id]
        (first,) = await (await plain.host("strong", sandbox="namespaces")).claim("c3")
        assert first.job_id in {job.id, applied.new[0].id}
        # Applied again it is the same: the level is no change of the manifest.
        again = await operator.post("/v1/manifest", json=manifest_body(f'project = "other"\n{text}'))
        assert ok(again, ManifestReply).changed == ()
        tries(3)


@pytest.mark.attack(AREA, "a search sweep of a project that must be confined, for a host that cannot confine it")
async def test_trials_run_only_where_the_operator_wants_them(tmp_path: Path) -> None:
    text = (
        'project = "mine"\n[trainers.t]\ncommand = ["true"]\nbundle = "' + "0" * 64 + '"\n'
        '[[sweeps]]\nname = "s"\nmodel = "m"\ntrainer = "t"\n'
        '[sweeps.search]\ntrials = 1\nobjective = { loss = "minimize" }\nspace = { x = { uniform = [0.0, 1.0] } }\n'
    )
    async with running(tmp_path / "local", require_sandbox={"*": "namespaces"}) as plain:
        host = await plain.host("strong", sandbox="namespaces")
        person = await plain.with_role("researcher")
        ok(await person.post("/v1/manifest", json=manifest_body(text)), ManifestReply)
        (lease,) = await host.claim(wait_s=30)
        assert (lease.spec.sweep, lease.spec.needs.require_sandbox) == ("s", "namespaces")


@pytest.mark.attack(AREA, "a key whose name owns the jobs of the operator token, or the quota of everybody")
async def test_no_key_has_the_name_of_another_kind_of_owner(site: Running, tries: Tries) -> None:
    operator = await site.operator()
    for name in ("operator", "*", "key:1", "project:p", ":"):
        tries(1)
        reply = await operator.post("/v1/keys", json={"name": name, "role": "researcher"})
        assert refused(reply) == (400, "invalid"), name
        assert "its name is the owner of its jobs" in reply.text


@pytest.mark.attack(AREA, "paths that do not exist, to find out what does")
async def test_a_stranger_is_not_told_what_exists(site: Running, tries: Tries) -> None:
    anybody, viewer = await site.client(), await site.with_role("viewer")
    for path in ("/nothing", "/v1", "/v1/nothing", "/v1/jobs/", "//v1/health", "/v1/health/", "/V1/HEALTH"):
        tries(2)
        assert (await anybody.get(path)).status_code == 401
        assert (await viewer.get(path)).status_code == 404
    for path in ("/", "/jobs", "/jobs/job_1", "/nothing"):
        tries(1)
        sent = await anybody.get(path, headers={"Accept": "text/html"})
        assert (sent.status_code, sent.headers["location"].partition("?")[0]) == (303, "/login"), "a browser too"


@pytest.mark.attack(AREA, "a weak operator token")
async def test_a_hub_does_not_start_with_a_token_that_can_be_guessed(tmp_path: Path, tries: Tries) -> None:
    for weak in ("hunter2hunter2", "a" * 48, "abcabcabcabcabcabcabcabc", "0123456789abcdef012"):
        tries(1)
        with pytest.raises(StrataError, match="guessed"):
            check_strength(Secret(weak))
    with pytest.raises(StrataError, match="guessed"):
        async with running(tmp_path / "weak", operator_token=Secret("hunter2hunter2")):
            pass


@pytest.mark.attack("hub: roles", "viewers and hosts read the environment of trainers")
async def test_secrets_of_a_trainer_are_for_its_owner_alone(tmp_path: Path) -> None:
    async with running(tmp_path / "local") as plain:
        trainer = {"name": "t", "command": ["x"], "directory": "/d", "env": {"PLACE": "very-secret"}}
        body = {"spec": {"model": "m", "trainer": "t"}, "trainer": trainer}
        assert (await (await plain.with_role("researcher")).post("/v1/jobs", json=body)).status_code == 200
        assert "very-secret" not in (await (await plain.with_role("viewer")).get("/v1/trainers")).text


@pytest.mark.attack("hub: resources", "M12: a researcher sets the priority of a job to a million")
async def test_a_researcher_cannot_put_a_job_before_all_others(tmp_path: Path) -> None:
    async with running(tmp_path / "local") as plain:
        trainer = {"name": "t", "command": ["x"], "directory": "/d"}
        body = {"spec": {"model": "m", "trainer": "t", "priority": 1_000_000}, "trainer": trainer}
        assert (await (await plain.with_role("researcher")).post("/v1/jobs", json=body)).status_code in (400, 403)


@pytest.mark.attack(AREA, "L7: a first request of a browser without TLS, after it was here with it")
async def test_a_browser_is_told_to_stay_with_tls(site: Running, tmp_path: Path) -> None:
    for path in ("/login", "/v1/health", "/v1/jobs"):
        said = (await (await site.client()).get(path)).headers["strict-transport-security"]
        assert said == "max-age=31536000", path
    async with running(tmp_path / "plain") as plain:
        assert "strict-transport-security" not in (await (await plain.client()).get("/login")).headers
