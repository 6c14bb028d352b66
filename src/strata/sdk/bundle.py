"""Bundles a folder as one reproducible tar file of at most 48 MiB: what is left out (virtual environments, data of a
hub or an agent, foreign links), and the refusals.

Plain tar, not compressed: what a compressor writes depends on its version, and the digest is the name of the source.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError
from strata.sdk.ignore_rules import IgnoreRules, read_ignore_rules

MAX_BYTES: Final = 48 << 20
"""A source is code. A host fetches it whole, in one reply."""
_OURS: Final = ("pyvenv.cfg", "operator.token", "contexts.json", "identity/hub.json")
"""A folder with one of these is a virtual environment, or the data of a hub, an agent or this command."""


@dataclass(frozen=True)
class Bundle:
    content: bytes
    files: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def unpack(self, folder: Path) -> None:
        """Unpacks into a folder of this machine, for its own user."""
        with tarfile.open(fileobj=io.BytesIO(self.content)) as tar:
            tar.extractall(folder, filter="data")


def make_bundle(folder: Path) -> Bundle:
    paths = sorted(_walk(folder, "", read_ignore_rules(folder)))
    if not paths:
        raise StrataError(Code.INVALID, f"{folder} has no file to run")
    sizes = {path: (folder / path).lstat().st_size for path in paths}
    if sum(sizes.values()) > MAX_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise StrataError(
            Code.INVALID,
            f"the source in {folder} has {sum(sizes.values()) >> 20} MiB, at most {MAX_BYTES >> 20} are sent along",
            hint=f"name what is not code in .strataignore; the largest is {largest}",
        )
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            _add(tar, folder, path)
    return Bundle(made.getvalue(), len(paths))


def _walk(folder: Path, prefix: str, ignored: IgnoreRules) -> Iterator[str]:
    with os.scandir(folder / prefix) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            is_folder = entry.is_dir(follow_symlinks=False)
            if ignored.covers(path, folder=is_folder):
                continue
            if is_folder:
                if not any((folder / path / mark).exists() for mark in _OURS):
                    yield from _walk(folder, f"{path}/", ignored.below(folder, f"{path}/"))
            elif entry.is_symlink():
                # A link that leaves the folder means nothing on another machine.
                if (folder / path).resolve().is_relative_to(folder.resolve()):
                    yield path
            elif entry.is_file(follow_symlinks=False):
                yield path


def _add(tar: tarfile.TarFile, folder: Path, path: str) -> None:
    file = folder / path
    member = tarfile.TarInfo(path)
    if file.is_symlink():
        target = str(file.readlink())
        if Path(target).is_absolute():
            target = os.path.relpath(file.resolve(), file.parent.resolve())
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
        tar.addfile(member)
        return
    content = file.read_bytes()
    member.size = len(content)
    member.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
    tar.addfile(member, io.BytesIO(content))
