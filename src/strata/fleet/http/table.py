"""Every endpoint of the hub. What hosts ask all the time stands first, because the router looks in this order."""

from __future__ import annotations

from typing import Final

from strata.fleet.http import about, artifacts, events, hosts, identities, jobs, leases, logs, manifests
from strata.http.declare import (
    ADMIN,
    HOST,
    KIB,
    MIB,
    OPERATOR,
    PUBLIC,
    READER,
    RESEARCHER,
    UPLOADER,
    VIEWER,
    Endpoint,
)

_BLOB: Final = 1 << 40

TABLE: Final = (
    # Hosts
    Endpoint("POST", "/v1/heartbeats", HOST, leases.heartbeats, 512 * KIB),
    Endpoint("POST", "/v1/job/claim", HOST, leases.claim),
    Endpoint("PUT", "/v1/job/{id}/log", HOST, logs.put_log, 4 * MIB),
    Endpoint("PUT", "/v1/job/{id}/metrics", HOST, logs.put_metrics, 4 * MIB),
    Endpoint("POST", "/v1/job/{id}/heartbeat", HOST, leases.heartbeat),
    Endpoint("POST", "/v1/job/{id}/complete", HOST, leases.complete, 1 * MIB),
    Endpoint("POST", "/v1/job/{id}/fail", HOST, leases.fail, 1 * MIB),
    Endpoint("POST", "/v1/host/register", HOST, leases.register, 256 * KIB),
    Endpoint("POST", "/v1/host/leave", HOST, leases.leave),
    Endpoint("POST", "/v1/certificate/renew", HOST, identities.renew),
    # Bytes
    Endpoint("PUT", "/v1/chunk/{digest}", UPLOADER, artifacts.put_chunk, 8 * MIB),
    Endpoint("GET", "/v1/chunk/{digest}", READER, artifacts.get_chunk),
    Endpoint("POST", "/v1/chunks/missing", UPLOADER, artifacts.missing, 16 * MIB),
    Endpoint("POST", "/v1/artifacts", UPLOADER, artifacts.commit, 16 * MIB),
    Endpoint("PUT", "/v1/model/{id}", HOST, artifacts.put_model, _BLOB),
    Endpoint("GET", "/v1/model/{id}", READER, artifacts.get_model),
    Endpoint("PUT", "/v1/source/{id}", RESEARCHER, artifacts.put_source, _BLOB),
    Endpoint("GET", "/v1/source/{id}", READER, artifacts.get_source),
    # Jobs
    Endpoint("GET", "/v1/jobs", READER, jobs.listed, public_read=True),
    Endpoint("POST", "/v1/jobs", RESEARCHER, jobs.submit, 1 * MIB),
    Endpoint("GET", "/v1/job/{id}", READER, jobs.show),
    Endpoint("GET", "/v1/job/{id}/why", VIEWER, jobs.why),
    Endpoint("GET", "/v1/job/{id}/log", VIEWER, logs.log),
    Endpoint("GET", "/v1/job/{id}/metrics", VIEWER, logs.metrics),
    Endpoint("POST", "/v1/job/{id}/cancel", RESEARCHER, jobs.cancel),
    Endpoint("POST", "/v1/job/{id}/requeue", RESEARCHER, jobs.requeue),
    Endpoint("GET", "/v1/status", READER, jobs.status),
    Endpoint("POST", "/v1/manifest", OPERATOR, manifests.apply, 32 * MIB),
    Endpoint("POST", "/v1/manifest/reload", OPERATOR, manifests.reload),
    Endpoint("GET", "/v1/trainers", READER, manifests.trainers),
    Endpoint("GET", "/v1/events", VIEWER, events.events),
    # Hosts, for people
    Endpoint("GET", "/v1/workers", READER, hosts.listed, public_read=True),
    Endpoint("POST", "/v1/hosts/local", OPERATOR, identities.add_local),
    Endpoint("GET", "/v1/host/{id}", READER, hosts.show),
    Endpoint("POST", "/v1/host/{id}/drain", OPERATOR, hosts.drain),
    Endpoint("POST", "/v1/host/{id}/pause", OPERATOR, hosts.pause),
    Endpoint("POST", "/v1/host/{id}/resume", OPERATOR, hosts.resume),
    Endpoint("POST", "/v1/host/{id}/revoke", OPERATOR, hosts.revoke),
    # Artifacts, for people
    Endpoint("GET", "/v1/artifacts", READER, artifacts.listed),
    Endpoint("GET", "/v1/artifacts/latest", READER, artifacts.latest),
    Endpoint("GET", "/v1/artifacts/best", READER, artifacts.best),
    Endpoint("GET", "/v1/artifact/{id}", READER, artifacts.show),
    Endpoint("DELETE", "/v1/artifact/{id}", OPERATOR, artifacts.remove),
    Endpoint("GET", "/v1/artifact/{id}/lineage", READER, artifacts.ancestry),
    Endpoint("GET", "/v1/artifact/{id}/file", READER, artifacts.file),
    Endpoint("GET", "/v1/artifact/{id}/bundle.tar.zst", READER, artifacts.bundle),
    Endpoint("POST", "/v1/artifact/{id}/pin", RESEARCHER, artifacts.pin),
    Endpoint("GET", "/v1/export/index.jsonl", VIEWER, artifacts.index),
    Endpoint("GET", "/v1/export/{name}/{sha256}/bundle.tar.zst", VIEWER, artifacts.exported),
    # Identity
    Endpoint("POST", "/v1/invites", OPERATOR, identities.invite),
    Endpoint("GET", "/v1/invites", OPERATOR, identities.invites),
    Endpoint("POST", "/v1/invite/{id}/revoke", OPERATOR, identities.revoke_invite),
    Endpoint("GET", "/v1/caller", READER, identities.caller),
    Endpoint("POST", "/v1/keys", ADMIN, identities.add_key),
    Endpoint("GET", "/v1/keys", ADMIN, identities.keys),
    Endpoint("POST", "/v1/key/{id}/revoke", ADMIN, identities.revoke_key),
    Endpoint("POST", "/v1/join", PUBLIC, identities.join, 20 * KIB),
    Endpoint("GET", "/v1/ca", PUBLIC, identities.authority),
    Endpoint("GET", "/v1/health", PUBLIC, about.health),
    Endpoint("GET", "/v1/openapi.json", READER, about.openapi),
)
