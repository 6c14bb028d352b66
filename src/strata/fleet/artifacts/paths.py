"""Decides which paths an artifact may have: at most 1,024 bytes and 32 folders, no name that Linux, macOS or Windows
would refuse or read as another.

An artifact is made on one host and unpacked on another. A name that one of them cannot have, or would read as another
name, is refused where the artifact is made and again where it is unpacked: neither side trusts the other.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from strata.base.errors import Code, StrataError

MAX_PATH_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 255
MAX_DEPTH: Final = 32

# Marks that change the order in which a name is shown, so that one file looks like another.
_BIDI: Final = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
# Windows: separators, drive letters and streams (`:`), wildcards, redirections; everywhere: control characters.
_FORBIDDEN: Final = re.compile(rf'[\x00-\x1f\x7f-\x9f\\:<>"|?*{_BIDI}]')
# Devices, whatever extension follows; Windows reads superscript digits as digits.
_DEVICE: Final = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9\u00b9\u00b2\u00b3])(?:[ .].*)?", re.I)


def check_path(path: str) -> str:
    """`path` if an artifact may have it; INVALID with the reason otherwise."""
    reason = _refusal(path)
    if reason is not None:
        raise StrataError(Code.INVALID, f"an artifact cannot have the path {_shown(path)}: {reason}", path=_shown(path))
    return path


def check_collisions(paths: Iterable[str]) -> None:
    """INVALID if two of these cannot lie in one folder of a file system that ignores the case of letters.

    One entry for each folder and file, by the entry above it and its folded name: linear in the length of all paths.
    """
    entries: dict[tuple[int, str], int] = {}
    names: list[str] = [""]
    parents: list[int] = [0]
    files: set[int] = set()
    folders: set[int] = set()
    folded: dict[str, str] = {}
    for path in paths:
        above = 0
        for name in path.split("/"):
            folders.add(above)
            if name not in folded:
                folded[name] = fold(name)
            entry = entries.setdefault((above, folded[name]), len(names))
            if entry == len(names):
                names.append(name)
                parents.append(above)
            elif names[entry] != name:
                before = _spelled(entry, names, parents)
                spelled = f"{before.rpartition('/')[0]}/{name}".lstrip("/")
                raise _clash(before, spelled, "they differ only in the case of letters")
            above = entry
        files.add(above)
    for entry in files & folders:
        both = _spelled(entry, names, parents)
        raise _clash(both, f"{both}/…", "a file cannot be a folder too")


def _spelled(entry: int, names: Sequence[str], parents: Sequence[int]) -> str:
    parts = []
    while entry:
        parts.append(names[entry])
        entry = parents[entry]
    return "/".join(reversed(parts))


def fold(path: str) -> str:
    """Two paths with the same folded form are one file on a file system that ignores case."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _clash(one: str, other: str, reason: str) -> StrataError:
    return StrataError(Code.INVALID, f"the paths {_shown(one)} and {_shown(other)} cannot be together: {reason}")


def _refusal(path: str) -> str | None:  # noqa: PLR0911 - one return for each reason
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "it is not Unicode text"
    if not path or len(encoded) > MAX_PATH_BYTES:
        return f"it is {len(encoded)} bytes long; 1 to {MAX_PATH_BYTES} are allowed"
    if found := _FORBIDDEN.search(path):
        return f"it has the character {found[0]!a}"
    if unicodedata.normalize("NFC", path) != path:
        return "it is not in Unicode's composed form (NFC)"
    if path.startswith("/"):
        return "it is absolute"
    names = path.split("/")
    if len(names) > MAX_DEPTH:
        return f"it is more than {MAX_DEPTH} folders deep"
    return next((reason for name in names if (reason := _name_refusal(name)) is not None), None)


def _name_refusal(name: str) -> str | None:
    if name in ("", ".", ".."):
        return f"it has the part {name!r}"
    if name[-1] in " .":
        return f"the name {_shown(name)} ends in a dot or a space, which Windows drops"
    if _DEVICE.fullmatch(name):
        return f"{_shown(name)} is the name of a device on Windows"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"a name in it is longer than {MAX_NAME_BYTES} bytes"
    return None


def _shown(path: str) -> str:
    return ascii(path if len(path) <= 120 else f"{path[:120]}…")
