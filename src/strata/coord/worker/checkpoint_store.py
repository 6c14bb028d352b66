"""Checkpoints of workers on hosts without shared storage: `store://` names, the folder that the agent uploads, and how
long a worker waits for a part that another host wrote.

A program writes its part into a folder below `checkpoint_root`, which has the same name for all ranks. When all of them
have committed, the folder moves up to where the agent uploads what it finds, as an artifact of the job. To the
coordinator such a part is `store://FOLDER/FILE`, which means the same on every host. A worker that recovers uses the
files of its host if all parts are there, and otherwise asks the agent for those of all hosts: by a file in `.wanted`,
to which the agent replies with a folder of the same name in `fetched`.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from strata.base import log
from strata.base.atomic import write_file
from strata.base.clock import Clock
from strata.base.digest import canonical_json, file_digest, sha256_hex
from strata.base.errors import Code, StrataError
from strata.coord.worker.checkpoints import Manifest, StoredPart

SCHEME: Final = "store://"
_SHA256: Final = "sha256:"
WANTED: Final = ".wanted"
POLL_S: Final = 0.2
WAIT_S: Final = 20.0
"""How long the parts of other hosts may be missing: their agents may not have uploaded them yet, or never will."""
_log = log.get(__name__)


@dataclass(frozen=True)
class MemberCheckpoints:
    root: Path
    """Where the program writes."""
    fetched: Path
    """Where the agent puts what it has downloaded."""
    clock: Clock

    def named(self, stored: StoredPart) -> StoredPart:
        """The part as all hosts know it, if it is in the store: with the digest by which agents and hub find it, also
        if the program gave one of its own. INVALID if it cannot be read."""
        try:
            inside = Path(stored.uri).relative_to(self.root.absolute())
        except ValueError:
            return stored
        if len(inside.parts) < 2 or inside.parts[0].startswith("."):
            raise StrataError(
                Code.INVALID,
                f"the part {stored.uri} is in no folder of its checkpoint",
                hint=f"write it to {self.root}/FOLDER, the same folder for all ranks",
            )
        digest = stored.digest
        if not digest.startswith(_SHA256):
            try:
                digest = file_digest(Path(stored.uri))
            except OSError as error:
                raise StrataError(Code.INVALID, f"cannot read the part {stored.uri}: {error.strerror}") from error
        return replace(stored, uri=f"{SCHEME}{inside.as_posix()}", digest=digest)

    def publish(self, uri: str) -> None:
        """Give the folder of a committed part to the agent. Each rank of the host may do so, and the first one does."""
        if not uri.startswith(SCHEME):
            return
        folder, name = _split(uri)
        # Without this part it is what other ranks write under the same name, after one of them published this one.
        if (self.root / folder / name).is_file():
            with suppress(FileNotFoundError):
                # A folder that is written a second time is another checkpoint to the agent.
                (self.root / folder).rename(self.root.parent / f"{folder}-{secrets.token_hex(4)}")

    def delete(self, uri: str) -> None:
        """The files of a checkpoint that no recovery needs, on this host. Its artifacts follow the hub's retention."""
        folder, _ = _split(uri)
        for place in self._places(folder):
            shutil.rmtree(place, ignore_errors=True)

    async def resolve(self, manifest: Manifest) -> Manifest:
        """Returns the manifest with paths on this host. A part that cannot be had keeps its name, and no file has
        that."""
        parts = [_split(part.uri) for part in manifest.parts if part.uri.startswith(SCHEME)]
        if not parts or len(parts) != len(manifest.parts):
            return manifest
        names = [name for _, name in parts]
        if len({folder for folder, _ in parts}) > 1:
            _log.warning("checkpoint_in_several_folders", checkpoint_id=manifest.checkpoint_id)
            return manifest
        digests = {name: part.digest for name, part in zip(names, manifest.parts, strict=True)}
        place = await asyncio.to_thread(self._find, parts[0][0], digests)
        if place is None:
            place = await self._fetch(digests)
        if place is None:
            _log.warning("checkpoint_not_fetched", checkpoint_id=manifest.checkpoint_id, step=manifest.step)
            return manifest
        found = zip(manifest.parts, names, strict=True)
        return replace(manifest, parts=tuple(replace(part, uri=str(place / name)) for part, name in found))

    def _places(self, folder: str) -> Iterator[Path]:
        yield self.root / folder
        yield from self.root.parent.glob(f"{folder}-{'[0-9a-f]' * 8}")

    def _find(self, folder: str, digests: Mapping[str, str]) -> Path | None:
        """Returns where all parts are on this host; it is so for a gang of one host. A folder that was written a second
        time has parts of the same names."""
        complete = [each for each in self._places(folder) if all((each / name).is_file() for name in digests)]
        for place in complete:
            # Another rank may publish or delete the folder meanwhile.
            with suppress(OSError):
                if all(file_digest(place / name) == digest for name, digest in digests.items()):
                    return place
        return None

    async def _fetch(self, digests: Mapping[str, str]) -> Path | None:
        """The parts of all hosts, in one folder; None if they are missing for `WAIT_S`."""
        request = {"parts": dict(digests)}
        name = sha256_hex(canonical_json(request))[:16]
        reply, wanted = self.fetched / name, self.root / WANTED / f"{name}.json"
        wanted.parent.mkdir(parents=True, exist_ok=True)
        write_file(wanted, msgspec.json.encode(request), durable=False)
        until_s = self.clock.monotonic_s() + WAIT_S
        while not reply.is_dir():
            downloading = reply.with_name(f".{name}").exists()
            if not downloading and self.clock.monotonic_s() > until_s:
                wanted.unlink(missing_ok=True)
                return None
            await self.clock.sleep(POLL_S)
        return reply


def _split(uri: str) -> tuple[str, str]:
    """Folder and file. A name is what some worker once reported: it must not lead elsewhere."""
    parts = PurePosixPath(uri.removeprefix(SCHEME)).parts
    if len(parts) < 2 or ".." in parts or parts[0].startswith((".", "/")) or any(each in parts[0] for each in "*?["):
        raise StrataError(Code.CORRUPT, f"{uri!r} names no part of a checkpoint")
    return parts[0], "/".join(parts[1:])
