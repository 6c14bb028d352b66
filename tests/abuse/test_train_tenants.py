"""Tenant B against tenant A, over every route of the training server that takes an id.

What belongs to A is to B as if it had never been: the same status and the same words as for an id that nobody has.
"""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save

from strata.base.clock import SystemClock
from strata.http.route import Route
from strata.train.api.routes import ROUTES
from strata.train.api.server import APIServer
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core import model_options
from strata.train.peft.importer import stage
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG
from strata.train.wire.grants import ArchiveGrant, sign_token
from strata.web.lone import server_pages
from tests.abuse.owners import changing, check_rules, free, named, served_routes
from tests.shell.train_api.test_protocol import BASE, Client, Server, new_client, served
from tests.shell.train_api.test_sampling import sampler_of, wanted
from tests.shell.train_orchestrator.stacks import running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
Tries = Callable[[int], None]
AREA: Final = "training server: tenant B against tenant A"
NOBODY: Final = "nobody"
Ids = Mapping[str, str]
Attempt = tuple[str, str, Callable[[Ids], Any]]
"""Method, path with names of ids in braces, and the body for them."""


@dataclass
class Field:
    server: Server
    ids: dict[str, str] = field(default_factory=dict)
    """Of A; but the project is of B."""
    seq_ids: Iterator[int] = field(default_factory=lambda: count(1))
    """Of the model of B: a number that is left out would let all after it wait for ever."""

    @property
    def a(self) -> Client:
        return self.server.alice

    @property
    def b(self) -> Client:
        return self.server.bob

    def unknown(self) -> dict[str, str]:
        """The same ids, of a session that nobody has."""
        ids = {name: value.replace(self.ids["session"], NOBODY) for name, value in self.ids.items()}
        return ids | {"rollout": f"rollout_{NOBODY}"}


@asynccontextmanager
async def playing(folder: Path) -> AsyncIterator[Field]:
    async with served(folder) as server:
        found = Field(server)
        alice = server.alice
        session = await alice.open()
        passed = await alice.post("forward_backward", alice.batch(1))
        await alice.done(passed)
        saved = await alice.done(
            await alice.post("save_weights", {"model_id": alice.model, "seq_id": 2, "path": "mine"})
        )
        place_files(server)
        sampler = await sampler_of(alice, session)
        sample = await alice.post("asample", wanted(sampler))
        await alice.done(sample)
        rollout = await alice.send("POST", "/v1/rollout_sessions", json={})
        found.ids = {
            "rollout": rollout.json()["id"],
            "session": session,
            "model": alice.model,
            "future": passed["request_id"],
            "sample": sample["request_id"],
            "sampler": sampler,
            "path": saved["path"],
            "project": "bob",
        }
        server.bob.model = ""
        await server.bob.open()
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Field]:
    async with playing(tmp_path_factory.mktemp("t")) as found:
        yield found


def place_files(server: Server) -> None:
    """Ranks that pretend save nothing that could be fetched."""
    (folder,) = server.stack.settings.checkpoint_folder.glob("*/weights/mine@2")
    shutil.rmtree(folder)
    lora = model_options.LoraConfig(rank=4)
    manifest = CheckpointManifest(
        model_id=server.alice.model, seq_id=2, kind="weights", base_model=BASE, arch=BASE, lora=lora, steps=0
    )
    stage(folder, manifest, {ADAPTER: save({"x": np.zeros(2, np.float32)}), ADAPTER_CONFIG: b"{}"})


def step(ids: Ids) -> Any:
    return {"model_id": ids["model"], "seq_id": 9, "adam_params": {"learning_rate": 1.0}}


def batch(ids: Ids, key: str = "forward_backward_input") -> Any:
    data = {"data": [{"model_input": {"chunks": [{"tokens": [1, 2]}]}}], "loss_fn": "cross_entropy"}
    return {key: data, "model_id": ids["model"], "seq_id": 9}


def nothing(ids: Ids) -> None:
    del ids


def post(path: str, body: Callable[[Ids], Any]) -> Attempt:
    return ("POST", f"/api/v1/{path}", body)


def get(path: str) -> Attempt:
    return ("GET", f"/api/v1/{path}", nothing)


