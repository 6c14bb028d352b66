"""Where a hub keeps artifacts, and for how long: settings of the process, seen over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import obstore

from strata.base.digest import sha256_hex
from strata.base.settings import Secret
from strata.fleet.artifacts.retention import RetentionPolicy
from strata.fleet.wire.artifacts import ArtifactsReply, CommitReply
from strata.hub.settings import BucketSettings
from tests.shell.fleet_http.running import Running, ok, running
from tests.support.s3 import S3Server


async def test_a_hub_with_a_bucket_keeps_chunks_there_and_serves_them(tmp_path: Path) -> None:
    with S3Server() as server:
        bucket = server.create_bucket()
        settings = BucketSettings(
            name=bucket,
            prefix="fleet",
            endpoint=server.endpoint,
            region=server.region,
            access_key=server.access_key,
            secret_key=Secret(server.secret_key),
        )
        async with running(tmp_path, bucket=settings) as site:
            researcher = await site.with_role("researcher")
            content = b"weights" * 1000
            await _commit(site, content)
            blob = await researcher.get(f"/v1/chunk/{sha256_hex(content)}")
            assert blob.content == content
        stored = [each["path"] for page in obstore.list(server.store(bucket)) for each in page]
        assert [path for path in stored if sha256_hex(content) in path]
        assert all(path.startswith("fleet/") for path in stored)
    assert not list(tmp_path.rglob(f"*{sha256_hex(content)}*"))


async def test_what_the_policy_does_not_keep_is_gone_after_the_hourly_round(tmp_path: Path) -> None:
    policy = RetentionPolicy(keep_last=0, keep_sources=1, min_age_s=0)
    async with running(tmp_path, retention=policy) as site:
        for text in (b"one", b"two", b"three"):
            await _commit(site, text)
        assert len(await _listed(site)) == 3
        for loop in site.hub.loops:
            await loop.run_once()
        (left,) = await _listed(site)
        found = await (await site.operator()).get(f"/v1/artifact/{left}/file", params={"path": "state"})
        assert found.content == b"three"


async def test_without_a_policy_everything_is_kept(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        for text in (b"one", b"two"):
            await _commit(site, text)
        for loop in site.hub.loops:
            await loop.run_once()
        assert len(await _listed(site)) == 2


async def _commit(site: Running, content: bytes) -> None:
    researcher = await site.with_role("researcher")
    digest = sha256_hex(content)
    assert (await researcher.put(f"/v1/chunk/{digest}", params={"size": len(content)}, content=content)).is_success
    file = {"path": "state", "size": len(content), "sha256": digest, "chunks": [digest]}
    body = {"manifest": {"files": [file]}, "lineage": {"kind": "source", "model": "m"}}
    ok(await researcher.post("/v1/artifacts", json=body), CommitReply)


async def _listed(site: Running) -> Sequence[str]:
    reply = await (await site.operator()).get("/v1/artifacts")
    return [made.artifact_id for made in ok(reply, ArtifactsReply).artifacts]
