"""Where a rank finds and leaves files of checkpoints and snapshots: on the first host, where the orchestrator names
them, or in copies on a host that joined (`JoinedFiles`), which fetches what it reads and sends what it wrote.

Nothing is kept on a host that joined: what it sent is durable on the first host, and what it fetched was for one load.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol, cast, get_args

from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import digest_files
from strata.train.link.host_files import fetch_files, list_files, send_file
from strata.train.link.hosts import FirstHostClient, Folder, Root
from strata.train.link.keys import ClientKeys
from strata.train.plan.host_plan import RankGeneration

FETCHED: Final = "fetched"
OUTGOING: Final = "outgoing"
"""Folders below the data of a host that joined."""


class HostFiles(Protocol):
    """Folders are those that the orchestrator named."""

    def fetch(self, folder: Path) -> None:
        """Make the folder's files be on this host, for one of its ranks to call. Whoever reads them verifies them."""
        ...

    def fetched(self, folder: Path) -> Path:
        """Returns where they are on this host."""
        ...

    def drop(self, folder: Path) -> None:
        """Remove what was fetched, if it is a copy, when all ranks of the host have read it."""
        ...

    def outgoing(self, folder: Path) -> Path:
        """Returns where this rank writes files that are for the folder."""
        ...

    def send(self, folder: Path, files: Iterable[Path]) -> None:
        """Make files that this rank wrote be in the folder of the first host, one after the other."""
        ...

    def sent(self, folder: Path) -> None:
        """Remove what this rank wrote, if that is a copy."""
        ...


@contextlib.contextmanager
def copy_errors(folder: Path, named: Path) -> Iterator[None]:
    """Raise UNAVAILABLE for damage of a copy, which says nothing of the first host's files: its ranks verify those."""
    try:
        yield
    except StrataError as error:
        if folder == named or error.code not in (Code.CORRUPT, Code.NOT_FOUND):
            raise
        raise StrataError(Code.UNAVAILABLE, f"the copy of this host: {error.message}") from error


class OwnFiles:
    """Those of the first host, of a server on a single machine, and of hosts that share a folder."""

    def fetch(self, folder: Path) -> None: ...

    def fetched(self, folder: Path) -> Path:
        return folder

    def drop(self, folder: Path) -> None: ...

    def outgoing(self, folder: Path) -> Path:
        return folder

    def send(self, folder: Path, files: Iterable[Path]) -> None: ...

    def sent(self, folder: Path) -> None: ...


class JoinedFiles:
    def __init__(self, endpoint: str, keys: ClientKeys, generation: RankGeneration, data: Path, rank: int) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._generation = generation
        self._there = Path(generation.data)
        self._fetched = data / FETCHED
        self._outgoing = data / OUTGOING / f"rank-{rank}"

    def fetched(self, folder: Path) -> Path:
        return self._fetched / folder.relative_to(self._there)

    def outgoing(self, folder: Path) -> Path:
        return self._outgoing / folder.relative_to(self._there)

    def fetch(self, folder: Path) -> None:
        target = self.fetched(folder)
        # What an earlier group left may have the sizes of these files, and other bytes.
        shutil.rmtree(target, ignore_errors=True)
        first = FirstHostClient(self._endpoint, self._keys)
        try:
            named = self._named(folder)
            files = list_files(first, named)
            with copy_errors(target, folder):
                fetch_files(first, named, files, target)
        finally:
            first.close()

    def send(self, folder: Path, files: Iterable[Path]) -> None:
        number, run = self._generation.number, self._generation.run
        first = FirstHostClient(self._endpoint, self._keys)
        try:
            for file in files:
                expected = digest_files([file])[file.name]
                send_file(first, self._named(folder), file, expected, run=run, generation=number)
        finally:
            first.close()

    def drop(self, folder: Path) -> None:
        shutil.rmtree(self.fetched(folder), ignore_errors=True)

    def sent(self, folder: Path) -> None:
        shutil.rmtree(self.outgoing(folder), ignore_errors=True)

    def _named(self, folder: Path) -> Folder:
        root, *rest = folder.relative_to(self._there).parts
        if root not in get_args(Root):
            raise StrataError(Code.INTERNAL, f"hosts have no files in {root!r}")
        return Folder(cast(Root, root), "/".join(rest))
