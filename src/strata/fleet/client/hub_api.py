"""The routes of the hub that agents call, one blocking method for each, all idempotent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata import __version__
from strata.fleet.artifacts.manifest import ArtifactManifest, Lineage
from strata.fleet.client.hub_client import HubClient, transfer
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import Cause
from strata.fleet.core.samples import HostSample
from strata.fleet.wire.artifacts import (
    ArtifactReply,
    ChunkQuery,
    CommitReply,
    CommitRequest,
    MissingChunk,
    MissingReply,
    MissingRequest,
)
from strata.fleet.wire.execs import ExecEndRequest, ExecGiven, ExecStartRequest
from strata.fleet.wire.hosts import RegisterReply, RegisterRequest
from strata.fleet.wire.jobs import Job
from strata.fleet.wire.leases import (
    ClaimReply,
    ClaimRequest,
    CompleteRequest,
    FailRequest,
    HeartbeatsReply,
    HeartbeatsRequest,
    LeaseGiven,
    LeaseHeld,
    PartsReply,
    PartsRequest,
    PublishRequest,
)
from strata.fleet.wire.streams import PieceQuery, PieceReply

PIECE: Final = 1024 * 1024
"""Bytes of a stream in one request: small enough for a slow line to send within the request timeout."""


class HubApi:
    def __init__(self, client: HubClient) -> None:
        self.client = client

    def register(self, capability: Capability) -> RegisterReply:
        body = RegisterRequest(capability=capability, agent_version=__version__)
        return self.client.call("POST", "/v1/host/register", RegisterReply, body=body)

    def leave(self) -> None:
        """Remove this host from the fleet, and end its credentials."""
        self.client.call("POST", "/v1/host/leave", type(None))

    def claim(self, claim_id: str, count: int, wait_s: float) -> tuple[LeaseGiven, ...]:
        body = ClaimRequest(claim_id=claim_id, count=count, wait_s=wait_s)
        reply = self.client.call("POST", "/v1/job/claim", ClaimReply, body=body, timeout_s=wait_s + 15.0)
        return reply.leases

    def renew(
        self, held: tuple[LeaseHeld, ...], sample: HostSample | None = None, incarnation: str = ""
    ) -> HeartbeatsReply:
        body = HeartbeatsRequest(leases=held, sample=sample, incarnation=incarnation)
        return self.client.call("POST", "/v1/heartbeats", HeartbeatsReply, body=body, timeout_s=10.0)

    def complete(self, lease: LeaseGiven, body: CompleteRequest) -> Job:
        return self.client.call("POST", f"/v1/job/{lease.job_id}/complete", Job, body=body)

    def fail(self, lease: LeaseGiven, cause: Cause, error: str, facts: dict[str, object]) -> Job:
        body = FailRequest(epoch=lease.epoch, cause=cause, error=error, facts=facts)
        return self.client.call("POST", f"/v1/job/{lease.job_id}/fail", Job, body=body)

    def publish(self, lease: LeaseGiven, body: PublishRequest) -> None:
        """Say where the server of this attempt serves."""
        self.client.call("PUT", f"/v1/job/{lease.job_id}/server", type(None), body=body)

    def find_parts(self, lease: LeaseGiven, parts: Mapping[str, str]) -> tuple[str, ...]:
        """The artifacts that have these parts of a checkpoint of the gang together; none if one is missing."""
        body = PartsRequest(epoch=lease.epoch, parts=parts)
        return self.client.call("POST", f"/v1/job/{lease.job_id}/parts", PartsReply, body=body).artifacts

    def append(self, lease: LeaseGiven, stream: str, offset: int, piece: bytes, *, last: bool = False) -> int:
        """Returns how many bytes of the stream the hub has now: `log`, `metrics`, or `exec/ID`."""
        query = PieceQuery(epoch=lease.epoch, offset=offset, last=last)
        path = f"/v1/job/{lease.job_id}/{stream}"
        return self.client.send("PUT", path, piece, PieceReply, query=query).size

    def start_exec(self, lease: LeaseGiven, exec_id: str, run: str) -> ExecGiven:
        body = ExecStartRequest(run=run)
        return self.client.call("POST", f"/v1/job/{lease.job_id}/exec/{exec_id}/start", ExecGiven, body=body)

    def end_exec(self, lease: LeaseGiven, exec_id: str, body: ExecEndRequest) -> None:
        self.client.call("POST", f"/v1/job/{lease.job_id}/exec/{exec_id}/end", type(None), body=body)

    def missing(self, chunks: dict[str, int]) -> tuple[MissingChunk, ...]:
        body = MissingRequest(chunks=chunks)
        return self.client.call("POST", "/v1/chunks/missing", MissingReply, body=body).missing

    def put_chunk(self, chunk: MissingChunk, content: bytes) -> None:
        if chunk.url:
            transfer("PUT", chunk.url, content)
            return
        query = ChunkQuery(size=chunk.size, offset=chunk.received)
        self.client.send("PUT", f"/v1/chunk/{chunk.digest}", content[chunk.received :], type(None), query=query)

    def commit(self, lease: LeaseGiven, manifest: ArtifactManifest, lineage: Lineage) -> str:
        body = CommitRequest(manifest=manifest, lineage=lineage, job_id=lease.job_id, epoch=lease.epoch)
        return self.client.call("POST", "/v1/artifacts", CommitReply, body=body, timeout_s=120.0).artifact_id

    def artifact(self, artifact_id: str) -> ArtifactReply:
        return self.client.call("GET", f"/v1/artifact/{artifact_id}", ArtifactReply)

    def chunk(self, digest: str, url: str = "") -> bytes:
        return transfer("GET", url) if url else self.client.fetch(f"/v1/chunk/{digest}").content

    def source(self, sha256: str) -> bytes:
        return self.client.fetch(f"/v1/source/{sha256}", timeout_s=300.0).content
