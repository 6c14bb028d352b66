"""Provides the source code of a job: a folder of the host, a git commit, or an uploaded bundle, cached as one tar file
and checked by digest.

A commit or a bundle is cached as one tar file, which the agent writes and never parses; the process of the job's user
unpacks it for each attempt, so that two jobs never share a folder. A file gets its final name when it is complete:
attempts that need the same source at once fetch it twice, and the second replaces the first with the same bytes.

A commit that is checked out by another user than the agent's is not cached: other jobs of that user can change what it
writes, and the agent cannot detect that. Each attempt fetches it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.atomic import write_file
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.fleet.agent import git
from strata.fleet.agent.attempt_folder import AttemptPaths, JobUser
from strata.fleet.agent.path_names import PathName, artifact_id, blob_digest, bundle_name, commit_name
from strata.fleet.agent.privsep import run_with_input, stream_output
from strata.fleet.agent.privsep_worker import CheckFolderExists, CheckoutCommit, UnpackArchive
from strata.fleet.agent.unpack import MAX_MEMBERS, MAX_UNPACKED
from strata.fleet.core.jobspec import TrainerSpec

_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceFetcher:
    """Downloads from the hub."""

    artifact: Callable[[str], Iterable[bytes]]
    """The files of an artifact as a tar file."""
    blob: Callable[[str], bytes]


def code_version(trainer: TrainerSpec) -> str:
    """The code that lineage records: the commit or the bundle; empty for a folder of the host."""
    return trainer.commit or trainer.bundle


def provide_source(
    trainer: TrainerSpec,
    paths: AttemptPaths,
    cache: Path,
    fetch: SourceFetcher,
    *,
    environ: Mapping[str, str],
    job_user: JobUser | None = None,
) -> Path:
    """The folder the job starts in: the attempt's copy of the source, or a folder of the host."""
    if trainer.directory:
        run_with_input(CheckFolderExists(path=trainer.directory), job_user)
        return Path(trainer.directory)
    if trainer.git:
        name = commit_name(trainer.git, trainer.commit)
        protocols = git.LOCAL if job_user is None else git.REMOTE
        git.check_url(trainer.git, protocols)
        request = CheckoutCommit(
            url=trainer.git, commit=trainer.commit, scratch=str(paths.tmp), protocols=protocols, environ=environ
        )
        if job_user is None:
            pieces = _read_pieces(_cached(cache, name, lambda: stream_output(request, None, MAX_UNPACKED)))
        else:
            pieces = stream_output(request, job_user, MAX_UNPACKED)
    else:
        pieces = _read_pieces(_cached(cache, bundle_name(trainer.bundle), lambda: _fetch_bundle(trainer.bundle, fetch)))
    with closing(pieces):
        run_with_input(unpack_request(paths.source, any_link=bool(trainer.git)), job_user, pieces)
    return paths.source


def unpack_request(
    target: Path, *, max_bytes: int = MAX_UNPACKED, max_members: int = MAX_MEMBERS, any_link: bool = False
) -> UnpackArchive:
    return UnpackArchive(target=str(target), max_bytes=max_bytes, max_members=max_members, any_link=any_link)


def _cached(cache: Path, name: PathName, fetch: Callable[[], Iterable[bytes]]) -> Path:
    """The file of this name in the cache; fetched if it is absent."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = cache / name
    if path.is_file():
        # The time of the last use: `prune_work_folder` removes what has not been used for long.
        os.utime(path)
        return path
    write_file(path, fetch())
    return path


def _fetch_bundle(bundle: str, fetch: SourceFetcher) -> Iterable[bytes]:
    digest = blob_digest(bundle)
    if not digest:
        return _limit_bytes(fetch.artifact(artifact_id(bundle)))
    content = fetch.blob(digest)
    if sha256_hex(content) != digest:
        raise StrataError(Code.CORRUPT, f"the source {digest} was fetched with other content")
    return (content,)


def _limit_bytes(pieces: Iterable[bytes]) -> Iterator[bytes]:
    received = 0
    for piece in pieces:
        received += len(piece)
        if received > MAX_UNPACKED:
            raise StrataError(Code.PRECONDITION, f"the source has more than {MAX_UNPACKED} bytes")
        yield piece


def _read_pieces(path: Path) -> Generator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
