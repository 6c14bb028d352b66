"""Files as this version stores them, for every later version to read: `python -m scripts.golden`.

It writes the folder tests/golden/VERSION: the database of a hub on SQLite and on PostgreSQL, journals of the
coordinator and of the training server, checkpoints and snapshots of its ranks, and settings. The same code writes the
same bytes, with the same releases of PostgreSQL, SQLite and torch. `python -m scripts.golden freeze` records their
digests when the version is released; from then on no file of it may change.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from tests.shell.golden.folder import GOLDEN, RELEASED, digests, read_released, version_in_development
from tests.shell.golden.hub_files import write_hub
from tests.shell.golden.journal_files import write_journals
from tests.shell.golden.settings_files import write_settings
from tests.support.postgres import PostgresDatabases, PostgresServer

PARTS: Final = ("hub", "journals", "weights", "settings")


def write_part(name: str, folder: Path, databases: PostgresDatabases) -> None:
    """Writes a part into a new folder."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        match name:
            case "hub":
                write_hub(folder, Path(scratch), databases)
            case "journals":
                write_journals(folder, Path(scratch))
            case "weights":
                # It takes seconds to import torch, and no other part needs it.
                from tests.shell.golden.weights import write_weights

                write_weights(folder, Path(scratch))
            case "settings":
                write_settings(folder)


def write(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, PostgresServer() as server:
        for name in PARTS:
            write_part(name, Path(scratch) / name, PostgresDatabases(server.server_url))
        # Only what is written whole takes the place of what is there.
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(scratch, folder)
    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    print(f"{folder}: {size:,} bytes")


def freeze(folder: Path) -> None:
    released = {**read_released(), folder.name: digests(folder)}
    RELEASED.write_bytes(msgspec.json.format(msgspec.json.encode(released), indent=1) + b"\n")
    print(f"{RELEASED}: {folder.name} is frozen")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["write", "freeze"], default="write")
    what = parser.parse_args().what
    version = version_in_development()
    if version in read_released():
        print(f"{version} is released: its files stay as they are", file=sys.stderr)
        return 1
    if what == "freeze":
        freeze(GOLDEN / version)
    else:
        write(GOLDEN / version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
