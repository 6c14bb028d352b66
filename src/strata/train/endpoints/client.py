"""HTTP to one engine: to its one address, without redirects, proxies or compression, bounded in time and size.

An engine is another program, perhaps on another machine, and may answer anything. What it says is cut and cleaned
before it gets into a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import msgspec

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret, read_secret
from strata.train.core.state import InferenceEndpoint
from strata.train.endpoints.origin import allowed, is_loopback, origin_of
from strata.train.settings import Inference

T = TypeVar("T")
MAX_REPLY: Final = 64 << 20
MAX_WORDS: Final = 300
_NOT_TAKEN: Final = "the inference endpoint did not answer as an engine does"


class Reply(NamedTuple):
    status: int
    content: bytes

    @property
    def words(self) -> str:
        """What it says, fit for a message."""
        text = self.content[: 4 * MAX_WORDS].decode("utf-8", "replace")
        return "".join(each if each.isprintable() else " " for each in text)[:MAX_WORDS]

    def read(self, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StrataError(Code.UNAVAILABLE, f"{_NOT_TAKEN}: {str(error)[:MAX_WORDS]}") from None


class EngineClient:
    def __init__(self, endpoint: InferenceEndpoint, settings: Inference) -> None:
        """FORBIDDEN if the settings do not allow it any more."""
        self._origin = allowed(endpoint.url, settings.allow)
        self._address = endpoint.address
        self._settings = settings
        # The environment could name a proxy, and with it another place to connect to.
        self._http = httpx.AsyncClient(
            base_url=self._origin.at(endpoint.address),
            follow_redirects=False,
            trust_env=False,
            headers={
                "Host": str(self._origin).partition("://")[2],
                "Accept-Encoding": "identity",
                "User-Agent": "strata",
            },
            limits=httpx.Limits(max_connections=settings.max_samples + 4, max_keepalive_connections=8),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, *, timeout_s: float) -> Reply:
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Reply:
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Reply:
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} | await asyncio.to_thread(self._credentials)
        request = self._http.build_request(
            method,
            path,
            content=content,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(self._settings.connect_timeout_s, timeout_s)),
            extensions={"sni_hostname": self._origin.host},
        )
        try:
            # httpx counts each wait by itself; an engine that sends a byte now and then would be waited for for ever.
            async with asyncio.timeout(timeout_s):
                return await self._exchange(request)
        except TimeoutError:
            raise StrataError(Code.DEADLINE, f"{self._origin} did not answer within {timeout_s:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise StrataError(Code.UNAVAILABLE, f"{self._origin} cannot be reached: {type(error).__name__}") from None

    async def _exchange(self, request: httpx.Request) -> Reply:
        response = await self._http.send(request, stream=True)
        try:
            if 300 <= response.status_code < 400:
                raise StrataError(Code.UNAVAILABLE, f"{self._origin} sends us elsewhere, where we do not go")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise StrataError(Code.UNAVAILABLE, f"{self._origin} packs its answer, which was not asked for")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_REPLY:
                    raise StrataError(Code.UNAVAILABLE, f"{self._origin} answers with more than {MAX_REPLY} bytes")
            return Reply(response.status_code, bytes(content))
        finally:
            await response.aclose()

    def _credentials(self) -> dict[str, str]:
        """Read at every call: a key that was replaced holds at once, and none is kept in memory for long."""
        key = self._key()
        if key is None:
            return {}
        if self._origin.scheme == "http" and not is_loopback(self._address):
            raise StrataError(Code.FORBIDDEN, f"a key is not sent to {self._origin}: anybody on the way could read it")
        return {"Authorization": f"Bearer {key.reveal()}"}

    def _key(self) -> Secret | None:
        for url, file in self._settings.keys.items():
            if origin_of(url) == self._origin:
                return read_secret(Path(file).expanduser())
        return None


def refuse(reply: Reply, what: str) -> StrataError:
    return StrataError(Code.UNAVAILABLE, f"{what} was answered with {reply.status}: {reply.words}")
