"""Serves scripts, styles and icons under paths with a digest: media types, compression, caching for ever."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strata.http.route import PUBLIC, HttpCall, RawReply, Route

FOLDER: Final = Path(__file__).parent / "static"
_MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOREVER: Final = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Asset:
    name: str
    content: bytes
    compressed: bytes
    media_type: str

    async def reply(self, call: HttpCall[Any]) -> RawReply:
        """A file of the dashboard."""
        headers = {"Cache-Control": _FOREVER, "Vary": "Accept-Encoding"}
        if "gzip" in call.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return RawReply(self.compressed, media_type=self.media_type, headers=headers)
        return RawReply(self.content, media_type=self.media_type, headers=headers)


class Assets:
    """One digest over all files names the folder, so modules can import each other by relative paths."""

    def __init__(self, folder: Path = FOLDER) -> None:
        digest = hashlib.sha256()
        self.files: list[Asset] = []
        for path in sorted(folder.rglob("*")):
            media_type = _MEDIA_TYPES.get(path.suffix)
            if media_type is None:
                continue
            content, name = path.read_bytes(), path.relative_to(folder).as_posix()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            self.files.append(Asset(name, content, gzip.compress(content, 9, mtime=0), media_type))
        self._base = f"/static/{digest.hexdigest()[:16]}"

    def url(self, name: str) -> str:
        return f"{self._base}/{name}"

    def routes(self) -> Sequence[Route]:
        return [Route("GET", self.url(each.name), PUBLIC, each.reply, operation="web.asset") for each in self.files]
