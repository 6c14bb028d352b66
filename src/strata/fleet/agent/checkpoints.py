"""Checkpoints as a trainer leaves them: each a folder below STRATA_CHECKPOINT that got its name when it was whole.

The contract is in `strata.fleet.trainer`: write under a name that begins with a dot, or ends in `.tmp` or `.partial`,
then rename. What has its final name is never touched again.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from strata.fleet.artifacts.files import Tree, open_folder


def newest(folder: Path, sent: Collection[str]) -> str:
    """The name of the newest checkpoint that is whole; empty if it was sent already, or if there is none."""
    try:
        with open_folder(Tree(folder)) as entries:
            found = [
                (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and is_final(entry.name)
            ]
    except FileNotFoundError:
        return ""
    if not found:
        return ""
    name = max(found)[1]
    return "" if name in sent else name


def is_final(name: str) -> bool:
    return not name.startswith(".") and not name.endswith((".tmp", ".partial"))
