"""A double of the Hugging Face Hub's HTTP API, as much as its own client library needs to fetch and publish models.

The client is the real one, so it decides whether the double replies as the Hub does. Files are kept in memory.
"""

from __future__ import annotations

import base64
import http.server
import json
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

TOKEN: Final = "hf_the-token-of-this-test"
LARGE: Final = ".safetensors"
"""Files that are stored apart, by their digests."""


@dataclass
class Repository:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def commit(self) -> str:
        names = b"".join(name.encode() + content for name, content in sorted(self.files.items()))
        return sha256(names).hexdigest()[:40]


class HuggingFaceDouble:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.fetched: list[str] = []
        """Names of the files that were fetched."""
        self._large: dict[str, bytes] = {}
        double = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                path = unquote(urlsplit(self.path).path).strip("/").split("/")
                allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}" or path[0] == "large"
                body = self.rfile.read(size)
                self._reply(*(double.reply(self.command, path, body) if allowed else (401, {}, b"")))

            def _reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = _handle  # noqa: N815 (names of http.server)

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reply(self, method: str, path: list[str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        match method, path:
            case "POST", ["api", "repos", "create"]:
                return self._create(json.loads(body))
            case "POST", ["api", "validate-yaml"]:
                return _json({"warnings": [], "errors": []})
            case "PUT", ["large", digest]:
                assert sha256(body).hexdigest() == digest
                self._large[digest] = body
                return _json({})
        name = "/".join(path[2:4] if path[0] == "api" else path[:2]).removesuffix(".git")
        repository = self.repositories.get(name)
        if repository is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        rest = path[4:] if path[0] == "api" else path[2:]
        return self._reply_for(name, repository, rest, body)

    def _reply_for(  # noqa: PLR0911 (one for each address)
        self, name: str, repository: Repository, rest: list[str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        match rest:
            case [] | ["revision", _]:
                siblings = [{"rfilename": each} for each in repository.files]
                described = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings}
                return _json({**described, "private": repository.private, "tags": [], "downloads": 0, "likes": 0})
            case ["tree", *_]:
                return _json([_entry(each, content) for each, content in sorted(repository.files.items())])
            case ["resolve", _, *file]:
                return self._file(repository, "/".join(file))
            case ["preupload", _]:
                return _json({"files": [_mode(each["path"]) for each in json.loads(body)["files"]]})
            case ["info", "lfs", "objects", "batch"]:
                return _json(
                    {"transfer": "basic", "objects": [self._upload(each) for each in json.loads(body)["objects"]]}
                )
            case ["commit", _]:
                return self._commit(name, repository, body)
        return 404, {}, b""

    def _create(self, wanted: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = {"url": f"{self.url}/{name}", "id": name, "name": name}
        if name in self.repositories:
            return 409, {"Content-Type": "application/json"}, json.dumps({**url, "error": "exists"}).encode()
        self.repositories[name] = Repository(private=wanted["visibility"] == "private")
        return _json(url)

    def _file(self, repository: Repository, file: str) -> tuple[int, dict[str, str], bytes]:
        content = repository.files.get(file)
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        self.fetched.append(file)
        digest = sha256(content).hexdigest()
        return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "none"}, content

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.url}/large/{wanted['oid']}"
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": {"href": href}}}

    def _commit(self, name: str, repository: Repository, body: bytes) -> tuple[int, dict[str, str], bytes]:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    repository.messages.append(value["summary"])
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = self._large[value["oid"]]
        url = f"{self.url}/{name}/commit/{repository.commit}"
        return _json({"success": True, "commitOid": repository.commit, "commitUrl": url})


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": sha256(content).hexdigest()[:40]}
    if not path.endswith(LARGE):
        return entry
    return {**entry, "lfs": {"oid": sha256(content).hexdigest(), "size": len(content), "pointerSize": 128}}


def _mode(path: str) -> dict[str, Any]:
    return {"path": path, "uploadMode": "lfs" if path.endswith(LARGE) else "regular", "shouldIgnore": False}
