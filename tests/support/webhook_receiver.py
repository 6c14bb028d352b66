"""A receiver of webhooks on loopback that keeps every delivery, and answers with an error or a redirect if told to."""

from __future__ import annotations

import http.server
import threading
from typing import NamedTuple, Self


class Delivery(NamedTuple):
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


class WebhookReceiver:
    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.cursors: list[str] = []
        """The header X-Strata-Delivery of each delivery."""
        self.answers: list[int] = []
        """The status codes of the next replies; 204 after them."""
        self.location = ""
        """The header Location of each reply, unless empty."""
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.deliveries.append(
                    Delivery({name.lower(): value for name, value in self.headers.items()}, body)
                )
                receiver.cursors.append(self.headers["X-Strata-Delivery"])
                self.send_response(receiver.answers.pop(0) if receiver.answers else 204)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook?token=x"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