CHECKPOINT: Final = "training_runs/{model}/checkpoints/weights/mine"
ATTACKS: Final[Mapping[str, Sequence[Attempt]]] = {
    "retrieve_future of a pass": [post("retrieve_future", lambda ids: {"request_id": ids["future"]})],
    "retrieve_future of a sample": [post("retrieve_future", lambda ids: {"request_id": ids["sample"]})],
    "cancel_future": [
        post("cancel_future", lambda ids: {"request_id": ids["future"]}),
        post("cancel_future", lambda ids: {"request_id": ids["sample"]}),
    ],
    "retrieve_futures of a sampler": [
        post("retrieve_futures", lambda ids: {"target": {"sampling_session_id": ids["sampler"]}, "timeout": 0.1})
    ],
    "forward_backward on the model": [post("forward_backward", batch)],
    "forward on the model": [post("forward", lambda ids: batch(ids, "forward_input"))],
    "optim_step on the model": [post("optim_step", step)],
    "abort the gradients": [post("abort_gradient_epoch", lambda ids: {"model_id": ids["model"], "seq_id": 9})],
    "get_info and models/{id}": [post("get_info", lambda ids: {"model_id": ids["model"]}), get("models/{model}")],
    "sessions/{id}": [get("sessions/{session}")],
    "the trace and the project of the session": [
        get("sessions/{session}/trace_export"),
        ("PUT", "/api/v1/sessions/{session}/project", lambda ids: {"project_id": ids["project"]}),
    ],
    "copy_weights": [
        post("copy_weights", lambda ids: {"source_path": ids["path"], "destination_project_id": ids["project"]}),
    ],
    "session_heartbeat": [post("session_heartbeat", lambda ids: {"session_id": ids["session"]})],
    "create_model in the session": [
        post(
            "create_model",
            lambda ids: {
                "session_id": ids["session"],
                "model_seq_id": 5,
                "base_model": BASE,
                "lora_config": {"rank": 4},
            },
        )
    ],
    "create_sampling_session in the session": [
        post(
            "create_sampling_session",
            lambda ids: {"session_id": ids["session"], "sampling_session_seq_id": 5, "base_model": BASE},
        )
    ],
    "save_weights, and save for sampling": [
        post("save_weights", lambda ids: {"model_id": ids["model"], "seq_id": 9, "path": "theirs"}),
        post(
            "save_weights_for_sampler",
            lambda ids: {"model_id": ids["model"], "seq_id": 9, "path": "theirs", "sampling_session_seq_id": 7},
        ),
    ],
    "load_weights into the model of another": [
        post("load_weights", lambda ids: {"model_id": ids["model"], "seq_id": 9, "path": ids["path"]})
    ],
    "sample with the sampler of another": [
        post("asample", lambda ids: wanted(ids["sampler"], 5)),
        get("samplers/{sampler}"),
        post("join_sampling_session", lambda ids: {"sampling_session_id": ids["sampler"]}),
    ],
    "weights_info and list_checkpoints": [
        post("weights_info", lambda ids: {"tinker_path": ids["path"]}),
        post("list_checkpoints", lambda ids: {"model_id": ids["model"]}),
    ],
    "the run and its checkpoints": [
        get("training_runs/{model}"),
        get("training_runs/{model}/checkpoints"),
        get("training_runs/{model}/metrics"),
        get("training_runs/{model}/curves"),
        get("rollouts?model={model}"),
        get("rollouts/{future}"),
        ("POST", "/api/v1/training_runs/{model}/curves", lambda _: {"values": {"reward": 1.0}}),
        ("POST", "/api/v1/training_runs/{model}/replay", lambda _: {"action": "accept"}),
    ],
    "publish the checkpoint": [
        ("POST", f"/api/v1/{CHECKPOINT}/publish", nothing),
        ("DELETE", f"/api/v1/{CHECKPOINT}/publish", nothing),
    ],
    "the time of a checkpoint": [("PUT", f"/api/v1/{CHECKPOINT}/ttl", lambda _: {"ttl_seconds": 1})],
    "archive and external_weights_urls": [get(f"{CHECKPOINT}/archive"), get(f"{CHECKPOINT}/external_weights_urls")],
    "a rollout session, and the models below its path": [
        ("GET", "/v1/rollout_sessions/{rollout}", nothing),
        ("GET", "/v1/rollout_sessions/{rollout}/models", nothing),
        ("DELETE", "/v1/rollout_sessions/{rollout}", nothing),
    ],
    "the timeline of an operation": [get("futures/{future}/timeline"), get("futures/{sample}/timeline")],
    # Last, because the owner tries all of them in this order.
    "unload_model": [post("unload_model", lambda ids: {"model_id": ids["model"]})],
    "delete_checkpoint": [
        post("delete_checkpoint", lambda ids: {"model_id": ids["model"], "checkpoint_id": "mine"}),
        ("DELETE", f"/api/v1/{CHECKPOINT}", nothing),
    ],
    "finish the session": [post("sessions/{session}/finish", lambda _: {"reason": {"type": "success"}})],
    "kill the session": [post("kill_session", lambda ids: {"session_id": ids["session"]})],
}
ELSEWHERE: Final = frozenset(
    {
        # Attacked below, in other words than with the id of another.
        "/api/v1/session_info",
        "/api/v1/sessions/search",
        # In test_train_loss_graphs.
        "/api/v1/create_custom_loss",
        # In test_train_completions.
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models/{model:path}",
        "/v1/rollout_sessions/{session_id}/chat/completions",
        "/v1/rollout_sessions/{session_id}/completions",
        "/api/v1/load_weights",
        "/api/v1/sync_inference_weights",
        "/api/v1/save_weights_external",
    }
)
NOT_DONE: Final = {
    "weights.remove": (404, "the attempt before it has deleted the only checkpoint"),
    "runs.resolve": (422, "no replay has stopped the model"),
}
"""What its owner may do, and cannot."""
NO_TENANT: Final = frozenset(
    {
        "/api/v1/create_session",
        # Ids of keys, of files of the base model and of endpoints: they belong to no tenant.
        "/v1/key/{id}/revoke",
        "/hf/{repository:path}/resolve/{revision}/{file}",
    }
)


