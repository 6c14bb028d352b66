"""A server that is a job: it serves on a socket of its own, says so, and replies with what it was sent."""

from __future__ import annotations

import json
import os
import shutil
import socketserver
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from strata.fleet.trainer import hyper

ENVIRON = os.environ  # noqa: TID251 - the contract with servers
KEY = Path(ENVIRON["STRATA_SERVER_FRONT_KEY_FILE"]).read_text().strip()
DATA = Path(ENVIRON["STRATA_SERVER_DATA"])
MODEL = ENVIRON["STRATA_MODEL"]
NOTES = DATA / "notes"


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.endswith("/wait"):
            time.sleep(float(body))
        if self.path.endswith("/note"):
            with NOTES.open("ab") as notes:
                notes.write(body + b"\n")
        if self.path.endswith("/copy"):
            copy = DATA / "copies" / ".new"
            copy.mkdir(parents=True)
            for path in (NOTES, DATA / "fleet.json"):
                shutil.copyfile(path, copy / path.name)
            copy.rename(copy.with_name("first"))
        reply: dict[str, Any] = {
            "notes": NOTES.read_text().split(),
            "lost": ENVIRON.get("STRATA_SERVER_LOST", ""),
            "model": MODEL,
            "path": self.path,
            "tenant": self.headers.get("x-strata-tenant"),
            "role": self.headers.get("x-strata-role"),
            "session": self.headers.get("x-strata-session"),
            "trusted": self.headers.get("x-strata-front") == KEY,
            "credentials": [name for name in ("authorization", "x-api-key") if self.headers.get(name)],
            "body": body.decode("latin-1"),
            "supported_models": [{"model_name": MODEL}],
            "training_runs": [{"training_run_id": MODEL, "last_request_time": f"2026-01-01 {MODEL}"}],
            "training_run_ids": [MODEL],
            "cursor": {"offset": 0, "limit": 100, "total_count": 7},
        }
        content = json.dumps(reply).encode()
        self.send_response(408 if self.path.endswith("retrieve_future") else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815 - the names that http.server looks for

    def log_message(self, *words: object) -> None:
        del words

    def address_string(self) -> str:
        return "hub"


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


if __name__ == "__main__":
    path = DATA / "s"
    path.unlink(missing_ok=True)
    starts = DATA / "starts"
    NOTES.touch()
    starts.write_text((starts.read_text() if starts.exists() else "") + "started\n")
    with Server(str(path), Echo) as server:
        address = hyper().get("address") or f"unix:{path}"
        Path(ENVIRON["STRATA_SERVER_ADDRESS_FILE"]).write_text(json.dumps({"address": address, "models": [MODEL]}))
        print("serves", flush=True)
        server.serve_forever()
