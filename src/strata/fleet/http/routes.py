"""The table of every route of the fleet: path, who may call it, and the size limit of its body. `hub.routes` has those
of the hub, and the application that serves them all.

What hosts request all the time stands first, because the router tries the routes in this order.
"""

from __future__ import annotations

from typing import Final

from strata import __version__
from strata.base.errors import Code, StrataError
from strata.fleet.http import (
    artifacts,
    events,
    execs,
    history,
    hosts,
    identities,
    jobs,
    leases,
    logs,
    manifests,
    metrics,
    quotas,
    schedules,
    secrets,
    subscriptions,
    sweeps,
)
from strata.fleet.http.context import HubCall
from strata.fleet.wire.overview import HubHealth
from strata.http.route import (
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
    Route,
)

_BLOB: Final = 1 << 40


async def health(call: HubCall) -> HubHealth:
    """Returns whether this hub takes requests, and can write what they change."""
    context = call.context
    if context.writing.fails:
        raise StrataError(Code.UNAVAILABLE, "the hub cannot write to its database", hint="is the disk full?")
    return HubHealth(status="stopping" if context.stopping.is_set() else "ok", version=__version__)


ROUTES: Final = (
    # Hosts
    Route("POST", "/v1/heartbeats", HOST, leases.heartbeats, 512 * KIB),
    Route("POST", "/v1/job/claim", HOST, leases.claim),
    Route("PUT", "/v1/job/{id}/log", HOST, logs.put_log, 4 * MIB),
    Route("PUT", "/v1/job/{id}/metrics", HOST, logs.put_metrics, 4 * MIB),
    Route("POST", "/v1/job/{id}/heartbeat", HOST, leases.heartbeat),
    Route("POST", "/v1/job/{id}/complete", HOST, leases.complete, 1 * MIB),
    Route("POST", "/v1/job/{id}/fail", HOST, leases.fail, 1 * MIB),
    Route("PUT", "/v1/job/{id}/server", HOST, leases.publish),
    Route("POST", "/v1/job/{id}/parts", HOST, leases.find_parts, 4 * MIB, operation="gangs.find_parts"),
    Route("PUT", "/v1/job/{id}/exec/{exec}", HOST, execs.put_output, 4 * MIB),
    Route("POST", "/v1/job/{id}/exec/{exec}/start", HOST, execs.start),
    Route("POST", "/v1/job/{id}/exec/{exec}/end", HOST, execs.end),
    Route("POST", "/v1/host/register", HOST, leases.register, 256 * KIB),
    Route("POST", "/v1/host/leave", HOST, leases.leave),
    Route("POST", "/v1/certificate/renew", HOST, identities.renew),
    # Bytes
    Route(
        "PUT",
        "/v1/chunk/{digest}",
        UPLOADER,
        artifacts.put_chunk,
        8 * MIB,
        owner="none: a chunk is named by its content",
    ),
    Route("GET", "/v1/chunk/{digest}", READER, artifacts.get_chunk),
    Route(
        "POST",
        "/v1/chunks/missing",
        UPLOADER,
        artifacts.missing,
        16 * MIB,
        owner="none: a chunk is named by its content",
    ),
    Route("POST", "/v1/artifacts", UPLOADER, artifacts.commit, 16 * MIB, owner="data"),
    Route("PUT", "/v1/model/{id}", HOST, artifacts.put_model, _BLOB),
    Route("GET", "/v1/model/{id}", VIEWER, artifacts.get_model),
    Route(
        "PUT",
        "/v1/source/{id}",
        RESEARCHER,
        artifacts.put_source,
        _BLOB,
        owner="none: a source is named by its content",
    ),
    Route("GET", "/v1/source/{id}", READER, artifacts.get_source),
    # Jobs
    Route("GET", "/v1/jobs", READER, jobs.listed, public_read=True),
    Route("POST", "/v1/jobs", RESEARCHER, jobs.submit, 1 * MIB, owner="project"),
    Route("GET", "/v1/job/{id}", READER, jobs.show),
    Route("GET", "/v1/job/{id}/why", VIEWER, jobs.why),
    Route("GET", "/v1/job/{id}/log", VIEWER, logs.log),
    Route("GET", "/v1/job/{id}/metrics", VIEWER, logs.metrics),
    Route("GET", "/v1/job/{id}/timeline", VIEWER, history.timeline),
    Route("GET", "/v1/job/{id}/goodput", VIEWER, history.goodput),
    Route("POST", "/v1/job/{id}/cancel", RESEARCHER, jobs.cancel, owner="job"),
    Route("POST", "/v1/job/{id}/requeue", RESEARCHER, jobs.requeue, owner="job"),
    Route("POST", "/v1/job/{id}/archive", RESEARCHER, jobs.archive, owner="job"),
    Route("POST", "/v1/job/{id}/exec", RESEARCHER, execs.request, 256 * KIB, owner="job"),
    Route("GET", "/v1/job/{id}/exec/{exec}", RESEARCHER, execs.output),
    Route("POST", "/v1/job/{id}/exec/{exec}/cancel", RESEARCHER, execs.cancel, owner="job"),
    Route("GET", "/v1/status", VIEWER, jobs.status),
    Route("GET", "/v1/overview", VIEWER, history.overview),
    Route("GET", "/v1/goodput", VIEWER, history.fleet_goodput),
    Route("POST", "/v1/manifest", RESEARCHER, manifests.apply, 128 * MIB, owner="project"),
    Route("POST", "/v1/manifest/reload", OPERATOR, manifests.reload),
    Route("GET", "/v1/quotas", VIEWER, quotas.listed),
    Route("POST", "/v1/quotas", OPERATOR, quotas.change),
    Route("GET", "/v1/schedules", VIEWER, schedules.listed),
    Route("POST", "/v1/schedule/{project}/{name}/pause", RESEARCHER, schedules.pause, owner="project"),
    Route("POST", "/v1/schedule/{project}/{name}/resume", RESEARCHER, schedules.resume, owner="project"),
    Route("DELETE", "/v1/schedule/{project}/{name}", RESEARCHER, schedules.remove, owner="project"),
    Route("GET", "/v1/sweeps", VIEWER, sweeps.listed),
    Route("GET", "/v1/sweep/{project}/{name:path}", VIEWER, sweeps.show),
    Route("POST", "/v1/sweep/{project}/{name}/stop", RESEARCHER, sweeps.stop, owner="sweep"),
    Route("POST", "/v1/sweep/{project}/{name}/resume", RESEARCHER, sweeps.resume, owner="sweep"),
    Route("GET", "/v1/trainers", VIEWER, manifests.trainers),
    Route("GET", "/v1/events", VIEWER, events.events),
    # Secrets
    Route("PUT", "/v1/secret/{name}", RESEARCHER, secrets.put, 128 * KIB, owner="project"),
    Route("DELETE", "/v1/secret/{name}", RESEARCHER, secrets.remove, owner="project"),
    Route("GET", "/v1/secrets", RESEARCHER, secrets.listed),
    Route("GET", "/v1/subscriptions", RESEARCHER, subscriptions.listed),
    Route("PUT", "/v1/subscription/{name}", RESEARCHER, subscriptions.put, owner="caller"),
    Route("DELETE", "/v1/subscription/{name}", RESEARCHER, subscriptions.remove, owner="caller"),
    Route("POST", "/v1/subscription/{name}/test", RESEARCHER, subscriptions.send_test, owner="caller"),
    # Hosts, for people
    Route("GET", "/v1/workers", READER, hosts.listed, public_read=True),
    Route("GET", "/v1/hosts", VIEWER, hosts.page),
    Route("POST", "/v1/hosts/local", OPERATOR, identities.add_local),
    Route("GET", "/v1/host/{id}", VIEWER, hosts.show),
    Route("GET", "/v1/host/{id}/samples", VIEWER, hosts.samples),
    Route("GET", "/v1/host/{id}/room", VIEWER, hosts.room),
    Route("GET", "/v1/host/{id}/policy", VIEWER, hosts.policy),
    Route("GET", "/v1/host/{id}/plan", OPERATOR, hosts.plan),
    Route("POST", "/v1/host/{id}/drain", OPERATOR, hosts.drain),
    Route("POST", "/v1/host/{id}/pause", OPERATOR, hosts.pause),
    Route("POST", "/v1/host/{id}/resume", OPERATOR, hosts.resume),
    Route("POST", "/v1/host/{id}/revoke", OPERATOR, hosts.revoke),
    # Artifacts, for people
    Route("GET", "/v1/artifacts", VIEWER, artifacts.listed),
    Route("GET", "/v1/artifacts/latest", VIEWER, artifacts.latest),
    Route("GET", "/v1/artifacts/best", VIEWER, artifacts.best),
    Route("GET", "/v1/artifact/{id}", READER, artifacts.show),
    Route("DELETE", "/v1/artifact/{id}", RESEARCHER, artifacts.remove, owner="artifact"),
    Route("GET", "/v1/artifact/{id}/lineage", VIEWER, artifacts.ancestry),
    Route("GET", "/v1/artifact/{id}/file", VIEWER, artifacts.file),
    Route("GET", "/v1/artifact/{id}/bundle.tar.zst", VIEWER, artifacts.bundle),
    Route("POST", "/v1/artifact/{id}/pin", RESEARCHER, artifacts.pin, owner="artifact"),
    Route("GET", "/v1/export/index.jsonl", VIEWER, artifacts.index),
    Route("GET", "/v1/export/{name}/{sha256}/bundle.tar.zst", VIEWER, artifacts.exported),
    # Identity
    Route("POST", "/v1/invites", OPERATOR, identities.invite),
    Route("GET", "/v1/invites", OPERATOR, identities.invites),
    Route("POST", "/v1/invite/{id}/revoke", OPERATOR, identities.revoke_invite),
    Route("POST", "/v1/certificate/coordinator", OPERATOR, identities.certify_coordinator),
    Route("GET", "/v1/caller", READER, identities.caller),
    Route("POST", "/v1/login/code", VIEWER, identities.make_login_code, owner="caller"),
    Route("POST", "/v1/keys", ADMIN, identities.add_key),
    Route("GET", "/v1/keys", ADMIN, identities.keys),
    Route("POST", "/v1/key/{id}/revoke", ADMIN, identities.revoke_key),
    Route("POST", "/v1/join", PUBLIC, identities.join, 20 * KIB, owner="none: an invite makes a new host"),
    Route("GET", "/v1/ca", PUBLIC, identities.authority),
    Route("GET", "/metrics", VIEWER, metrics.expose),
    Route("GET", "/v1/health", PUBLIC, health, operation="about.health"),
)