def shape(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub(r"checkpoints/(\{[^}]*\}|weights/mine)", "checkpoints/{}", re.sub(r"\{[^}]*\}", "{}", path))


@pytest.mark.parametrize("attempt", ATTACKS, ids=lambda name: re.sub(r"\W+", "-", name))
@pytest.mark.attack(AREA, "an id of another over a route that takes one")
async def test_what_belongs_to_another_is_as_if_it_had_never_been(played: Field, attempt: str, tries: Tries) -> None:
    for method, path, body in ATTACKS[attempt]:
        heard = []
        for ids in (played.ids, played.unknown()):
            reply = await played.b.send(method, path.format(**ids), json=body(ids))
            text = reply.text
            for value in sorted(ids.values(), key=len, reverse=True):
                text = text.replace(value, "ID")
            heard.append((reply.status_code, re.sub(r'"request_id":"[^"]*"', "", text).replace(ids["session"], "ID")))
        assert heard[0] == heard[1], (method, path)
        assert heard[0][0] == 404, (method, path, heard[0])
        tries(2)


@pytest.mark.attack(AREA, "a route that takes an id and that no attack is for")
async def test_every_route_that_takes_an_id_is_attacked() -> None:
    attacked = {(method, shape(path)) for attempts in ATTACKS.values() for method, path, _ in attempts}
    for route in ROUTES:
        body = route.signature().body
        names = [each.name for each in msgspec.structs.fields(body)] if hasattr(body, "__struct_fields__") else []
        takes = "{" in route.path or any(name.endswith(("_id", "tinker_path")) or name == "target" for name in names)
        raw = route.path in ("/api/v1/forward_backward", "/api/v1/forward")
        if (takes or raw) and route.path not in (ELSEWHERE | NO_TENANT):
            assert (route.method, shape(route.path)) in attacked, route.path


FREE_ROUTES: Final = {
    "POST /api/v1/get_info",
    "POST /api/v1/sessions/search",
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/telemetry",
    "POST /api/v1/weights_info",
    "POST /api/v1/list_checkpoints",
    "POST /api/v1/auth/token",
    "POST /login",
}
"""What is of no tenant: whoever adds a route here has seen that it changes nothing that is."""


@pytest.mark.attack(AREA, "a new route that changes something, without a word on whose it is")
async def test_every_route_that_changes_something_says_whose_it_is(tmp_path: Path, tries: Tries) -> None:
    async with (
        running(tmp_path) as stack,
        APIServer(stack.settings, SystemClock()).application(stack.client, server_pages) as root,
    ):
        served = served_routes(root)
    check_rules(served, tries)
    assert free(served) == FREE_ROUTES
    of_pages = {named(each) for each in changing(served)} - {named(each) for each in changing(ROUTES)}
    assert of_pages == {"POST /login", "POST /logout", "POST /playground"}, "in tests/abuse/test_hub_owners.py"
    attacked = {(method, shape(path)) for attempts in ATTACKS.values() for method, path, _ in attempts}
    for route in changing(ROUTES):
        if route.owner == "tenant" and route.path not in ELSEWHERE:
            assert (route.method, shape(route.path)) in attacked, named(route)


@pytest.mark.attack(AREA, "every attempt as a viewer; its owner may")
async def test_what_a_tenant_may_change_of_its_own_is_refused_to_a_viewer(tmp_path: Path, tries: Tries) -> None:
    rules: Mapping[tuple[str, str], Route] = {(route.method, shape(route.path)): route for route in changing(ROUTES)}
    attempts = [
        (name, rules[method, shape(path)], path, body)
        for name, several in ATTACKS.items()
        for method, path, body in several
        if (method, shape(path)) in rules
    ]
    async with playing(tmp_path) as field:
        made = await field.server.operator.send("POST", "/v1/keys", json={"name": "eve", "role": "viewer"})
        eve = Client(field.b.http, made.json()["secret"])
        for name, route, path, body in attempts:
            if route.owner == "tenant":
                reply = await eve.send(route.method, path.format(**field.ids), json=body(field.ids))
                assert reply.status_code == 403, (name, reply.text)
                tries(1)
        own, seq_ids = field.ids | {"project": "alice"}, count(3)
        for name, route, path, body in attempts:
            sent = body(own)
            if sent is not None and "seq_id" in sent:
                sent |= {"seq_id": next(seq_ids)}
            reply = await field.a.send(route.method, path.format(**own), json=sent)
            status, _ = NOT_DONE.get(route.name, (reply.status_code, ""))
            assert (reply.is_success, reply.status_code) == (route.name not in NOT_DONE, status), (name, reply.text)


@pytest.mark.attack(AREA, "the key of another, revoked as one's own; a session in another's name")
async def test_what_each_caller_has_is_out_of_reach_for_others(played: Field, tries: Tries) -> None:
    rows = {route.name for route in changing(ROUTES) if route.owner == "caller"}
    # Where an adapter is put is attacked in test_train_content.
    assert rows == {"sessions.create", "account.revoke_key", "archive.take", "rollout_sessions.open_session"}
    made = await played.server.operator.send("POST", "/v1/keys", json={"name": "mallory", "role": "researcher"})
    mallory = Client(played.b.http, made.json()["secret"])
    pretended = {"X-Strata-Tenant": "alice"}
    opened = await mallory.send("POST", "/api/v1/create_session", json={}, headers=pretended)
    assert opened.json()["session_id"] not in (await played.a.send("GET", "/api/v1/sessions")).text
    assert (await mallory.send("DELETE", "/api/v1/auth/apikey/me", headers=pretended)).is_success
    assert [(await each.send("GET", "/api/v1/sessions")).status_code for each in (mallory, played.a)] == [401, 200]
    tries(2)


@pytest.mark.attack(AREA, "load_weights into a model of one's own")
async def test_weights_of_another_are_not_loaded_into_a_model_of_ones_own(played: Field) -> None:
    body = {"model_id": played.b.model, "seq_id": next(played.seq_ids), "path": played.ids["path"], "optimizer": True}
    failed = await played.b.done(await played.b.post("load_weights", body))
    unknown = body | {"seq_id": next(played.seq_ids), "path": played.unknown()["path"]}
    other = await played.b.done(await played.b.post("load_weights", unknown))
    assert failed["category"] == other["category"] == "user"
    assert failed["error"].replace(played.ids["session"], "") == other["error"].replace(NOBODY, "")


@pytest.mark.attack(AREA, "load_weights as a new model")
async def test_weights_of_another_do_not_make_a_new_model(played: Field) -> None:
    session = played.b.model.partition(":")[0]
    heard = []
    for number, path in enumerate((played.ids["path"], played.unknown()["path"])):
        body = {"path": path, "session_id": session, "model_seq_id": 40 + number, "base_model": BASE}
        reply = await played.b.send("POST", "/api/v1/load_weights", json=body)
        text = reply.text
        if reply.status_code == 200:
            done = await played.b.done(reply.json())
            assert "error" in done
            text = done["error"]
        heard.append((reply.status_code, text.replace(played.ids["session"], NOBODY)))
    assert heard[0] == heard[1]


@pytest.mark.attack(AREA, "a sampler of the other's weights")
async def test_weights_of_another_are_not_sampled_from(played: Field) -> None:
    session = played.b.model.partition(":")[0]
    heard = []
    for number, path in enumerate((played.ids["path"], played.unknown()["path"])):
        body = {"session_id": session, "sampling_session_seq_id": 60 + number, "model_path": path}
        reply = await played.b.send("POST", "/api/v1/create_sampling_session", json=body)
        heard.append((reply.status_code, reply.text.replace(played.ids["session"], NOBODY)))
    assert heard[0] == heard[1]
    assert heard[0][0] in (400, 404)


@pytest.mark.attack(AREA, "session_info with the session of another")
async def test_session_info_shows_nothing_of_another(played: Field) -> None:
    reply = await played.b.send("GET", f"/api/v1/session_info?session_id={played.ids['session']}")
    assert reply.status_code == 404 or reply.json()["sessions"] == []


@pytest.mark.attack(AREA, "search for the session of another")
async def test_a_search_finds_nothing_of_another(played: Field, tries: Tries) -> None:
    bodies: list[dict[str, Any]] = [
        {"session_id": played.ids["session"]},
        {"session_id": played.ids["session"], "owner": {"type": "accessible"}},
        {"owner": {"type": "user", "owner_urns": ["key:alice"]}},
        {"project_ids": ["alice"]},
    ]
    for body in bodies:
        assert await played.b.post("sessions/search", body) == {"sessions": [], "next_cursor": None}
        tries(1)


@pytest.mark.attack(AREA, "sync_inference_weights by a researcher and by an operator of another name")
async def test_weights_of_another_are_not_synced(played: Field, tries: Tries) -> None:
    body = {"model_id": played.ids["model"], "seq_id": 9}
    assert (await played.b.send("POST", "/api/v1/sync_inference_weights", json=body)).status_code == 403
    made = await played.server.operator.send("POST", "/v1/keys", json={"name": "eve", "role": "operator"})
    eve = Client(played.b.http, made.json()["secret"])
    assert (await eve.send("POST", "/api/v1/sync_inference_weights", json=body)).status_code == 404
    tries(2)


@pytest.mark.attack(AREA, "save_weights_external to an address of one's own")
async def test_weights_are_not_saved_to_an_address(played: Field) -> None:
    body = {
        "model_id": played.ids["model"],
        "seq_id": 9,
        "path": "x",
        "external_urls": {},
        "url": "http://127.0.0.1:1/",
    }
    reply = await played.b.send("POST", "/api/v1/save_weights_external", json=body)
    assert reply.status_code >= 400


@pytest.mark.attack(AREA, "lists of sessions, models, checkpoints and runs")
async def test_lists_have_nothing_of_another(played: Field, tries: Tries) -> None:
    for path in ("sessions", "session_info", "training_runs", "checkpoints", "training_runs?limit=1000&offset=0"):
        reply = await played.b.send("GET", f"/api/v1/{path}")
        assert reply.status_code == 200
        assert played.ids["session"] not in reply.text, path
        tries(1)


@pytest.mark.attack(AREA, "names of tenants in status and metrics")
async def test_status_and_metrics_do_not_name_other_tenants(played: Field, tries: Tries) -> None:
    for path in ("/api/v1/status", "/api/v1/activity", "/api/v1/throughput", "/metrics", "/health", "/openapi.json"):
        reply = await played.b.send("GET", path)
        assert reply.status_code == 200, path
        assert "alice" not in reply.text, path
        assert played.ids["session"] not in reply.text, path
        tries(1)


@pytest.mark.attack(AREA, "the trace of everybody's operations")
async def test_a_researcher_gets_no_trace(played: Field) -> None:
    assert (await played.b.send("GET", "/api/v1/trace")).status_code == 403


async def token_of(played: Field) -> str:
    """Of an address that A was given for its archive."""
    reply = await played.a.send("GET", f"/api/v1/{CHECKPOINT.format(**played.ids)}/external_weights_urls")
    assert reply.status_code == 200, reply.text
    url = str(next(iter(reply.json()["urls"].values())))
    return parse_qs(urlsplit(url).query)["token"][0]


@pytest.mark.attack(AREA, "an archive address: bit flips")
async def test_an_address_with_any_bit_flipped_is_not_valid(played: Field, tries: Tries) -> None:
    token = await token_of(played)
    raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    for place in range(0, len(raw), 3):
        flipped = bytearray(raw)
        flipped[place] ^= 1
        other = base64.urlsafe_b64encode(bytes(flipped)).decode().rstrip("=")
        assert (await played.b.http.get("/api/v1/archive", params={"token": other})).status_code == 403
        tries(1)


@pytest.mark.parametrize("forged", ["cut", "zero MAC", "empty key", "no ASCII", "another folder"])
@pytest.mark.attack(AREA, "an archive address that was forged")
async def test_a_forged_address_is_not_valid(played: Field, forged: str) -> None:
    token = await token_of(played)
    grant = ArchiveGrant("../../../etc", "passwd", 9e9)
    said = msgspec.msgpack.encode(grant)
    made = {
        "cut": token[:-5],
        "zero MAC": base64.urlsafe_b64encode(bytes(32) + said).decode().rstrip("="),
        "empty key": sign_token(grant, b""),
        "no ASCII": "é" * 40,
        "another folder": token[:43] + base64.urlsafe_b64encode(said).decode().rstrip("="),
    }[forged]
    assert (await played.b.http.get("/api/v1/archive", params={"token": made})).status_code in (400, 403)


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"X-Forwarded-Proto": "gopher"}, {"Host": "a b/c?d#e"}])
@pytest.mark.attack(AREA, "Host and X-Forwarded-Proto in addresses")
async def test_an_address_in_a_reply_is_the_callers_own_alone(played: Field, headers: dict[str, str]) -> None:
    """Whoever lies about the host is told the lie, and nobody else is: nothing of it is kept."""
    at = f"/api/v1/{CHECKPOINT.format(**played.ids)}/archive"
    lied = await played.a.send("GET", at, headers=headers)
    assert lied.status_code in (302, 400)
    plain = await played.a.send("GET", at)
    assert plain.headers["location"].startswith("http://server/api/v1/archive?token=")


