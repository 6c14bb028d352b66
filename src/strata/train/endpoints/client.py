"""HTTP client of one inference engine: timeouts, at most 64 MiB in a reply, no redirects, and the wording of engine
errors (excerpts of 300 characters).

An engine is another program, perhaps on another machine, and may reply anything. Its text is truncated and sanitised
before it gets into a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import msgspec

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret, read_secret
from strata.train.core.state import InferenceEndpoint
from strata.train.endpoints.origin import EngineOrigin, check_allowed, is_loopback, parse_origin
from strata.train.inference_settings import InferenceSettings

T = TypeVar("T")
MAX_REPLY: Final = 64 << 20
MAX_EXCERPT: Final = 300
CONNECT_S: Final = 5.0
"""How long a connection to an engine may take to open."""
_MALFORMED: Final = "the inference endpoint did not reply as an engine does"


class EngineReply(NamedTuple):
    status: int
    content: bytes

    @property
    def excerpt(self) -> str:
        """The beginning of the reply, fit for a message."""
        text = self.content[: 4 * MAX_EXCERPT].decode("utf-8", "replace")
        return "".join(char if char.isprintable() else " " for char in text)[:MAX_EXCERPT]

    def read(self, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StrataError(Code.UNAVAILABLE, f"{_MALFORMED}: {str(error)[:MAX_EXCERPT]}") from None


class LocalEngine(NamedTuple):
    """An engine that the launcher supervises: it listens on a Unix socket."""

    socket: Path
    key: Path


class EngineClient:
    def __init__(
        self, endpoint: InferenceEndpoint, settings: InferenceSettings, local: LocalEngine | None = None
    ) -> None:
        """FORBIDDEN if the settings do not allow the endpoint any more."""
        self._origin = EngineOrigin("http", endpoint.name, 80) if local else check_allowed(endpoint.url, settings.allow)
        self._local = local
        self._address = endpoint.address
        self._settings = settings
        limits = httpx.Limits(max_connections=settings.max_samples + 4, max_keepalive_connections=8)
        # The environment could name a proxy, and with it another address to connect to.
        self._http = httpx.AsyncClient(
            base_url=str(self._origin) if local else self._origin.at(endpoint.address),
            follow_redirects=False,
            trust_env=False,
            headers={
                "Host": str(self._origin).partition("://")[2],
                "Accept-Encoding": "identity",
                "User-Agent": "strata",
            },
            transport=httpx.AsyncHTTPTransport(uds=str(local.socket), limits=limits) if local else None,
            limits=limits,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, *, timeout_s: float) -> EngineReply:
        return await self._request("GET", path, None, timeout_s)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        read_line: Callable[[bytes], None] | None = None,
    ) -> EngineReply:
        """`read_line` gets each line of a successful reply when it comes. They are not kept: only the length of each is
        bounded."""
        return await self._request("POST", path, body, timeout_s, read_line)

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        read_line: Callable[[bytes], None] | None = None,
    ) -> EngineReply:
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} | await asyncio.to_thread(self._credentials)
        request = self._http.build_request(
            method,
            path,
            content=content,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            extensions={"sni_hostname": self._origin.host},
        )
        try:
            # The timeouts of httpx are for each read; an engine that sends a byte now and then would never time out.
            async with asyncio.timeout(timeout_s):
                return await self._exchange(request, read_line)
        except TimeoutError:
            raise StrataError(Code.DEADLINE, f"{self._origin} did not reply within {timeout_s:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            reason = f"{self._origin} cannot be reached: {type(error).__name__}"
            raise StrataError(Code.UNAVAILABLE, reason, connected=connected) from None

    async def _exchange(self, request: httpx.Request, read_line: Callable[[bytes], None] | None = None) -> EngineReply:
        response = await self._http.send(request, stream=True)
        try:
            if 300 <= response.status_code < 400:
                raise StrataError(Code.UNAVAILABLE, f"{self._origin} replies with a redirect, which is not followed")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise StrataError(Code.UNAVAILABLE, f"{self._origin} compresses its reply, which was not requested")
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if read_line is not None and response.status_code == 200:
                    _take_lines(content, len(content) - len(chunk), read_line)
                if len(content) > MAX_REPLY:
                    raise StrataError(Code.UNAVAILABLE, f"{self._origin} replies with more than {MAX_REPLY} bytes")
            return EngineReply(response.status_code, bytes(content))
        finally:
            await response.aclose()

    def _credentials(self) -> dict[str, str]:
        """Read for every request: a replaced key takes effect at once, and none is kept in memory for long."""
        if self._local is not None:
            return {"Authorization": f"Bearer {read_secret(self._local.key).reveal()}"}
        key = self._key()
        if key is None:
            return {}
        if self._origin.scheme == "http" and not is_loopback(self._address):
            raise StrataError(Code.FORBIDDEN, f"a key is not sent to {self._origin}: the connection is not encrypted")
        return {"Authorization": f"Bearer {key.reveal()}"}

    def _key(self) -> Secret | None:
        for url, file in self._settings.keys.items():
            if parse_origin(url) == self._origin:
                return read_secret(Path(file).expanduser())
        return None


def _take_lines(content: bytearray, searched: int, read_line: Callable[[bytes], None]) -> None:
    """Have the complete lines read, and remove them; there is no end of a line before `searched`."""
    if end := content.rfind(b"\n", searched) + 1:
        for line in bytes(content[: end - 1]).split(b"\n"):
            read_line(line)
        del content[:end]


def engine_error(reply: EngineReply, what: str) -> StrataError:
    return StrataError(Code.UNAVAILABLE, f"{what} failed with status {reply.status}: {reply.excerpt}")
