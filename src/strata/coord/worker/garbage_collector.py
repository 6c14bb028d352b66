"""Deletes checkpoint parts that no recovery needs any more: the coordinator names them, and only what lies inside
`checkpoint_root` is deleted.

A name is what some worker once reported, so it is not trusted: only what lies inside the one root that this worker's
own settings name is deleted, however the name is spelled and wherever links lead.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.coord.worker.checkpoint_store import SCHEME, MemberCheckpoints
from strata.coord.worker.stores import Stores, local_path, s3_place, translated

if TYPE_CHECKING:
    from obstore.store import S3Store

_log = log.get(__name__)


@dataclass(frozen=True)
class Swept:
    deleted: tuple[str, ...]
    """Not there any more; some may not have been there before."""
    refused: tuple[str, ...]
    """Paths outside the root, which were not deleted."""
    failed: tuple[str, ...]
    """Paths inside that could not be deleted: the next checkpoint names them again."""


class GarbageCollector:
    """Deletes below `root`, a folder or `s3://BUCKET/PREFIX`; without one, nothing.

    The contract has no message for "it is deleted": the coordinator names a part again with every report until its list
    is too long. So a part that does not exist counts as deleted, and is remembered as long as it is named.
    """

    def __init__(self, root: str, stores: Stores, checkpoints: MemberCheckpoints | None = None) -> None:
        """Deletes with `checkpoints` only what lies there: the root is a folder of this host alone."""
        self._root = root
        self._checkpoints = checkpoints
        self._stores = stores
        self._done: set[str] = set()

    def collect(self, named: Iterable[str]) -> Swept:
        """Delete what these names mean: a file, a folder with all that is in it, an object, or all objects below."""
        uris = tuple(dict.fromkeys(named))
        if self._checkpoints is not None:
            uris = tuple(uri for uri in uris if uri.startswith(SCHEME))
        # One that is not named any more was written again, or forgotten.
        self._done &= set(uris)
        deleted: list[str] = []
        refused: list[str] = []
        failed: list[str] = []
        for uri in uris:
            if uri in self._done:
                continue
            try:
                self.delete(uri)
            except StrataError as error:
                (refused if error.code is Code.FORBIDDEN else failed).append(uri)
                _log.warning("garbage_not_deleted", path=uri, reason=error.message)
            else:
                self._done.add(uri)
                deleted.append(uri)
        return Swept(tuple(deleted), tuple(refused), tuple(failed))

    def delete(self, uri: str) -> None:
        """FORBIDDEN outside the root. To delete what is not there is no error."""
        if not self._root:
            raise StrataError(Code.FORBIDDEN, f"{uri} is not deleted: no root is set", hint="set checkpoint_root")
        if self._checkpoints is not None and uri.startswith(SCHEME):
            self._checkpoints.delete(uri)
            return
        if _scheme(self._root) != _scheme(uri):
            raise _outside(uri, self._root)
        if uri.startswith("s3://"):
            self._delete_objects(uri)
        else:
            _delete_local(local_path(uri), local_path(self._root), uri)

    def _delete_objects(self, uri: str) -> None:
        bucket, prefix = (*self._root.removeprefix("s3://").strip("/").split("/", 1), "")[:2]
        try:
            found, key = s3_place(uri)
        except StrataError as error:
            raise _outside(uri, self._root) from error
        key = key.rstrip("/")
        inside = f"{prefix}/" if prefix else ""
        if found != bucket or not key.startswith(inside) or key == prefix:
            raise _outside(uri, self._root)
        store = self._stores.bucket(bucket)
        with translated(uri):
            _delete_keys(store, key)


def _delete_keys(store: S3Store, key: str) -> None:
    """The object of that key, and those whose keys go on with a slash."""
    from obstore import delete, list

    # A prefix counts in whole segments: `step-1` does not mean `step-10`.
    for page in list(store, prefix=f"{key}/"):
        delete(store, [each["path"] for each in page])
    delete(store, [key])


def _delete_local(path: Path, root: Path, uri: str) -> None:
    """Walks down from the root folder by folder and through no link, so a swapped folder leads nowhere else."""
    try:
        steps = path.relative_to(root.absolute()).parts
    except ValueError:
        raise _outside(uri, str(root)) from None
    if not steps or ".." in steps:
        raise _outside(uri, str(root))
    with ExitStack() as stack:
        try:
            folder = _open_folder(root, None, stack)
            for step in steps[:-1]:
                # The last one is never followed: a link is deleted, not what it leads to.
                if stat.S_ISLNK(os.stat(step, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise _outside(uri, str(root))
                folder = _open_folder(step, folder, stack)
            if stat.S_ISDIR(os.stat(steps[-1], dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(steps[-1], dir_fd=folder)
            else:
                os.unlink(steps[-1], dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StrataError(Code.UNAVAILABLE, f"cannot delete {uri}: {error.strerror}", path=uri) from error


def _scheme(uri: str) -> str:
    return uri.partition("://")[0] if "://" in uri else "file"


def _open_folder(name: str | Path, inside: int | None, stack: ExitStack) -> int:
    follow = 0 if inside is None else os.O_NOFOLLOW
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=inside)
    stack.callback(os.close, descriptor)
    return descriptor


def _outside(uri: str, root: str) -> StrataError:
    return StrataError(Code.FORBIDDEN, f"{uri} is not deleted: it is outside {root}", path=uri)
