"""Datasets of the hub: push, list, find, pull; names and owners, and their errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.progress import ReportProgress, no_progress
from strata.fleet.artifacts.files import materialise, scan
from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.client.artifact_transfer import send_missing_chunks
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.jobspec import DATASET, DataSource
from strata.fleet.core.requirement import Label
from strata.fleet.wire.artifacts import (
    ArtifactRecord,
    ArtifactReply,
    ArtifactsQuery,
    ArtifactsReply,
    CommitReply,
    CommitRequest,
    LatestQuery,
)
from strata.fleet.wire.base import MAX_PAGE
from strata.fleet.wire.identities import CallerReply

ReportData: TypeAlias = Callable[[ArtifactRecord], None]


@dataclass(frozen=True, kw_only=True)
class PushedData:
    artifact_id: str
    files: int
    size: int
    sent: int
    """Bytes that the hub did not have."""


def push_data(client: HubClient, folder: Path, name: str, report: ReportProgress = no_progress) -> PushedData:
    """Upload a folder; from now on the name stands for it. Progress is reported in bytes."""
    try:
        msgspec.convert(name, Label)
    except msgspec.ValidationError:
        raise StrataError(
            Code.INVALID, f"{name!r} cannot be the name of data", hint="strata data push FOLDER NAME"
        ) from None
    _check_name(client, name)
    hub = HubApi(client)
    manifest = scan(folder)
    sent = send_missing_chunks(hub, folder, manifest, lambda: True, report)
    # An upload is a record of its own, also of content that was uploaded before: the name stands for the newest.
    upload = f"{time.time_ns():x}"
    body = CommitRequest(manifest=manifest, lineage=Lineage(kind=ArtifactKind.DATA, model=name, mode=upload))
    reply = client.call("POST", "/v1/artifacts", CommitReply, body=body, timeout_s=120.0)
    size = sum(file.size for file in manifest.files)
    return PushedData(artifact_id=reply.artifact_id, files=len(manifest.files), size=size, sent=sent)


def _check_name(client: HubClient, name: str) -> None:
    """FORBIDDEN if the hub would refuse the upload when all of it is there."""
    uploads = list_uploads(client, name, limit=1)
    caller = client.call("GET", "/v1/caller", CallerReply)
    if uploads and uploads[0].owner != caller.owner and caller.role not in ("operator", "admin"):
        raise StrataError(
            Code.FORBIDDEN, f"the data {name!r} belongs to {uploads[0].owner}", hint="choose another name for yours"
        )


def list_uploads(client: HubClient, name: str = "", limit: int = MAX_PAGE) -> tuple[ArtifactRecord, ...]:
    """The newest first."""
    query = ArtifactsQuery(model=name, kind=ArtifactKind.DATA, limit=limit)
    return client.call("GET", "/v1/artifacts", ArtifactsReply, query=query).artifacts


def find_data(client: HubClient, name: str) -> ArtifactRecord:
    """The artifact that a name stands for; NOT_FOUND if nothing was uploaded under it."""
    query = LatestQuery(model=name, kind=ArtifactKind.DATA)
    try:
        return client.call("GET", "/v1/artifacts/latest", ArtifactRecord, query=query)
    except StrataError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise StrataError(Code.NOT_FOUND, f"there is no data {name!r}", hint="strata data push FOLDER NAME") from None


def pull_artifact(client: HubClient, reply: ArtifactReply, target: Path, report: ReportProgress = no_progress) -> None:
    """Download into a new folder and verify every byte. Progress is reported in bytes."""
    hub, fetched = HubApi(client), 0

    def fetch(digest: str, size: int) -> bytes:
        nonlocal fetched
        content = hub.chunk(digest, reply.urls.get(digest, ""))
        fetched += size
        report(fetched, reply.size)
        return content

    materialise(reply.manifest, fetch, target)


def named_data(client: HubClient, names: Iterable[str], report: ReportData = lambda _: None) -> dict[str, DataSource]:
    """Datasets by name, as a trainer declares them. `report` gets what each name stands for."""
    return resolve_data(client, {name: DataSource(source=f"{DATASET}{name}") for name in names}, report)


def resolve_data(
    client: HubClient, sources: Mapping[str, DataSource], report: ReportData = lambda _: None
) -> dict[str, DataSource]:
    """The sources of a trainer, with the artifact of each dataset that does not name one."""

    def resolved(source: DataSource) -> DataSource:
        if not source.dataset or source.digest:
            return source
        made = find_data(client, source.dataset)
        report(made)
        return msgspec.structs.replace(source, digest=made.artifact_id)

    return {label: resolved(source) for label, source in sources.items()}
