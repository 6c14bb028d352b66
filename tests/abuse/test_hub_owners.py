"""What belongs to one researcher, in the hands of another."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from strata.fleet import wire
from tests.shell.fleet_http.running import Running, ok, refused, running

Tries = Callable[[int], None]
AREA = "hub: owners"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "hub") as started:
        yield started


async def push(person: httpx.AsyncClient, name: str, content: bytes, upload: str = "1") -> httpx.Response:
    """As `strata data push` does, but for what its client checks."""
    digest = hashlib.sha256(content).hexdigest()
    assert (await person.put(f"/v1/chunk/{digest}?size={len(content)}", content=content)).status_code == 204
    file = {"path": "train.csv", "sha256": digest, "size": len(content), "chunks": [digest]}
    lineage = {"kind": "data", "model": name, "mode": upload}
    return await person.post("/v1/artifacts", json={"manifest": {"files": [file]}, "lineage": lineage})


@pytest.mark.attack(AREA, "data under the name of another researcher's data")
async def test_the_data_of_a_name_is_never_another_owners(site: Running, tries: Tries) -> None:
    anna, rob = await site.with_role("researcher", "anna"), await site.with_role("researcher", "rob")
    hers = ok(await push(anna, "images", b"good"), wire.CommitReply).artifact_id
    for content in (b"poison", b"good"):
        tries(1)
        refusal = await push(rob, "images", content, "2")
        assert (refused(refusal), "belongs to anna" in refusal.text) == ((403, "forbidden"), True)
    latest = {"model": "images", "kind": "data"}
    made = ok(await rob.get("/v1/artifacts/latest", params=latest), wire.Made)
    assert (made.artifact_id, made.owner) == (hers, "anna")
    ok(await push(rob, "mine", b"good"), wire.CommitReply)
    ok(await push(anna, "images", b"better", "2"), wire.CommitReply)
    renewed = await site.with_role("researcher", "anna")
    ok(await push(renewed, "images", b"best", "3"), wire.CommitReply)
