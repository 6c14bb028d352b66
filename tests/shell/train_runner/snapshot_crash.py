"""Snapshot writers killed at every failpoint: `python -m tests.shell.train_runner.snapshot_crash FOLDER`.

Two writers stand for two ranks. A child for each place runs them and is killed there; what it leaves on the disk is a
snapshot that is whole, or none. Prints a line for each place.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import torch

from strata.base import failpoint
from strata.base.digest import sha256_hex
from strata.train.runner.snapshot import files
from strata.train.runner.snapshot.files import (
    SnapshotCopy,
    SnapshotManifest,
    SnapshotWriter,
    read_manifest,
    temporary_folder,
    verify,
)

RANKS = 2
NAMED = {"train.snapshot.after_name"}
"""From here on it is there."""


def places() -> list[str]:
    source = Path(files.__file__).read_text(encoding="utf-8")
    return re.findall(r'failpoint\("([^"]+)"\)', source)


def write(folder: Path) -> str | None:
    """The digest of the manifest, or what went wrong as an error."""
    manifest = SnapshotManifest(
        base_model="m", arch="a", parameters=1, full=False, ranks=RANKS, base_modified=False, models=(), samplers=()
    )
    writers = [SnapshotWriter(rank, 30.0) for rank in range(RANKS)]
    for rank, writer in enumerate(writers):
        writer.start(1, folder, SnapshotCopy(manifest, {"own": torch.full((5,), float(rank))}), 0.0)
    for writer in writers:
        writer.join(60.0)
    written = writers[0].take()
    assert written is not None
    assert written.trouble is None, written.trouble
    return written.digest


def die(folder: Path, place: str) -> None:
    child = os.fork()
    if child == 0:
        failpoint.arm(place, failpoint.kill)
        write(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{place} was not reached"
    assert os.WTERMSIG(status) == signal.SIGKILL, place


def main(above: Path) -> None:
    for place in places():
        folder = above / place.rpartition(".")[2] / "1-group"
        die(folder, place)
        if place in NAMED:
            digest = sha256_hex((folder / files.MANIFEST).read_bytes())
            assert not temporary_folder(folder).exists()
        else:
            assert not folder.exists(), f"{place}: a snapshot that is not whole has a name"
            # The next one has another name; whatever lies there does not hinder it.
            folder = folder.with_name("2-group")
            digest = write(folder) or ""
        manifest = read_manifest(folder, digest)
        verify(folder, manifest, rank=0, ranks=1)
        assert sorted(manifest.files) == ["rank-00000.safetensors", "rank-00001.safetensors"]
        print(place)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
