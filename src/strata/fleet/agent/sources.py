"""Where the code of a job comes from: a folder of the host, a commit of a repository, an uploaded bundle.

A commit or a bundle is kept as one tar file, which the agent writes and never reads into; the process of the job's user
unpacks it for each attempt, so that two jobs never meet in one folder. A file gets its name when it is whole: attempts
that need the same source at once fetch it twice, and the second replaces the first with the same bytes.

A commit that another user than the agent's checks out is not kept: other jobs of that user can change what it writes,
and nothing says whether they did. Each attempt fetches it anew.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.fleet.agent import git
from strata.fleet.agent.job_input import Checkout, FindFolder, Unpack
from strata.fleet.agent.lease_paths import PathName, artifact_id, blob_digest, bundle_name, commit_name
from strata.fleet.agent.unpack import MAX_MEMBERS, MAX_UNPACKED
from strata.fleet.agent.unprivileged import feed, receive
from strata.fleet.agent.workdir import Owner, Place
from strata.fleet.core.jobspec import TrainerSpec

_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Fetch:
    """How bytes come from the hub."""

    artifact: Callable[[str], Iterable[bytes]]
    """The files of an artifact as a tar file."""
    blob: Callable[[str], bytes]


def code_of(trainer: TrainerSpec) -> str:
    """What lineage records as the code: the commit or the bundle; a folder has no name of its own."""
    return trainer.commit or trainer.bundle


def provide(
    trainer: TrainerSpec,
    place: Place,
    cache: Path,
    fetch: Fetch,
    *,
    environ: Mapping[str, str],
    owner: Owner | None = None,
) -> Path:
    """The folder the job starts in: that of the place, with the source in it, or the host's own folder."""
    if trainer.directory:
        feed(FindFolder(path=trainer.directory), owner)
        return Path(trainer.directory)
    if trainer.git:
        name = commit_name(trainer.git, trainer.commit)
        protocols = git.LOCAL if owner is None else git.REMOTE
        git.check_url(trainer.git, protocols)
        request = Checkout(
            url=trainer.git, commit=trainer.commit, scratch=str(place.tmp), protocols=protocols, environ=environ
        )
        if owner is None:
            pieces = _pieces(_keep(cache, name, lambda: receive(request, None, MAX_UNPACKED)))
        else:
            pieces = receive(request, owner, MAX_UNPACKED)
    else:
        pieces = _pieces(_keep(cache, bundle_name(trainer.bundle), lambda: _bundle(trainer.bundle, fetch)))
    with closing(pieces):
        feed(unpacking(place.source, any_link=bool(trainer.git)), owner, pieces)
    return place.source


def unpacking(
    target: Path, *, max_bytes: int = MAX_UNPACKED, max_members: int = MAX_MEMBERS, any_link: bool = False
) -> Unpack:
    return Unpack(target=str(target), max_bytes=max_bytes, max_members=max_members, any_link=any_link)


def _keep(cache: Path, name: PathName, fetch: Callable[[], Iterable[bytes]]) -> Path:
    """The file of this name, fetched if it is not there."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = cache / name
    if kept.is_file():
        # When it was last used: what nobody uses is thrown away one day.
        os.utime(kept)
        return kept
    partial = cache / f".{name}.{secrets.token_hex(8)}.partial"
    try:
        with partial.open("xb") as file:
            for piece in fetch():
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(kept)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return kept


def _bundle(bundle: str, fetch: Fetch) -> Iterable[bytes]:
    digest = blob_digest(bundle)
    if not digest:
        return _bounded(fetch.artifact(artifact_id(bundle)))
    content = fetch.blob(digest)
    if sha256_hex(content) != digest:
        raise StrataError(Code.CORRUPT, f"what was fetched as the source {digest} is something else")
    return (content,)


def _bounded(pieces: Iterable[bytes]) -> Iterator[bytes]:
    received = 0
    for piece in pieces:
        received += len(piece)
        if received > MAX_UNPACKED:
            raise StrataError(Code.PRECONDITION, f"the source has more than {MAX_UNPACKED} bytes")
        yield piece


def _pieces(path: Path) -> Generator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
