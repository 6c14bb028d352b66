"""Keys, usage, sessions, traces, published and copied checkpoints: read with the types of the `tinker` SDK."""

from __future__ import annotations

import base64
import hmac
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save
from tinker import types
from tinker.cli.auth_api import SelfApiKeyResponse

from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core import model_options
from strata.train.peft.importer import stage
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG
from strata.train.wire.grants import verify_token
from tests.shell.train_api.test_protocol import BASE, Client, Server, new_client, served
from tests.shell.train_api.test_sampling import sampler_of, wanted

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with served(tmp_path_factory.mktemp("t")) as found:
        await found.bob.open()
        yield found


def hours() -> dict[str, str]:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return {
        "starting_on": (now - timedelta(hours=1)).isoformat(),
        "ending_before": (now + timedelta(hours=1)).isoformat(),
    }


async def used(client: Client) -> types.BillingUsageResponse:
    reply = await client.http.get("/api/v1/billing/usage/events", params=hours(), headers={"X-API-Key": client.key})
    assert reply.status_code == 200, reply.text
    return types.BillingUsageResponse.model_validate(reply.json())


async def saved(server: Server, client: Client, seq: int, name: str) -> str:
    """The path of a checkpoint with real files: ranks that pretend save none that could be read."""
    done = await client.done(await client.post("save_weights", {"model_id": client.model, "seq_id": seq, "path": name}))
    (folder,) = server.stack.settings.checkpoint_folder.glob(f"*/weights/{name}@{seq}")
    shutil.rmtree(folder)
    manifest = CheckpointManifest(
        model_id=client.model,
        seq_id=seq,
        kind="weights",
        base_model=BASE,
        arch=BASE,
        lora=model_options.LoraConfig(rank=4),
        steps=0,
    )
    stage(folder, manifest, {ADAPTER: save({"x": np.zeros(2, np.float32)}), ADAPTER_CONFIG: b"{}"})
    return str(done["path"])


def checkpoint(path: str) -> str:
    run, _, name = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{name}"


async def test_a_key_shows_itself_and_can_end_itself(server: Server) -> None:
    leaver = await new_client(server.operator, "leaver")
    shown = SelfApiKeyResponse.model_validate(await leaver.get("auth/apikey/me"))
    assert shown.name == "leaver"
    assert leaver.key not in str(shown)
    assert (await leaver.send("DELETE", "/api/v1/auth/apikey/me")).status_code == 204
    assert (await leaver.send("GET", "/api/v1/auth/apikey/me")).status_code == 401
    assert (await server.bob.send("GET", "/api/v1/auth/apikey/me")).status_code == 200


async def test_usage_is_what_the_operations_of_the_tenant_cost(server: Server) -> None:
    user = await new_client(server.operator, "user")
    session = await user.open()
    assert (await used(user)).data == []
    await user.done(await user.post("forward_backward", user.batch(1, [1, 2, 3], [4, 5])))
    await user.done(await user.post("save_weights", {"model_id": user.model, "seq_id": 2, "path": "one"}))
    sampler = await sampler_of(user, session)
    request = wanted(sampler)
    answer = await user.done(await user.post("asample", request))
    usage = await used(user)
    infos = {event.event_info.type: event.event_info for event in usage.data}
    assert {event.session_id for event in usage.data} == {session} == set(usage.sessions)
    prompt = sum(len(chunk["tokens"]) for chunk in request["prompt"]["chunks"])
    sampled = sum(len(sequence["tokens"]) for sequence in answer["sequences"])
    assert infos["training"] == types.TrainingBillingEvent(token_count=5)
    assert infos["sampling_prefill"] == types.SamplingPrefillBillingEvent(cached=False, token_count=prompt)
    assert infos["sampling_sample"] == types.SamplingSampleBillingEvent(token_count=sampled)
    assert infos["checkpoint"] == types.CheckpointBillingEvent(count=1)
    assert all(event.session_id != session for event in (await used(server.bob)).data)
    stored = types.CurrentCheckpointStorageUsageResponse.model_validate(
        await user.get("billing/usage/checkpoints/current")
    )
    assert [item.checkpoint_count for item in stored.data] == [1]


