"""The routes of the hub that agents and artifacts need: one blocking method for each, idempotent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata import __version__
from strata.fleet import wire
from strata.fleet.artifacts.manifest import ArtifactManifest, Lineage
from strata.fleet.client.hub_client import HubClient, transfer
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import Cause
from strata.fleet.core.samples import HostSample
from strata.fleet.wire import LeaseGiven

PIECE: Final = 1024 * 1024
"""Bytes of a stream in one request: small enough for a slow line to send within the request timeout."""


class HubApi:
    def __init__(self, client: HubClient) -> None:
        self.client = client

    def register(self, capability: Capability) -> wire.RegisterReply:
        body = wire.RegisterRequest(capability=capability, agent_version=__version__)
        return self.client.call("POST", "/v1/host/register", wire.RegisterReply, body=body)

    def claim(self, claim_id: str, count: int, wait_s: float) -> tuple[LeaseGiven, ...]:
        body = wire.ClaimRequest(claim_id=claim_id, count=count, wait_s=wait_s)
        reply = self.client.call("POST", "/v1/job/claim", wire.ClaimReply, body=body, timeout_s=wait_s + 15.0)
        return reply.leases

    def renew(
        self, held: tuple[wire.LeaseHeld, ...], sample: HostSample | None = None, incarnation: str = ""
    ) -> wire.HeartbeatsReply:
        body = wire.HeartbeatsRequest(leases=held, sample=sample, incarnation=incarnation)
        return self.client.call("POST", "/v1/heartbeats", wire.HeartbeatsReply, body=body, timeout_s=10.0)

    def complete(self, lease: LeaseGiven, body: wire.CompleteRequest) -> wire.Job:
        return self.client.call("POST", f"/v1/job/{lease.job_id}/complete", wire.Job, body=body)

    def fail(self, lease: LeaseGiven, cause: Cause, error: str, facts: dict[str, object]) -> wire.Job:
        body = wire.FailRequest(epoch=lease.epoch, cause=cause, error=error, facts=facts)
        return self.client.call("POST", f"/v1/job/{lease.job_id}/fail", wire.Job, body=body)

    def publish(self, lease: LeaseGiven, body: wire.PublishRequest) -> None:
        """Say where the server of this attempt serves."""
        self.client.call("PUT", f"/v1/job/{lease.job_id}/server", type(None), body=body)

    def find_parts(self, lease: LeaseGiven, parts: Mapping[str, str]) -> tuple[str, ...]:
        """The artifacts that have these parts of a checkpoint of the gang together; none if one is missing."""
        body = wire.PartsRequest(epoch=lease.epoch, parts=parts)
        return self.client.call("POST", f"/v1/job/{lease.job_id}/parts", wire.PartsReply, body=body).artifacts

    def append(self, lease: LeaseGiven, stream: str, offset: int, piece: bytes, *, last: bool = False) -> int:
        """How many bytes of the stream the hub has now: `log`, `metrics`, or `exec/ID`."""
        query = wire.PieceQuery(epoch=lease.epoch, offset=offset, last=last)
        path = f"/v1/job/{lease.job_id}/{stream}"
        return self.client.send("PUT", path, piece, wire.PieceReply, query=query).size

    def start_exec(self, lease: LeaseGiven, exec_id: str, run: str) -> wire.ExecGiven:
        body = wire.ExecStartRequest(run=run)
        return self.client.call("POST", f"/v1/job/{lease.job_id}/exec/{exec_id}/start", wire.ExecGiven, body=body)

    def end_exec(self, lease: LeaseGiven, exec_id: str, body: wire.ExecEndRequest) -> None:
        self.client.call("POST", f"/v1/job/{lease.job_id}/exec/{exec_id}/end", type(None), body=body)

    def missing(self, chunks: dict[str, int]) -> tuple[wire.MissingChunk, ...]:
        body = wire.MissingRequest(chunks=chunks)
        return self.client.call("POST", "/v1/chunks/missing", wire.MissingReply, body=body).missing

    def put_chunk(self, chunk: wire.MissingChunk, content: bytes) -> None:
        if chunk.url:
            transfer("PUT", chunk.url, content)
            return
        query = wire.ChunkQuery(size=chunk.size, offset=chunk.received)
        self.client.send("PUT", f"/v1/chunk/{chunk.digest}", content[chunk.received :], type(None), query=query)

    def commit(self, lease: LeaseGiven, manifest: ArtifactManifest, lineage: Lineage) -> str:
        body = wire.CommitRequest(manifest=manifest, lineage=lineage, job_id=lease.job_id, epoch=lease.epoch)
        return self.client.call("POST", "/v1/artifacts", wire.CommitReply, body=body, timeout_s=120.0).artifact_id

    def artifact(self, artifact_id: str) -> wire.ArtifactReply:
        return self.client.call("GET", f"/v1/artifact/{artifact_id}", wire.ArtifactReply)

    def chunk(self, digest: str, url: str = "") -> bytes:
        return transfer("GET", url) if url else self.client.fetch(f"/v1/chunk/{digest}").content

    def source(self, sha256: str) -> bytes:
        return self.client.fetch(f"/v1/source/{sha256}", timeout_s=300.0).content
