"""Uploads and downloads folders as artifacts: queries the missing chunks, sends them, commits, and retries a commit up
to three times.

An interruption costs one chunk.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.base.progress import ReportProgress, no_progress
from strata.fleet.artifacts.files import Tree, fetch_file, has_files, pieces, read_piece, scan
from strata.fleet.artifacts.manifest import ArtifactLimits, ArtifactManifest, Lineage, check_manifest
from strata.fleet.client.hub_api import HubApi
from strata.fleet.wire.leases import LeaseGiven

_COMMIT_ROUNDS = 3


def upload_folder(
    hub: HubApi, folder: Tree, lease: LeaseGiven, lineage: Lineage, *, wanted: Callable[[], bool] = lambda: True
) -> str:
    """The id of the artifact, or empty if the folder has no file. `wanted` is called before each chunk."""
    if not has_files(folder):
        return ""
    # A symbolic link in an output folder is a shortcut of the trainer, perhaps to a checkpoint; only files are results.
    manifest = scan(folder, links="skip")
    send_missing_chunks(hub, folder, manifest, wanted)
    failpoint("agent.upload.sent")
    for _ in range(_COMMIT_ROUNDS):
        try:
            return hub.commit(lease, manifest, lineage)
        except StrataError as error:
            if error.code is not Code.PRECONDITION:
                raise
            # Since it was sent, the hub lost a chunk or found it damaged.
            send_missing_chunks(hub, folder, manifest, wanted)
    return hub.commit(lease, manifest, lineage)


def send_missing_chunks(
    hub: HubApi,
    folder: Path | Tree,
    manifest: ArtifactManifest,
    wanted: Callable[[], bool],
    report: ReportProgress = no_progress,
) -> int:
    """The number of bytes that the hub did not have."""
    missing = {chunk.digest: chunk for chunk in hub.missing(manifest.chunks())}
    sent, total = 0, sum(chunk.size - chunk.received for chunk in missing.values())
    report(sent, total)
    for piece in pieces(manifest, missing):
        if not wanted():
            raise StrataError(Code.STALE, "the attempt was dropped: the upload is cancelled")
        hub.put_chunk(missing[piece.digest], read_piece(folder, piece))
        sent += missing[piece.digest].size - missing[piece.digest].received
        report(sent, total)
        failpoint("agent.upload.chunk")
    return total


def download_as_tar(hub: HubApi, artifact_id: str) -> Iterator[bytes]:
    """Stream an artifact as a tar file, which the process of the job's user unpacks. Every byte is verified."""
    reply = hub.artifact(artifact_id)
    manifest = check_manifest(reply.manifest, ArtifactLimits())
    for file in manifest.files:
        member = tarfile.TarInfo(file.path)
        member.size, member.mode = file.size, int(file.mode, 8)
        yield member.tobuf(tarfile.PAX_FORMAT)
        yield from fetch_file(file, lambda digest, _: hub.chunk(digest, reply.urls.get(digest, "")))
        yield bytes(-file.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