@pytest.mark.parametrize(
    "window",
    [
        {"starting_on": "2026-01-01T00:30:00Z", "ending_before": "2026-01-01T01:00:00Z"},
        {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-31T00:00:00Z"},
        {"starting_on": "2026-01-01T00:00:00", "ending_before": "2026-01-01T01:00:00"},
        {"starting_on": "2200-01-01T00:00:00Z", "ending_before": "2200-01-01T01:00:00Z"},
        {"starting_on": "yesterday", "ending_before": "today"},
    ],
)
async def test_a_window_of_usage_is_whole_hours_of_two_weeks(server: Server, window: dict[str, str]) -> None:
    bob = server.bob
    reply = await bob.http.get("/api/v1/billing/usage/events", params=window, headers={"X-API-Key": bob.key})
    assert reply.status_code == 400, reply.text


async def test_sessions_are_found_by_name_status_and_page(server: Server) -> None:
    finder = await new_client(server.operator, "finder")
    names = ["nightly one", "nightly two", "other"]
    ids = [
        (await finder.post("create_session", {"display_name": name, "user_metadata": {"team": name[0]}}))["session_id"]
        for name in names
    ]
    await finder.send(
        "POST", f"/api/v1/sessions/{ids[2]}/finish", json={"reason": {"type": "errored"}, "detail": "oom"}
    )

    async def found(**request: Any) -> types.SessionSearchResponse:
        body = types.SessionSearchRequest(**request).model_dump(mode="json", exclude_none=True)
        return types.SessionSearchResponse.model_validate(await finder.post("sessions/search", body))

    assert [each.session_id for each in (await found(display_name="NIGHTLY")).sessions] == [ids[1], ids[0]]
    assert [each.session_id for each in (await found(user_metadata={"team": "o"})).sessions] == [ids[2]]
    (ended,) = (await found(statuses=[{"type": "client_finished", "reasons": ["errored"]}])).sessions
    assert ended.status == types.ClientSessionFinished(reason=types.ClientSessionFinishErrored(), detail="oom")
    assert len((await found(statuses=[{"type": "active"}])).sessions) == 2
    assert (await found(project_ids=["elsewhere"])).sessions == []
    page = await found(limit=2)
    assert page.next_cursor is not None
    rest = await found(limit=2, cursor=page.next_cursor)
    assert [each.session_id for each in (*page.sessions, *rest.sessions)] == ids[::-1]
    assert rest.next_cursor is None


async def test_a_session_stays_in_the_project_of_its_tenant(server: Server) -> None:
    session = server.bob.model.partition(":")[0]
    path = f"/api/v1/sessions/{session}/project"
    own = (
        types.SessionSearchResponse.model_validate(await server.bob.post("sessions/search", {})).sessions[0].project_id
    )
    assert (await server.bob.send("PUT", path, json={"project_id": own})).status_code == 204
    other = await server.bob.send("PUT", path, json={"project_id": "archive"})
    assert (other.status_code, own in other.text) == (400, True)


async def test_the_trace_of_a_session_has_its_operations_and_no_others(server: Server) -> None:
    tracer = await new_client(server.operator, "tracer")
    session = await tracer.open()
    await tracer.done(await tracer.post("forward_backward", tracer.batch(1)))
    exported = await tracer.get(f"sessions/{session}/trace_export")
    assert exported["status"] == "ready"
    url = urlsplit(exported["url"])
    reply = await tracer.http.get(f"{url.path}?{url.query}")
    assert reply.status_code == 200
    operations = {event["id"] for event in reply.json()["traceEvents"] if event["ph"] == "b"}
    assert f"{tracer.model}:1" in operations
    assert all(each.startswith(f"{session}:") for each in operations)


async def test_a_published_checkpoint_is_for_all_until_its_owner_takes_it_back(server: Server) -> None:
    owner, reader = await new_client(server.operator, "owner"), await new_client(server.operator, "reader")
    await owner.open()
    session = await reader.open()
    done = await owner.done(await owner.post("save_weights", {"model_id": owner.model, "seq_id": 1, "path": "shared"}))
    path = done["path"]
    load = {"model_id": reader.model, "path": path, "optimizer": True}
    sampler = {"session_id": session, "model_path": path}
    assert (await reader.send("POST", f"/api/v1/{checkpoint(path)}/publish")).status_code == 404
    assert (await owner.send("POST", f"/api/v1/{checkpoint(path)}/publish")).status_code == 204
    assert (await owner.get("checkpoints"))["checkpoints"][0]["public"] is True
    assert (
        types.WeightsInfoResponse.model_validate(await reader.post("weights_info", {"tinker_path": path})).lora_rank
        == 4
    )
    assert (await reader.done(await reader.post("load_weights", load | {"seq_id": 1})))["path"] == path
    await reader.post("create_sampling_session", sampler | {"sampling_session_seq_id": 7})
    assert (await reader.send("DELETE", f"/api/v1/{checkpoint(path)}")).status_code == 404, "only its owner"
    assert (await reader.send("DELETE", f"/api/v1/{checkpoint(path)}/publish")).status_code == 404
    assert (await owner.send("DELETE", f"/api/v1/{checkpoint(path)}/publish")).status_code == 204
    assert (
        "there is no checkpoint"
        in (await reader.done(await reader.post("load_weights", load | {"seq_id": 2})))["error"]
    )
    await reader.post("weights_info", {"tinker_path": path}, 404)


async def test_a_copy_is_a_checkpoint_of_its_own_that_outlives_the_original(server: Server) -> None:
    owner, reader = await new_client(server.operator, "giver"), await new_client(server.operator, "taker")
    await owner.open()
    await reader.open()
    path = await saved(server, owner, 1, "gift")
    request = types.CopyWeightsRequest(source_path=path, destination_project_id="taker").model_dump(exclude_none=True)
    await reader.post("copy_weights", request, 404)
    key = {"X-Tinker-Weights-Access-Token": owner.key, "X-Idempotency-Key": "one"}
    copied = types.CopyWeightsResponse.model_validate(
        await reader.post("copy_weights", request, headers=key)
    ).tinker_path
    again = types.CopyWeightsResponse.model_validate(
        await reader.post("copy_weights", request, headers=key)
    ).tinker_path
    assert copied == again != path
    assert (await owner.send("DELETE", f"/api/v1/{checkpoint(path)}")).status_code in (200, 204)
    files = (await reader.get(f"{checkpoint(copied)}/external_weights_urls"))["urls"]
    url = urlsplit(files[ADAPTER])
    assert (await reader.http.get(f"{url.path}?{url.query}")).content == save({"x": np.zeros(2, np.float32)})
    await owner.post("weights_info", {"tinker_path": copied}, 404)
    wrong = await reader.send("POST", "/api/v1/copy_weights", json=request | {"destination_project_id": "theirs"})
    assert (wrong.status_code, "'taker'" in wrong.text) == (400, True)


async def test_the_first_checkpoint_of_a_model_is_copied_under_another_name(server: Server) -> None:
    owner = await new_client(server.operator, "beginner")
    await owner.open()
    path = await saved(server, owner, 1, "000000")
    request = {"source_path": path, "destination_project_id": "beginner"}
    copied = (await owner.post("copy_weights", request))["tinker_path"]
    assert copied.endswith("/weights/initial")
    await owner.post("weights_info", {"tinker_path": copied})


async def test_an_address_that_an_earlier_version_signed_is_not_valid() -> None:
    key, content = b"k" * 32, msgspec.msgpack.encode(["run/weights/half@3", "", 9e9, ""])
    token = base64.urlsafe_b64encode(hmac.digest(key, content, "sha256") + content).decode().rstrip("=")
    with pytest.raises(StrataError, match="not valid") as refused:
        verify_token(token, key, 0.0)
    assert refused.value.code is Code.FORBIDDEN


async def test_a_key_that_is_not_valid_opens_no_weights(server: Server) -> None:
    owner, reader = await new_client(server.operator, "keeper"), await new_client(server.operator, "thief")
    await owner.open()
    path = await saved(server, owner, 1, "kept")
    request = {"source_path": path, "destination_project_id": "thief"}
    for token in ("tml-000000000000-" + "0" * 40, "nonsense", server.operator.key):
        reply = await reader.send(
            "POST", "/api/v1/copy_weights", json=request, headers={"X-Tinker-Weights-Access-Token": token}
        )
        assert reply.status_code in (401, 403), (token, reply.text)
