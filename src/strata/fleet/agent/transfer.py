"""Folders to the hub and back: ask what is missing, send that, commit. An interruption costs one chunk."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.calls import Calls
from strata.fleet.artifacts.files import Tree, fetch_file, has_files, pieces, read_piece, scan
from strata.fleet.artifacts.manifest import Limits, Lineage, Manifest, check_manifest
from strata.fleet.wire import LeaseGiven

_ROUNDS = 3


def upload(
    calls: Calls, folder: Tree, lease: LeaseGiven, lineage: Lineage, *, wanted: Callable[[], bool] = lambda: True
) -> str:
    """The id of the artifact, or empty if the folder has no file. `wanted` is asked before each chunk."""
    if not has_files(folder):
        return ""
    # A link in an output folder is a shortcut of the trainer's, to a checkpoint of its own perhaps; files are results.
    manifest = scan(folder, links="skip")
    send(calls, folder, manifest, wanted)
    failpoint("agent.upload.sent")
    for _ in range(_ROUNDS):
        try:
            return calls.commit(lease, manifest, lineage)
        except StrataError as error:
            if error.code is not Code.PRECONDITION:
                raise
            # The hub lost a chunk, or found it damaged, since it was sent.
            send(calls, folder, manifest, wanted)
    return calls.commit(lease, manifest, lineage)


def send(calls: Calls, folder: Path | Tree, manifest: Manifest, wanted: Callable[[], bool]) -> None:
    missing = {chunk.digest: chunk for chunk in calls.missing(manifest.chunks())}
    for piece in pieces(manifest, missing):
        if not wanted():
            raise StrataError(Code.STALE, "nobody wants this upload any more")
        calls.put_chunk(missing[piece.digest], read_piece(folder, piece))
        failpoint("agent.upload.chunk")


def download(calls: Calls, artifact_id: str) -> Iterator[bytes]:
    """The files of an artifact as a tar file, for the process of the job's user to unpack. Every byte is verified."""
    reply = calls.artifact(artifact_id)
    manifest = check_manifest(reply.manifest, Limits())
    for file in manifest.files:
        member = tarfile.TarInfo(file.path)
        member.size, member.mode = file.size, int(file.mode, 8)
        yield member.tobuf(tarfile.PAX_FORMAT)
        yield from fetch_file(file, lambda digest, _: calls.chunk(digest, reply.urls.get(digest, "")))
        yield bytes(-file.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
