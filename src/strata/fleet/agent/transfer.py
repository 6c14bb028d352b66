"""Folders to the hub and back: ask what is missing, send that, commit. An interruption costs one chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.calls import Calls
from strata.fleet.artifacts.files import materialise, pieces, read_piece, scan
from strata.fleet.artifacts.manifest import Lineage, Manifest
from strata.fleet.wire import LeaseGiven

_ROUNDS = 3


def upload(
    calls: Calls, folder: Path, lease: LeaseGiven, lineage: Lineage, *, wanted: Callable[[], bool] = lambda: True
) -> str:
    """The id of the artifact, or empty if the folder has no file. `wanted` is asked before each chunk."""
    if not any(path.is_file() and not path.is_symlink() for path in folder.rglob("*")):
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


def send(calls: Calls, folder: Path, manifest: Manifest, wanted: Callable[[], bool]) -> None:
    missing = {chunk.digest: chunk for chunk in calls.missing(manifest.chunks())}
    for piece in pieces(manifest, missing):
        if not wanted():
            raise StrataError(Code.STALE, "nobody wants this upload any more")
        calls.put_chunk(missing[piece.digest], read_piece(folder, piece))
        failpoint("agent.upload.chunk")


def download(calls: Calls, artifact_id: str, target: Path) -> None:
    """The files of an artifact in a folder that appears whole, or not at all."""
    found = calls.artifact(artifact_id)
    materialise(found.manifest, lambda digest, _: calls.chunk(digest, found.urls.get(digest, "")), target)