@pytest.mark.attack(AREA, "a checkpoint saved into the namespace of another")
async def test_a_name_cannot_reach_into_another_run(played: Field, tries: Tries) -> None:
    for name in (f"{played.ids['model']}/weights/mine", played.ids["path"], "../mine", f"..%2f{played.ids['model']}"):
        body = {"model_id": played.b.model, "seq_id": next(played.seq_ids), "path": name}
        done = await played.b.done(await played.b.post("save_weights", body))
        assert done["category"] == "user", name
        tries(1)
    assert (await played.a.post("weights_info", {"tinker_path": played.ids["path"]}))["base_model"] == BASE


@pytest.mark.attack(AREA, "a key of the same name but for case and spaces")
async def test_a_name_that_looks_like_another_is_another_tenant(played: Field, tries: Tries) -> None:
    for name in ("Alice", "alice ", "ALICE", "аlice"):  # noqa: RUF001 - the last one begins with a Cyrillic letter
        made = await played.server.operator.send("POST", "/v1/keys", json={"name": name, "role": "researcher"})
        if made.status_code == 200:
            other = Client(played.b.http, made.json()["secret"])
            await other.post("get_info", {"model_id": played.ids["model"]}, 404)
        tries(1)


@pytest.mark.proves(
    "Never again: webhooks to NAT64, 6to4 and IPv4-compatible addresses were judged public; archive "
    "addresses outlived their key"
)
@pytest.mark.attack(AREA, "an archive address after its key was revoked")
async def test_an_address_ends_with_the_key_that_asked_for_it(played: Field) -> None:
    mallory = await new_client(played.server.operator, "alice")
    at = f"/api/v1/{CHECKPOINT.format(**played.ids)}/external_weights_urls"
    url = next(iter((await mallory.send("GET", at)).json()["urls"].values()))
    token = parse_qs(urlsplit(url).query)["token"][0]
    assert (await played.b.http.get("/api/v1/archive", params={"token": token})).status_code == 200
    keys = (await played.server.operator.send("GET", "/v1/keys")).json()["keys"]
    newest = max((each for each in keys if each["name"] == "alice"), key=lambda each: each["made_at_s"])
    assert (await played.server.operator.send("POST", f"/v1/key/{newest['id']}/revoke")).status_code == 204
    assert (await mallory.send("GET", at)).status_code == 401
    assert (await played.b.http.get("/api/v1/archive", params={"token": token})).status_code == 403


@pytest.mark.attack(AREA, "after all of it: what A has is as it was")
async def test_nothing_of_a_was_harmed(played: Field) -> None:
    info = await played.a.post("weights_info", {"tinker_path": played.ids["path"]})
    assert info["base_model"] == BASE
    stepped = await played.a.done(
        await played.a.post("optim_step", {"model_id": played.ids["model"], "seq_id": 3, "adam_params": {}})
    )
    assert stepped["metrics"]["step"] == 1.0
    assert (await played.a.post("session_heartbeat", {"session_id": played.ids["session"]}))["type"]
